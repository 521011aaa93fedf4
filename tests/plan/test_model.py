"""A model's parameters and operations: against published figures and our own GPT. Files that describe no model."""

import json
import os

import pytest

from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Llama, LlamaConfig, Mixtral, MixtralConfig
from minipar.nn.pretrained import save_pretrained
from minipar.plan.model import MODELS, ModelShape, find_model, utilization

# Narayanan et al. 2021 (arXiv 2104.04473), table 1: parameters as printed (billions).
TABLE_1 = {
    "megatron-1.7b": 1.7, "megatron-3.6b": 3.6, "megatron-7.5b": 7.5, "megatron-18b": 18.4, "megatron-39b": 39.1,
    "megatron-76b": 76.1, "megatron-145b": 145.6, "megatron-310b": 310.1, "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_1)
@pytest.mark.parametrize("length", [1024, 2048])
def test_megatrons_printed_sizes_and_formulas(name, length):
    model = find_model(name)
    assert round(model.parameters / 1e9, 1) == TABLE_1[name]
    h, layers, v, s = model.hidden, model.layers, model.vocab_size, length
    # Its P leaves the last LayerNorm out: 2h.
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + model.positions) / (12 * layers * h))
    assert model.parameters - 2 * h == pytest.approx(formula, rel=1e-12)
    full = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model.hardware_flops(s, "full") == pytest.approx(full, rel=1e-12)
    plain = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.model_flops(s) == model.hardware_flops(s) == pytest.approx(plain, rel=1e-12)
    # Korthikanti et al. 2022, appendix A: selective recompute computes 4 s^2 h more in each layer.
    assert model.hardware_flops(s, "selective") - model.model_flops(s) == 4 * layers * s**2 * h


@pytest.mark.parametrize("sizes", [(2, 64, 4, 256, 32), (3, 48, 3, 131, 17)])
def test_parameters_are_those_of_our_own_gpt(sizes):
    layers, hidden, heads, vocab, positions = sizes
    gpt = GPT(GPTConfig(vocab, positions, hidden, layers, heads))
    shape = ModelShape(layers, hidden, heads, vocab, positions)
    assert shape.parameters == sum(p.size for p in gpt.parameters())
    assert shape.model_flops(positions) == 3 * gpt.config.forward_flops(1, positions)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_operations_are_those_of_our_own_llama(tied, tmp_path):
    config = LlamaConfig(131, 48, 80, 3, 6, 2, 17, tie_word_embeddings=tied)
    model = Llama(config)
    save_pretrained(model, tmp_path)
    shape = find_model(str(tmp_path))
    assert (shape.tied, shape.groups, shape.inner) == (tied, 2, 80)
    assert shape.parameters == sum(p.size for p in model.parameters())
    assert shape.model_flops(16) == 3 * config.forward_flops(1, 16)


def test_parameters_and_operations_are_those_of_our_own_mixtral(tmp_path):
    config = MixtralConfig(131, 48, 80, 3, 6, 2, 17, num_local_experts=5, num_experts_per_tok=3)
    model = Mixtral(config)
    save_pretrained(model, tmp_path)
    shape = find_model(str(tmp_path))
    assert (shape.experts, shape.top_k) == (5, 3)
    assert shape.parameters == sum(p.size for p in model.parameters())
    assert shape.active_parameters == config.active_parameters
    assert shape.model_flops(16) == 3 * config.forward_flops(1, 16)


