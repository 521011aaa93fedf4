"""A model's parameters and operations are those that were published, and those of our own models."""

import json

import pytest

from minipar.errors import UsageError
from minipar.more.experts.mixtral import MixtralConfig
from minipar.more.llama import LlamaConfig
from minipar.nn import GPTConfig
from minipar.plan.model import MODELS, ModelShape, find_model, utilization
from minipar.train.pretrained import save_pretrained

# Narayanan et al. 2021 (arXiv 2104.04473), table 1: heads, and parameters as printed (billions).
TABLE_1 = {
    "megatron-1.7b": (24, 1.7), "megatron-3.6b": (32, 3.6), "megatron-7.5b": (32, 7.5), "megatron-18b": (48, 18.4),
    "megatron-39b": (64, 39.1), "megatron-76b": (80, 76.1), "megatron-145b": (96, 145.6),
    "megatron-310b": (128, 310.1), "megatron-530b": (128, 529.6), "megatron-1t": (160, 1008.0),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_1)
def test_megatrons_printed_sizes_and_formulas(name):
    model = find_model(name)
    assert (model.heads, round(model.parameters / 1e9, 1)) == TABLE_1[name]
    h, layers, v = model.hidden, model.layers, model.vocab_size
    # Its P leaves the last LayerNorm out: 2h.
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + model.positions) / (12 * layers * h))
    assert model.parameters - 2 * h == pytest.approx(formula, rel=1e-12)
    for s in (1024, 2048):
        full = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        assert model.hardware_flops(s, "full") == pytest.approx(full, rel=1e-12)
        plain = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
        assert model.model_flops(s) == model.hardware_flops(s) == pytest.approx(plain, rel=1e-12)
        # Korthikanti et al. 2022, appendix A: selective recompute computes 4 s^2 h more in each layer.
        assert model.hardware_flops(s, "selective") - model.model_flops(s) == 4 * layers * s**2 * h


# Parameters of the model cards; of Jiang et al. 2024 also those that a token uses. Heads of the config.json.
CARDS = {
    "gpt2": (12, 124_439_808, None),
    "gpt2-medium": (16, 354_823_168, None),
    "gpt2-large": (20, 774_030_080, None),
    "gpt2-xl": (25, 1_557_611_200, None),
    "llama-7b": (32, 6_738_415_616, None),
    "llama-2-70b": (64, 68_976_648_192, None),
    "llama-3-8b": (32, 8_030_261_248, None),
    "LLaMA-3-70B": (64, 70_553_706_496, None),
    "llama-3-405b": (128, 405_853_388_800, None),
    "mixtral-8x7b": (32, 46_702_792_704, 12_879_925_248),
    "Mixtral-8x22B": (48, 140_620_634_112, 39_152_031_744),
}


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_those_of_the_model_cards(name):
    heads, parameters, active = CARDS[name]
    model = find_model(name)
    assert (model.heads, model.parameters, model.active_parameters) == (heads, parameters, active or parameters)


def test_a_tokens_operations_are_those_of_the_parameters_it_uses():
    """But for lookups and norms, and attention's."""
    model = find_model("mixtral-8x7b")
    matrices = model.active_parameters - model.vocab_size * model.hidden - (2 * model.layers + 1) * model.hidden
    assert model.model_flops(1) == 6 * matrices + 3 * model.layers * 4 * model.hidden


OURS = {
    "gpt2": GPTConfig(131, 17, 48, 3, 6),
    "llama": LlamaConfig(131, 48, 80, 3, 6, 2, 17),
    "llama, tied": LlamaConfig(131, 48, 80, 3, 6, 2, 17, tie_word_embeddings=True),
    "mixtral": MixtralConfig(131, 48, 80, 3, 6, 2, 17, num_local_experts=5, num_experts_per_tok=3),
}


@pytest.mark.parametrize("name", OURS)
def test_parameters_and_operations_are_those_of_our_own_models(name, tmp_path):
    config = OURS[name]
    model = config.build()
    save_pretrained(model, tmp_path)
    shape = find_model(str(tmp_path))
    assert shape.parameters == sum(p.size for p in model.parameters())
    assert shape.model_flops(16) == 3 * 16 * sum(config.segment_flops(16))
    idle = 3 * 2 * 3 * 48 * 80 if name == "mixtral" else 0  # 3 layers of 2 idle experts of 3 matrices
    assert shape.active_parameters == shape.parameters - idle


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "seconds", "percent"),
    [("megatron-22b", 8, 4, 1.10, 41.5), ("gpt3-175b", 64, 64, 13.75, 51.4), ("megatron-1t", 512, 512, 71.49, 56.3)],
)
def test_korthikantis_utilization_to_three_tenths_of_a_point(name, gpus, batch, seconds, percent):
    flops = batch * find_model(name).model_flops(2048)
    assert abs(100 * utilization(flops, seconds, gpus, 312e12) - percent) < 0.3


GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 14336,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}


def described(directory, text):
    (directory / "config.json").write_text(text)
    return find_model(str(directory))


def test_a_config_json_describes_a_model(tmp_path):
    for config, name in ((GPT2, "gpt2"), (LLAMA, "llama-3-8b"), (MIXTRAL, "mixtral-8x7b")):
        assert described(tmp_path, json.dumps(config)) == MODELS[name]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"model_type": ["gpt2"]}), "gpt2, llama or mixtral"),
        (json.dumps({"model_type": "gpt2"}), "n_layer = None"),
        (json.dumps(GPT2 | {"n_head": 7}), "heads 7"),
        (json.dumps(GPT2 | {"n_layer": 1.5}), "n_layer = 1.5"),
        (json.dumps(GPT2 | {"n_layer": True}), "n_layer = True"),
        (json.dumps(GPT2 | {"n_layer": 4097}), "n_layer = 4097"),
        (json.dumps(GPT2 | {"n_embd": 10**400}), "n_embd = 1000"),
        (json.dumps(GPT2 | {"vocab_size": float("nan")}), "vocab_size = nan"),
        (json.dumps(LLAMA | {"num_key_value_heads": 0}), "num_key_value_heads = 0"),
        (json.dumps(MIXTRAL | {"num_experts_per_tok": 9}), "top-k 9"),
        ('{"n_layer": 1' + 5000 * "0" + "}", "config.json"),
        (2**21 * " ", "config.json"),
        ("[3]", "config.json"),
    ],
)
def test_a_file_that_describes_no_model_is_refused(tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        described(tmp_path, text)
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UsageError, match=r"llama2-70b.*llama-2-70b"):
        find_model("llama2-70b")


@pytest.mark.parametrize(
    "sizes", [(0, 8, 2, 9), (1, 8, 3, 9), (4097, 8, 2, 9), (1, 8, 2, 10**9 + 1), (1, 8, 4, 9, 0, 3)]
)
def test_sizes_that_cannot_be_are_refused(sizes):
    assert ModelShape(4096, 8, 2, 10**9).layers == 4096
    with pytest.raises(UsageError):
        ModelShape(*sizes)
