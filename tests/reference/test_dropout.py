"""Against PyTorch, in float64: dropout, and attention with dropout on its probabilities, given the same mask."""

import numpy as np
import pytest
import torch

from minipar.nn import GPT, Dropout, DropoutKeys, GPTConfig, dropping

RANDOM = np.random.Generator(np.random.Philox(33))


def torch_attention(qkv, heads, keep, probability):
    batch, length, width = qkv.shape
    q, k, v = (part.reshape(batch, length, heads, -1).transpose(1, 2) for part in qkv.split(width // 3, dim=-1))
    scores = q @ k.transpose(-1, -2) / (width // 3 // heads) ** 0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    out = (scores.softmax(-1) * keep / (1 - probability)) @ v
    return out.transpose(1, 2).reshape(batch, length, width // 3)


def drawn(name, shape, probability):
    """A mask as a model draws it."""
    with dropping(DropoutKeys(seed=1, step=2, samples=range(shape[0]))):
        return Dropout(name, probability).mask(shape)


def test_the_gpts_loss_and_every_gradient_with_gpt2s_dropouts():
    """GPT-2 written down for torch, with a mask in each of the places where transformers' GPT2LMHeadModel has one."""
    p, rows = 0.2, RANDOM.integers(0, 13, (2, 9))
    model = GPT(GPTConfig(13, 8, 12, 2, 3), dtype="float64", dropout=p)
    for parameter in model.parameters():
        parameter.data += 0.1 * RANDOM.standard_normal(parameter.shape)  # biases too
    w = {name: torch.tensor(x, requires_grad=True) for name, x in model.state_dict().items()}

    def drop(x, name):
        return x * torch.tensor(drawn(name, tuple(x.shape), p)) / (1 - p)

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, (12,), w[f"{name}.weight"], w[f"{name}.bias"])

    def project(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = drop(w["wte.weight"][rows[:, :8]] + w["wpe.weight"], "drop")
    for h in ("h.0", "h.1"):
        keep = torch.tensor(drawn(f"{h}.attn.attn_dropout", (2, 3, 8, 8), p))
        y = torch_attention(project(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn"), 3, keep, p)
        x = x + drop(project(y, f"{h}.attn.c_proj"), f"{h}.attn.resid_dropout")
        y = torch.nn.functional.gelu(project(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + drop(project(y, f"{h}.mlp.c_proj"), f"{h}.mlp.dropout")
    logits = norm(x, "ln_f") @ w["wte.weight"].T
    theirs = torch.nn.functional.cross_entropy(logits.reshape(-1, 13), torch.tensor(rows[:, 1:].reshape(-1)))
    theirs.backward()
    with dropping(DropoutKeys(seed=1, step=2, samples=range(2))):
        ours = model.loss(rows[:, :8], rows[:, 1:])
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-13)
    for name, parameter in model.named_parameters():
        parameter.fold_tied_gradients()
        np.testing.assert_allclose(parameter.grad, w[name].grad.numpy(), rtol=1e-9, atol=1e-14, err_msg=name)
