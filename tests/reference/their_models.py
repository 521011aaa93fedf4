"""Transformers' GPT-2, Llama and Mixtral with minipar's sizes, in float64, and their comparison with ours."""

from dataclasses import asdict

import numpy as np
import torch
import transformers
from reference.double_precision import compute_in_float64
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

MODELS = {
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
}
RANDOM = np.random.Generator(np.random.Philox(9))


def compute_everything_in_float64(monkeypatch):
    """Their code computes norms, angles and a router's softmax in float32 in any model; here the same in float64."""
    compute_in_float64(monkeypatch, modeling_llama, "LlamaRMSNorm", "LlamaRotaryEmbedding")
    names = ("MixtralRMSNorm", "MixtralRotaryEmbedding", "MixtralTopKRouter")
    compute_in_float64(monkeypatch, modeling_mixtral, *names)


def theirs(config):
    """Make their model with the sizes of minipar's config."""
    torch.manual_seed(0)
    settings = asdict(config) | {"bos_token_id": None, "eos_token_id": None}
    settings["initializer_range"] = 0.3  # large, so that every branch matters in the tenth digit
    kind = MODELS[config.model_type]
    if config.model_type == "gpt2":
        settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    model = kind(kind.config_class(**settings)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains too: at 0 and 1 mistakes in them would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return ready(model)


def read(directory, kind):
    """Read a directory with their code; all of its tensors have to be known there."""
    model, report = MODELS[kind].from_pretrained(directory, dtype=torch.float64, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(report["missing_keys"]) <= tied
    return ready(model)


def ready(model):
    if model.config.model_type == "mixtral":
        model.set_experts_implementation("eager")  # the default, a grouped product, has no float64
    return model.eval()


def their_gradients(model):
    """By the names of minipar: they keep the experts of a layer in one array, gate above up."""
    found = {}
    for name, parameter in model.named_parameters():
        name, gradient = name.removeprefix("transformer."), parameter.grad.numpy()
        if model.config.model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        head, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, both in enumerate(gradient):
                found[f"{head}.{e}.w1.weight"], found[f"{head}.{e}.w3.weight"] = np.split(both, 2)
        elif last == "down_proj":
            found |= {f"{head}.{e}.w2.weight": down for e, down in enumerate(gradient)}
        else:
            found[name] = gradient
    return found


def data(config):
    """Draw tokens and targets, some of which are ignored."""
    tokens, targets = RANDOM.integers(0, config.vocab_size, (2, 3, config.n_positions))
    targets[1, 2:5] = -100
    return tokens, targets


def their_loss(reference, tokens, targets):
    """Return their logits and loss, after its backward."""
    logits = reference(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    reference.zero_grad()
    loss.backward()
    return logits.detach().numpy(), loss.item()


def assert_same_function(model, reference):
    """Compare logits, loss and every gradient."""
    tokens, targets = data(model.config)
    logits, loss = their_loss(reference, tokens, targets)
    np.testing.assert_allclose(model(tokens).data, logits, rtol=1e-10, atol=1e-10)
    ours = model.loss(tokens, targets)
    assert abs(ours.item() - loss) <= 1e-10
    model.zero_grad()
    ours.backward()
    expected = their_gradients(reference)
    assert {name for name, _ in model.named_parameters()} == set(expected)
    for name, parameter in model.named_parameters():
        parameter.fold_tied_gradients()
        assert parameter.shape == expected[name].shape
        np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-10, atol=1e-10, err_msg=name)
