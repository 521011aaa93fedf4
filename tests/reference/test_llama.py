"""Against Hugging Face transformers' LlamaForCausalLM, in float64: logits, loss, all gradients, and files both ways."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference.double_precision import compute_in_float64
from training import joined
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import Llama, LlamaConfig
from minipar.nn.pretrained import load_config, load_pretrained, save_pretrained
from minipar.parallel.tensor.plan import tensor_parallel

RANDOM = np.random.Generator(np.random.Philox(9))
GROUPED = LlamaConfig(
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
SHAPES = [
    GROUPED,
    replace(GROUPED, tie_word_embeddings=True),
    replace(GROUPED, num_key_value_heads=6, num_hidden_layers=3),
    replace(GROUPED, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True),
]


@pytest.fixture(autouse=True)
def float64_throughout(monkeypatch):
    """Their code computes norms and angles in float32 in any model; here the same code computes them in float64."""
    compute_in_float64(monkeypatch, modeling_llama, "LlamaRMSNorm", "LlamaRotaryEmbedding")


def theirs(config, seed=0):
    torch.manual_seed(seed)
    settings = TheirConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=0.3,  # large, so that every branch matters in the tenth digit
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(settings).double()
    with torch.no_grad():
        for parameter in model.parameters():  # gains too: at 1 mistakes in them would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def data(config):
    tokens = RANDOM.integers(0, config.vocab_size, (3, config.max_position_embeddings))
    targets = RANDOM.integers(0, config.vocab_size, (3, config.max_position_embeddings))
    targets[1, 2:5] = -100
    return tokens, targets


def assert_same_function(model, reference, config):
    tokens, targets = data(config)
    logits = reference(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), torch.tensor(targets).reshape(-1))
    reference.zero_grad()
    loss.backward()
    np.testing.assert_allclose(model(tokens).data, logits.detach().numpy(), rtol=1e-10, atol=1e-10)
    ours = model.loss(tokens, targets)
    assert abs(ours.item() - loss.item()) <= 1e-10
    model.zero_grad()
    ours.backward()
    gradients = {name: p.grad.numpy() for name, p in reference.named_parameters()}
    assert [name for name, _ in model.named_parameters()] == list(gradients)
    for name, parameter in model.named_parameters():
        parameter.fold_tied_gradients()
        assert parameter.shape == gradients[name].shape
        np.testing.assert_allclose(parameter.grad, gradients[name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", SHAPES)
def test_a_directory_saved_there_computes_the_same_here(config, recompute, tmp_path):
    reference = theirs(config)
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype="float64", recompute=recompute)
    assert model.config == replace(config, initializer_range=0.3)
    assert_same_function(model, reference, config)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_more_ranks_than_kv_heads_compute_the_same(kv_heads, tmp_path):
    """Six tensor-parallel ranks with a head of queries each copy the heads of keys and values."""
    config = replace(GROUPED, num_key_value_heads=kv_heads, intermediate_size=30)
    reference = theirs(config)
    reference.save_pretrained(tmp_path)
    tokens, targets = data(config)
    logits = reference(torch.tensor(tokens)).logits.reshape(-1, config.vocab_size)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets).reshape(-1))
    loss.backward()

    def rank(comm):
        model = load_pretrained(tmp_path, dtype="float64")
        tensor = tensor_parallel(model, comm)
        own = model.loss(tokens, targets)
        own.backward()
        tensor.sum_partial(model.parameters())
        return own.item(), {name: joined(comm, p, p.grad) for name, p in model.named_parameters()}

    for own, gradients in run_local(6, rank):
        assert abs(own - loss.item()) <= 1e-10
        for name, parameter in reference.named_parameters():
            np.testing.assert_allclose(gradients[name], parameter.grad.numpy(), rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("config", SHAPES[:2])
@pytest.mark.parametrize(
    ("dtype", "shards"), [(torch.bfloat16, 1), (torch.bfloat16, 3), (torch.float16, 3), (torch.float32, 3)]
)
def test_a_directory_of_16_bits_or_shards_loads_exactly(config, dtype, shards, tmp_path):
    """transformers writes the weights rounded to the dtype, reads them again, and computes with them in float64."""
    written = theirs(config).to(dtype)
    size = sum(p.numel() * p.element_size() for p in written.parameters())
    written.save_pretrained(tmp_path, max_shard_size=size // shards + 1)
    assert (len(list(tmp_path.glob("model-*.safetensors"))) > 1) == (shards > 1)
    assert (tmp_path / "model.safetensors").exists() == (shards == 1)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    model = load_pretrained(tmp_path, dtype="float64")
    weights = dict(reference.named_parameters())
    assert all(np.array_equal(p.data, weights[name].detach().numpy()) for name, p in model.named_parameters())
    assert_same_function(model, reference, config)


@pytest.mark.parametrize("config", SHAPES)
def test_a_directory_exported_here_computes_the_same_there(config, tmp_path):
    model = Llama(config, seed=5, dtype="float64")
    for parameter in model.parameters():
        parameter.data += RANDOM.standard_normal(parameter.shape) * 0.1
    save_pretrained(model, tmp_path)
    reference, report = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert set(report["missing_keys"]) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert_same_function(model, reference.eval(), config)


def test_a_config_of_transformers_4_gives_the_same_shape(tmp_path):
    """Version 4 wrote rope_theta next to the sizes; 5 writes rope_parameters."""
    theirs(GROUPED).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    new = load_config(tmp_path)
    content["rope_theta"] = content.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(content | {"rope_scaling": None}))
    assert load_config(tmp_path) == new and new.rope_theta == 100.0


UNSUPPORTED = {
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "head_dim": 8,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_option_that_is_not_implemented_is_refused_by_name(name, tmp_path):
    theirs(GROUPED).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: UNSUPPORTED[name]}))
    with pytest.raises(UsageError, match=f"config.json: {name} is .*(but minipar's llama has|expected 4)") as error:
        load_pretrained(tmp_path)
    assert "\n" not in str(error.value)
