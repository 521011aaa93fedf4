"""Claims about Llama: names and shapes, initial values, positions, its files, and what GPT and Llama have alike."""

import json
import os
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minipar.autograd import Tensor, flop_counter
from minipar.autograd.gradcheck import gradcheck
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Llama, LlamaConfig
from minipar.nn.llama import Block
from minipar.nn.pretrained import load_pretrained, save_pretrained

SMALL = LlamaConfig(11, 8, 12, 2, 4, 2, 6)
TIED = replace(SMALL, tie_word_embeddings=True)
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 0, 10, 0, 5]])
TARGETS = np.array([[2, 3, 4, 5, 6], [0, 10, 0, 5, -100]])


def test_names_and_shapes_are_hugging_faces():
    block = {
        "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
        "input_layernorm": (8,), "post_attention_layernorm": (8,),
    }  # fmt: skip
    expected = {"model.embed_tokens.weight": (11, 8)}
    expected |= {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in block.items()}
    expected |= {"model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    shapes = {name: p.shape for name, p in Llama(SMALL).named_parameters()}
    assert shapes == expected and list(shapes) == list(expected)
    del expected["lm_head.weight"]
    assert {name: p.shape for name, p in Llama(TIED).named_parameters()} == expected


def test_llama_7b_has_the_published_number_of_parameters():
    """6,738,415,616, as `transformers` counts them."""
    assert LlamaConfig().parameters == 6_738_415_616


@pytest.mark.parametrize("config", [SMALL, TIED, GPTConfig(11, 6, 8, 2, 2)])
def test_a_config_counts_its_models_parameters_and_products(config):
    model = config.build(dtype="float64")
    assert type(model) is {"llama": Llama, "gpt2": GPT}[config.model_type]
    assert config.parameters == sum(p.size for p in model.parameters())
    flops = []
    with flop_counter(flops.append):
        model.loss_sum(TOKENS, TARGETS)
    assert sum(flops) == config.forward_flops(2, 5)


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_every_matrix_starts_from_values_of_its_own(config):
    state = Llama(config, dtype="float64").state_dict()
    drawn = [array.reshape(-1)[:20].tobytes() for array in state.values() if array.ndim == 2]
    assert len(set(drawn)) == len(drawn)
    assert all((array == 1).all() for array in state.values() if array.ndim == 1)


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_the_gradient_of_the_whole_model_passes_the_checker(config):
    model = Llama(config, dtype="float64")
    random = np.random.Generator(np.random.Philox(3))
    names = [name for name, _ in model.named_parameters()]
    values = [random.standard_normal(p.shape) * 0.5 for p in model.parameters()]
    modules = dict(model.named_modules())

    def loss(*leaves):
        for name, leaf in zip(names, leaves, strict=True):
            modules[name.rpartition(".")[0]].weight = leaf
        if config.tie_word_embeddings:
            model.head_weight = leaves[0]  # one leaf in both places: its gradient must hold both uses
        return model.loss(TOKENS, TARGETS)

    gradcheck(loss, values)


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_recompute_gives_the_same_bits(config):
    results = []
    for recompute in (False, True):
        model = Llama(config, dtype="float64", recompute=recompute)
        loss = model.loss(TOKENS, TARGETS)
        loss.backward()
        results.append([loss.item(), *(p.grad.tobytes() for p in model.parameters())])
    assert results[0] == results[1]


@pytest.mark.parametrize("config", [SMALL, GPTConfig(11, 6, 8, 2, 2)])
def test_positions_come_from_one_place(config):
    """Tokens in another order, each at its own position, have the same embeddings, queries and keys."""
    model = config.build(dtype="float64")
    seen = []

    def recorded(qkv, heads, kv_heads, *dropout):
        seen.append(qkv.data)
        return qkv[..., :8]

    for _, module in model.named_modules():
        if hasattr(module, "kv_heads"):
            module.attention = recorded
    order = np.array([3, 0, 4, 1, 2])
    expected = model(TOKENS).data
    model.positions = lambda length: order[:length]
    assert np.array_equal(model(TOKENS[:, order]).data, expected[:, order])
    assert all(np.array_equal(a[:, order], b) for a, b in zip(seen[:2], seen[2:], strict=True))
    model.positions = lambda length: np.arange(length)
    assert not np.allclose(model(TOKENS[:, order]).data, expected[:, order])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 9}, "hidden 9 is not divisible by heads 4"),
        ({"num_key_value_heads": 3}, "heads 4 are not divisible by kv-heads 3"),
        ({"hidden_size": 12}, "hidden/heads = 12/4 is odd, but rotary positions rotate pairs"),
        ({"intermediate_size": 0}, "intermediate_size = 0, expected at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **sizes)


def test_without_kv_heads_each_head_has_its_own():
    assert replace(SMALL, num_key_value_heads=None).num_key_value_heads == 4


def test_a_llama_larger_than_memory_is_refused(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 8, "SC_PHYS_PAGES": SMALL.parameters - 1}.get)
    with pytest.raises(UsageError, match=f"hidden 8 and ffn 12: {Decimal(SMALL.parameters):.6g} parameters "):
        Llama(SMALL, dtype="float64")


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_export_and_load_return_the_same_model(config, tmp_path):
    model = Llama(config, dtype="float64")
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path, dtype="float64")
    assert loaded.config == config
    assert all(np.array_equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())


def edited(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"rope_theta": "far"}, "rope_theta is 'far', expected a finite number"),
        ({"rope_parameters": None}, "rope_parameters is None, but minipar's llama"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads is 2.0, expected an integer"),
        ({"num_key_value_heads": 3}, "heads 4 are not divisible by kv-heads 3"),
        ({"num_hidden_layers": 10**9}, "no tensor of layer 2; it has 2 layers, config.json 1000000000"),
        ({"num_key_value_heads": None}, r"k_proj.weight has shape \(4, 8\), expected \(8, 8\)"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_a_bad_directory_is_refused_by_name(changes, message, tmp_path):
    save_pretrained(Llama(SMALL), tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        load_pretrained(tmp_path)


def test_a_tied_file_may_hold_its_head_and_old_buffers(tmp_path):
    model = Llama(TIED)
    save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    state = load_pretrained(tmp_path).state_dict()
    assert all(np.array_equal(x, state[name]) for name, x in model.state_dict().items())


def test_an_untied_file_without_a_head_is_refused(tmp_path):
    save_pretrained(Llama(TIED), tmp_path)
    edited(tmp_path, tie_word_embeddings=False)
    with pytest.raises(UsageError, match="missing lm_head.weight"):
        load_pretrained(tmp_path)


def test_a_block_adds_attention_and_then_the_mlp():
    block = Block(Llama(SMALL), "model.layers.0")
    random = np.random.Generator(np.random.Philox(1))
    block.materialize()
    for parameter in block.parameters():
        parameter.data[...] = random.standard_normal(parameter.shape)
    x = random.standard_normal((2, 5, 8)).astype(np.float32)
    attention = block.self_attn(block.input_layernorm(Tensor(x))).data
    mlp = block.mlp(block.post_attention_layernorm(Tensor(x + attention))).data
    np.testing.assert_allclose(block(Tensor(x)).data, x + attention + mlp, rtol=1e-4, atol=1e-4)
