"""Against Hugging Face transformers' MixtralForCausalLM, in float64: logits, loss, gradients, and files both ways."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference.double_precision import compute_in_float64
from transformers import MixtralConfig as TheirConfig
from transformers import MixtralForCausalLM
from transformers.models.mixtral import modeling_mixtral

from minipar.autograd import Tensor
from minipar.errors import UsageError
from minipar.nn import Mixtral, MixtralConfig
from minipar.nn.moe import moe_layers
from minipar.nn.pretrained import load_config, load_pretrained, save_pretrained

RANDOM = np.random.Generator(np.random.Philox(19))
TWO_OF_FOUR = MixtralConfig(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=16,
    rms_norm_eps=1e-3,  # large, and theta small, so that a mistake in either shows in the tenth digit
    rope_theta=100.0,
    num_local_experts=4,
    num_experts_per_tok=2,
)
SHAPES = {
    "2 of 4": TWO_OF_FOUR,
    "1 of 3, tied": replace(TWO_OF_FOUR, num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True),
    "3 of 8, 3 layers": replace(TWO_OF_FOUR, num_local_experts=8, num_experts_per_tok=3, num_hidden_layers=3),
    "k = E": replace(TWO_OF_FOUR, num_experts_per_tok=4),
    "one expert": replace(TWO_OF_FOUR, num_local_experts=1, num_experts_per_tok=1),
}


@pytest.fixture(autouse=True)
def float64_throughout(monkeypatch):
    """Their code computes norms, angles and the router's softmax in float32 in any model; here in float64."""
    names = ("MixtralRMSNorm", "MixtralRotaryEmbedding", "MixtralTopKRouter")
    compute_in_float64(monkeypatch, modeling_mixtral, *names)


def theirs(config):
    torch.manual_seed(0)
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
        num_local_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        initializer_range=0.3,  # large, so that every branch matters in the tenth digit
        bos_token_id=None,
        eos_token_id=None,
    )
    model = MixtralForCausalLM(settings).double()
    with torch.no_grad():
        for parameter in model.parameters():  # gains too: at 1 mistakes in them would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_experts_implementation("eager")  # the default, a grouped product, has no float64
    return model.eval()


def their_gradients(model):
    """By the names of the files: they keep the experts of a layer in one array, gate above up."""
    found = {}
    for name, parameter in model.named_parameters():
        name, gradient = name.replace(".mlp.", ".block_sparse_moe."), parameter.grad.numpy()
        head, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, both in enumerate(gradient):
                found[f"{head}.{e}.w1.weight"], found[f"{head}.{e}.w3.weight"] = np.split(both, 2)
        elif last == "down_proj":
            found |= {f"{head}.{e}.w2.weight": down for e, down in enumerate(gradient)}
        else:
            found[name] = gradient
    return found


def assert_same_function(model, reference, config):
    tokens, targets = (RANDOM.integers(0, config.vocab_size, (3, config.max_position_embeddings)) for _ in range(2))
    targets[1, 2:5] = -100
    logits = reference(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), torch.tensor(targets).reshape(-1))
    reference.zero_grad()
    loss.backward()
    np.testing.assert_allclose(model(tokens).data, logits.detach().numpy(), rtol=1e-10, atol=1e-10)
    ours = model.loss(tokens, targets)
    assert abs(ours.item() - loss.item()) <= 1e-10
    model.zero_grad()
    ours.backward()
    expected = their_gradients(reference)
    assert {name for name, _ in model.named_parameters()} == set(expected)
    for name, parameter in model.named_parameters():
        parameter.fold_tied_gradients()
        assert parameter.shape == expected[name].shape
        np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_directory_saved_there_computes_the_same_here(config, recompute, tmp_path):
    reference = theirs(config)
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype="float64", recompute=recompute)
    assert type(model) is Mixtral and model.config == replace(config, initializer_range=0.3)
    assert_same_function(model, reference, config)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_directory_exported_here_computes_the_same_there(config, tmp_path):
    model = Mixtral(config, seed=5, dtype="float64")
    for parameter in model.parameters():
        parameter.data += RANDOM.standard_normal(parameter.shape) * 0.1
    save_pretrained(model, tmp_path)
    reference, report = MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert set(report["missing_keys"]) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    reference.set_experts_implementation("eager")
    assert_same_function(model, reference.eval(), config)


ROUTERS = {  # the router's row of each expert; in a residual stream whose element 0 is large, that element decides
    "one expert has all tokens": (1, [-9.0, -9.0, 9.0, -9.0]),
    "two experts have none": (2, [-9.0, 3.0, 2.0, -9.0]),
    "an expert's tokens are all tokens' second": (2, [9.0, -9.0, 2.0, -8.0]),
    "all are equal": (4, [0.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("case", ROUTERS)
def test_uneven_routing_computes_the_same(case, tmp_path):
    k, rows = ROUTERS[case]
    reference = theirs(replace(TWO_OF_FOUR, num_experts_per_tok=k))
    with torch.no_grad():
        reference.model.embed_tokens.weight[:, 0] = 20.0
        for layer in reference.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[:, 0] = torch.tensor(rows)
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype="float64")
    assert_same_function(model, reference, model.config)
    used = {name for name, p in model.named_parameters() if "experts" in name and p.grad.any()}
    assert len(used) == 2 * 3 * {1: 1, 2: 2, 4: 4}[k]


@pytest.mark.parametrize("name", ["sliding_window", "router_jitter_noise", "hidden_act", "rope_scaling"])
def test_an_option_that_is_not_implemented_is_refused_by_name(name, tmp_path):
    theirs(TWO_OF_FOUR).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    other = {"sliding_window": 8, "router_jitter_noise": 0.1, "hidden_act": "gelu", "rope_scaling": {"factor": 2.0}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: other[name]}))
    with pytest.raises(UsageError, match=f"config.json: {name} is .*but minipar's mixtral has") as error:
        load_config(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_auxiliary_loss_is_theirs_over_k(k, monkeypatch):
    """Of one sample and layer. They count the slots of a token one by one, so their loss is k where all is even."""
    compute_in_float64(monkeypatch, modeling_mixtral, "load_balancing_loss_func")
    (layer,) = moe_layers(replace(TWO_OF_FOUR, num_hidden_layers=1, num_experts_per_tok=k).build(dtype="float64"))
    layer.gate.weight.data[...] = RANDOM.standard_normal(layer.gate.weight.shape)
    x = RANDOM.standard_normal((1, 7, 24))
    layer.aux_loss = 1 / 7
    layer(Tensor(x)).backward(np.zeros_like(x))
    weight = torch.tensor(layer.gate.weight.data, requires_grad=True)
    (modeling_mixtral.load_balancing_loss_func((torch.tensor(x[0]) @ weight.T,), 4, k) / k).backward()
    np.testing.assert_allclose(layer.gate.weight.grad, weight.grad.numpy(), rtol=1e-12, atol=1e-14)