@pytest.mark.parametrize(
    ("name", "parameters", "active", "billions"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248, (46.7, 12.9)),  # as Jiang et al. 2024 and the cards print them
        ("Mixtral-8x22B", 140_620_634_112, 39_152_031_744, (141, 39)),
    ],
)
def test_a_mixtral_has_all_its_experts_and_uses_two(name, parameters, active, billions):
    model = find_model(name)
    assert (model.parameters, model.active_parameters) == (parameters, active)
    digits = 1 if "7" in name else 0
    assert (round(parameters / 1e9, digits), round(active / 1e9, digits)) == billions
    # A token's operations are those of the parameters that it uses, but for lookups and norms, and attention's.
    matrices = active - model.vocab_size * model.hidden - (2 * model.layers + 1) * model.hidden
    assert model.model_flops(1) == 6 * matrices + 3 * model.layers * 4 * model.hidden
    dense = find_model("llama-3-8b")
    assert dense.active_parameters == dense.parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),  # Hugging Face's model cards
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("LLaMA-3-70B", 70_553_706_496),
    ],
)
def test_parameters_are_those_of_the_model_cards(name, parameters):
    assert find_model(name).parameters == parameters


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
    assert described(tmp_path, json.dumps(GPT2)) == described(tmp_path, json.dumps(GPT2 | {"n_inner": None}))
    assert described(tmp_path, json.dumps(GPT2)) == MODELS["gpt2"]
    assert described(tmp_path, json.dumps(LLAMA)) == MODELS["llama-3-8b"]
    assert described(tmp_path, json.dumps(MIXTRAL)) == MODELS["mixtral-8x7b"]
    tied = described(tmp_path, json.dumps(LLAMA | {"tie_word_embeddings": True}))
    assert MODELS["llama-3-8b"].parameters - tied.parameters == 128256 * 4096


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"model_type": "bert"}), "expected gpt2, llama or mixtral"),
        (json.dumps({"model_type": ["gpt2"]}), "expected gpt2, llama or mixtral"),
        (json.dumps({}), "expected gpt2, llama or mixtral"),
        (json.dumps(MIXTRAL | {"num_local_experts": None}), "num_local_experts = None"),
        (json.dumps(MIXTRAL | {"num_experts_per_tok": 0}), "num_experts_per_tok = 0"),
        (json.dumps(MIXTRAL | {"num_experts_per_tok": 9}), "top-k 9 is more than experts 8"),
        (json.dumps({"model_type": "gpt2"}), "n_layer = None"),
        (json.dumps(GPT2 | {"n_head": 7}), "hidden 768 is not divisible by heads 7"),
        (json.dumps(GPT2 | {"n_layer": 1.5}), "n_layer = 1.5, expected a whole number from 1 to 4096"),
        (json.dumps(GPT2 | {"n_layer": True}), "n_layer = True"),
        (json.dumps(GPT2 | {"n_layer": 10**6}), "n_layer = 1000000, expected a whole number from 1 to 4096"),
        (json.dumps(GPT2 | {"n_inner": {}}), "n_inner = {}"),
        (json.dumps(GPT2 | {"vocab_size": float("nan")}), "vocab_size = nan"),
        (json.dumps(GPT2 | {"n_embd": 10**400}), "n_embd = 1000"),
        (json.dumps(LLAMA | {"num_key_value_heads": 0}), "num_key_value_heads = 0"),
        (json.dumps(LLAMA | {"intermediate_size": "14336"}), "intermediate_size = '14336'"),
        ('{"n_layer": 1' + 5000 * "0" + "}", "is not JSON"),
        (100_000 * "[", "nested too deeply"),
        (2**21 * " ", "is not JSON"),
        ("[]", "expected a JSON object, found list"),
    ],
)
def test_a_file_that_describes_no_model_is_refused(tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        described(tmp_path, text)
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_a_pipe_and_a_device_are_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match="not a regular file"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="not a regular file"):
        find_model(str(tmp_path))


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UsageError, match=r"--model llama2-70b: .*; did you mean llama-2-70b\?"):
        find_model("llama2-70b")


def test_the_largest_sizes_are_what_the_refusal_says():
    assert ModelShape(4096, 8, 2, 10**9).layers == 4096
    with pytest.raises(UsageError, match="layers = 4097, expected a whole number from 1 to 4096"):
        ModelShape(4097, 8, 2, 9)
    with pytest.raises(UsageError, match="= 1000000001, expected a whole number from 1 to 1000000000"):
        ModelShape(1, 8, 2, 10**9 + 1)
    assert ModelShape(1, 8, 2, 9, 0).positions == 0


# As the papers and the config.json of each model print them: layers, hidden, heads, vocabulary, positions; with a gated
# MLP heads of keys and values and inner columns instead of positions; of Mixtral experts and those of a token besides.
PRINTED = """
    gpt2             12   768  12  50257 1024    gpt2-medium      24  1024  16  50257 1024
    gpt2-large       36  1280  20  50257 1024    gpt2-xl          48  1600  25  50257 1024
    gpt3-175b        96 12288  96  51200 2048    megatron-1.7b    24  2304  24  51200 2048
    megatron-3.6b    30  3072  32  51200 2048    megatron-7.5b    36  4096  32  51200 2048
    megatron-18b     40  6144  48  51200 2048    megatron-22b     48  6144  64  51200 2048
    megatron-39b     48  8192  64  51200 2048    megatron-76b     60 10240  80  51200 2048
    megatron-145b    80 12288  96  51200 2048    megatron-310b    96 16384 128  51200 2048
    megatron-530b   105 20480 128  51200 2048    megatron-1t     128 25600 160  51200 2048
    llama-7b         32  4096  32  32000 32 11008    llama-2-70b  80  8192  64  32000 8 28672
    llama-3-8b       32  4096  32 128256  8 14336    llama-3-70b  80  8192  64 128256 8 28672
    llama-3-405b    126 16384 128 128256  8 53248
    mixtral-8x7b     32  4096  32  32000  8 14336 8 2    mixtral-8x22b    56  6144  48  32000  8 16384 8 2
"""


def test_named_models_have_the_sizes_that_were_printed():
    words = []
    for name, model in MODELS.items():
        own = [model.layers, model.hidden, model.heads, model.vocab_size]
        own += [model.kv_heads, model.ffn] if model.gated else [model.positions]
        own += [model.experts, model.top_k] if model.experts else []
        words += [name, *map(str, own)]
        tied = not model.gated
        assert (model.tied, model.biases, model.norm_biases) == (tied, tied, tied)
    assert words == PRINTED.split()


@pytest.mark.parametrize("sizes", [(0, 8, 2, 9), (1, 8, 3, 9), (1, 8, 2, 0), (1, 8, 2, 9, -1), (1, 8, 4, 9, 0, 3)])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(UsageError):
        ModelShape(*sizes)


def test_experts_have_no_biases_and_are_at_least_as_many_as_k():
    with pytest.raises(UsageError, match="a layer of experts has no biases"):
        ModelShape(1, 8, 2, 9, experts=4)
    with pytest.raises(UsageError, match="top-k 2 is more than experts 1"):
        ModelShape(1, 8, 2, 9, top_k=2)
