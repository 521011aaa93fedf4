"""Claims about what a model is to a planner: parameters and operations, against published figures and our own GPT."""

import json

import pytest

from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.plan.model import MODELS, ModelShape, find_model, utilization

# Narayanan et al. 2021 (arXiv 2104.04473), table 1: parameters as printed (billions).
TABLE_1 = {
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18b": 18.4,
    "megatron-39b": 39.1,
    "megatron-76b": 76.1,
    "megatron-145b": 145.6,
    "megatron-310b": 310.1,
    "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
}


@pytest.mark.parametrize("name", TABLE_1)
def test_megatrons_parameter_counts_to_the_printed_digit(name):
    assert round(find_model(name).parameters / 1e9, 1) == TABLE_1[name]


@pytest.mark.parametrize("name", TABLE_1)
@pytest.mark.parametrize("length", [1024, 2048])
def test_megatrons_formulas(name, length):
    model = find_model(name)
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


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "vocab", "positions"), [(2, 64, 4, 256, 32), (3, 48, 3, 131, 17)]
)
def test_the_count_is_that_of_our_own_gpt(layers, hidden, heads, vocab, positions):
    config = GPTConfig(vocab, positions, hidden, layers, heads)
    counted = sum(p.size for _, p in GPT(config).named_parameters())
    assert ModelShape(layers, hidden, heads, vocab, positions).parameters == counted


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),  # Hugging Face's model cards
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_published_counts(name, parameters):
    assert find_model(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "seconds", "percent"),
    [("megatron-22b", 8, 4, 1.10, 41.5), ("gpt3-175b", 64, 64, 13.75, 51.4), ("megatron-1t", 512, 512, 71.49, 56.3)],
)
def test_korthikantis_utilization_within_three_tenths_of_a_point(name, gpus, batch, seconds, percent):
    flops = batch * find_model(name).model_flops(2048)
    assert abs(100 * utilization(flops, seconds, gpus, 312e12) - percent) < 0.3


def test_a_directory_says_what_its_model_is(tmp_path):
    def described(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return find_model(str(tmp_path))

    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    assert described(model_type="gpt2", **sizes) == MODELS["gpt2"]
    llama = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128256}
    llama |= {"num_key_value_heads": 8, "intermediate_size": 14336}
    assert described(model_type="llama", **llama) == MODELS["llama-3-8b"]
    tied = described(model_type="llama", **llama, tie_word_embeddings=True)
    assert MODELS["llama-3-8b"].parameters - tied.parameters == 128256 * 4096
    for wrong in ({"model_type": "bert"}, {"model_type": "gpt2"}, {**sizes, "model_type": "gpt2", "n_head": 7}, {}):
        with pytest.raises(UsageError):
            described(**wrong)


@pytest.mark.parametrize("sizes", [(0, 8, 2, 9), (1, 8, 3, 9), (1, 8, 2, 0)])
def test_a_shape_that_cannot_be_is_refused(sizes):
    with pytest.raises(UsageError):
        ModelShape(*sizes)
