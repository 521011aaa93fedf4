"""Against Hugging Face transformers, in float64: logits, loss, every gradient and files both ways, of three models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference.double_precision import compute_in_float64
from reference.their_models import (
    RANDOM,
    assert_same_function,
    compute_everything_in_float64,
    data,
    read,
    their_gradients,
    their_loss,
    theirs,
)
from training import joined
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.mixtral import modeling_mixtral

from minipar.autograd import Tensor
from minipar.comm import run_local
from minipar.generate import generate
from minipar.more.experts.mixtral import MixtralConfig, moe_layers
from minipar.more.llama import LlamaConfig
from minipar.nn import GPT, GPTConfig
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.train.pretrained import load_pretrained, save_pretrained

GPT2 = GPTConfig(vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=3)
LLAMA = LlamaConfig(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=16,
    rms_norm_eps=1e-3,  # large, and theta small, so that a mistake in either shows in the tenth digit
    rope_theta=100.0,
)
MIXTRAL = MixtralConfig(**vars(LLAMA), num_local_experts=4, num_experts_per_tok=2)
SHAPES = {
    "gpt2": GPT2,
    "gpt2, 1 head": GPTConfig(vocab_size=64, n_positions=9, n_embd=32, n_layer=3, n_head=1),
    "gpt2, another epsilon": replace(GPT2, layer_norm_epsilon=0.1),
    "llama": LLAMA,
    "llama, tied": replace(LLAMA, tie_word_embeddings=True),
    "llama, 6 heads of keys": replace(LLAMA, num_key_value_heads=6, num_hidden_layers=3),
    "llama, 1 head, tied": replace(LLAMA, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True),
    "mixtral, 2 of 4": MIXTRAL,
    "mixtral, 1 of 3, tied": replace(MIXTRAL, num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True),
    "mixtral, 3 of 8": replace(MIXTRAL, num_local_experts=8, num_experts_per_tok=3, num_hidden_layers=3),
    "mixtral, all": replace(MIXTRAL, num_experts_per_tok=4),
    "mixtral, 1 expert": replace(MIXTRAL, num_local_experts=1, num_experts_per_tok=1),
}


@pytest.fixture(autouse=True)
def float64_throughout(monkeypatch):
    compute_everything_in_float64(monkeypatch)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_directory_saved_there_computes_the_same_here(name, recompute, tmp_path):
    reference = theirs(SHAPES[name])
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype="float64", recompute=recompute)
    assert model.config == replace(SHAPES[name], initializer_range=0.3)
    assert_same_function(model, reference)


@pytest.mark.parametrize("name", SHAPES)
def test_a_directory_exported_here_computes_the_same_there(name, tmp_path):
    model = SHAPES[name].build(seed=5, dtype="float64")
    for parameter in model.parameters():
        parameter.data += RANDOM.standard_normal(parameter.shape) * 0.1
    save_pretrained(model, tmp_path)
    assert_same_function(model, read(tmp_path, SHAPES[name].model_type))


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_directory_of_16_bits_loads_exactly(name, dtype, tmp_path):
    """transformers writes the weights rounded to the dtype, reads them again, and computes with them in float64."""
    theirs(SHAPES[name]).to(dtype).save_pretrained(tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    model = load_pretrained(tmp_path, dtype="float64")
    weights = dict(reference.named_parameters())
    assert all(np.array_equal(p.data, weights[name].detach().numpy()) for name, p in model.named_parameters())
    assert_same_function(model, reference)


# ---- GPT-2 -----------------------------------------------------------------------------------------------------------


def test_the_base_model_without_a_head_loads_too(tmp_path):
    reference = theirs(GPT2)
    reference.transformer.save_pretrained(tmp_path)
    assert_same_function(load_pretrained(tmp_path, dtype="float64"), reference)


@pytest.mark.parametrize("name", ["gpt2", "gpt2, 1 head"])
def test_greedy_text_is_that_of_generate_there(name, tmp_path):
    """As many tokens as the positions allow: there, a longer text is an error."""
    config = SHAPES[name]
    save_pretrained(GPT(replace(config, initializer_range=0.5), seed=5, dtype="float64"), tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    prompt = [3, 1, 4]
    count = config.n_positions - len(prompt)
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    theirs_text = reference.generate(torch.tensor([prompt]), **options)[0].tolist()
    ours = generate(load_pretrained(tmp_path), prompt, count, temperature=0.0, seed=0)
    assert ours == theirs_text and len(set(ours)) > 3


# ---- Llama -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [3, 6])
def test_ranks_that_share_kv_heads_compute_the_same(kv_heads, tmp_path):
    config = replace(LLAMA, num_key_value_heads=kv_heads, intermediate_size=30)
    reference = theirs(config)
    reference.save_pretrained(tmp_path)
    tokens, targets = data(config)
    _, loss = their_loss(reference, tokens, targets)
    expected = their_gradients(reference)

    def rank(comm):
        model = load_pretrained(tmp_path, dtype="float64")
        tensor = tensor_parallel(model, comm)
        own = model.loss(tokens, targets)
        own.backward()
        tensor.sum_partial(model.parameters())
        return own.item(), {name: joined(comm, p, p.grad) for name, p in model.named_parameters()}

    for own, gradients in run_local(3, rank):
        assert abs(own - loss) <= 1e-10
        for name, gradient in expected.items():
            np.testing.assert_allclose(gradients[name], gradient, rtol=1e-10, atol=1e-10, err_msg=name)


# ---- Mixtral ---------------------------------------------------------------------------------------------------------

ROUTERS = {  # the router's row of each expert; in a residual stream whose element 0 is large, that element decides
    "one expert has all tokens": (1, [-9.0, -9.0, 9.0, -9.0]),
    "two experts have none": (2, [-9.0, 3.0, 2.0, -9.0]),
    "an expert's tokens are all tokens' second": (2, [9.0, -9.0, 2.0, -8.0]),
    "all are equal": (4, [0.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("case", ROUTERS)
def test_uneven_routing_computes_the_same(case, tmp_path):
    k, rows = ROUTERS[case]
    reference = theirs(replace(MIXTRAL, num_experts_per_tok=k))
    with torch.no_grad():
        reference.model.embed_tokens.weight[:, 0] = 20.0
        for layer in reference.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[:, 0] = torch.tensor(rows)
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype="float64")
    assert_same_function(model, reference)
    used = {name for name, p in model.named_parameters() if "experts" in name and p.grad.any()}
    assert len(used) == 2 * 3 * {1: 1, 2: 2, 4: 4}[k]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_auxiliary_loss_is_theirs_over_k(k, monkeypatch):
    """Of one sample and layer. They count the slots of a token one by one, so their loss is k where all is even."""
    compute_in_float64(monkeypatch, modeling_mixtral, "load_balancing_loss_func")
    (layer,) = moe_layers(replace(MIXTRAL, num_hidden_layers=1, num_experts_per_tok=k).build(dtype="float64"))
    layer.gate.weight.data[...] = RANDOM.standard_normal(layer.gate.weight.shape)
    x = RANDOM.standard_normal((1, 7, 24))
    layer.aux_loss = 1 / 7
    layer(Tensor(x)).backward(np.zeros_like(x))
    weight = torch.tensor(layer.gate.weight.data, requires_grad=True)
    (modeling_mixtral.load_balancing_loss_func((torch.tensor(x[0]) @ weight.T,), 4, k) / k).backward()
    np.testing.assert_allclose(layer.gate.weight.grad, weight.grad.numpy(), rtol=1e-12, atol=1e-14)
