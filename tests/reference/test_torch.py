"""Against PyTorch, in float64: single operations and their gradients, optimizers, clipping, and DDP's arithmetic."""

import numpy as np
import pytest
import torch

from minipar.autograd import (
    Tensor,
    causal_attention,
    cross_entropy_sum,
    embedding,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    stack,
    where,
)
from minipar.more.context.blockwise import blockwise_attention
from minipar.more.llama import swiglu
from minipar.nn import SGD, AdamW, Parameter
from minipar.parallel.grad_norm import clip_grad_norm

RANDOM = np.random.Generator(np.random.Philox(10))
F = torch.nn.functional
INDEX = np.array([[0, 3, 3], [1, 0, 4]])
TARGETS = np.array([2, -100, 0, 5])
MASK = np.array([[True, False, True], [False, False, True]])


def normal(*shape):
    return RANDOM.standard_normal(shape)


def torch_attention(qkv, heads, kv_heads):
    batch, length, width = qkv.shape
    x = qkv.reshape(batch, length, heads + 2 * kv_heads, -1).transpose(1, 2)
    q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch, length, -1)


OPERATIONS = {
    "arithmetic": (lambda a, b: (a * b + a / (b * b + 1) - b) ** 2.0, lambda a, b: (a * b + a / (b * b + 1) - b) ** 2.0,
                   [normal(3, 1, 4), normal(2, 1)]),
    "functions": (lambda a: (a.tanh() * a.exp() + (a * a + 1).log()), lambda a: a.tanh() * a.exp() + (a * a + 1).log(),
                  [normal(3, 4)]),
    "matmul": (lambda a, b: a @ b, lambda a, b: a @ b, [normal(2, 1, 3, 4), normal(5, 4, 2)]),
    "views": (lambda a: a.reshape(6, 4).transpose(1, 0)[1:3, ::2], lambda a: a.reshape(6, 4).T[1:3, ::2],
              [normal(2, 3, 4)]),
    "indexing": (lambda a: a[INDEX], lambda a: a[torch.tensor(INDEX)], [normal(5, 2)]),
    "reductions": (lambda a: a.sum((0, 2)) * a.mean(), lambda a: a.sum((0, 2)) * a.mean(), [normal(2, 3, 4)]),
    "more functions": (lambda a: a.abs().sqrt() * a.sigmoid(), lambda a: a.abs().sqrt() * a.sigmoid(), [normal(3, 4)]),
    "log_softmax": (lambda a: a.log_softmax(0), lambda a: a.log_softmax(0), [3 * normal(3, 4)]),
    "where": (lambda a, b: where(MASK, a, b), lambda a, b: torch.where(torch.tensor(MASK), a, b),
              [normal(3), normal(2, 1)]),
    "stack": (lambda a, b: stack([a, b, a], -1), lambda a, b: torch.stack([a, b, a], -1), [normal(2, 3), normal(2, 3)]),
    "split": (lambda a: a.split(2, -1)[0] * a.split(2, -1)[1], lambda a: a.split(2, -1)[0] * a.split(2, -1)[1],
              [normal(3, 5)[:, :4]]),
    "axis is dim": (lambda a: a.sum(axis=1) * a.mean(axis=1) + a.T[0].softmax(axis=0),
                    lambda a: a.sum(dim=1) * a.mean(dim=1) + a.T[0].softmax(dim=0), [normal(3, 4)]),
    "linear": (linear, lambda x, w, b: x @ w + b, [normal(2, 3, 4), normal(4, 5), normal(5)]),
    "embedding": (lambda w: embedding(w, INDEX), lambda w: F.embedding(torch.tensor(INDEX), w), [normal(5, 2)]),
    "layer_norm": (layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b), [normal(2, 3, 8), normal(8), normal(8)]),
    "rms_norm": (rms_norm, lambda x, w: F.rms_norm(x, (8,), w, 1e-6), [normal(2, 3, 8), normal(8)]),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, [normal(50) * 3, normal(50)]),
    "gelu": (gelu, lambda x: F.gelu(x, approximate="tanh"), [normal(50) * 3]),
    "attention": (lambda x: causal_attention(x, 3), lambda x: torch_attention(x, 3, 3), [normal(2, 5, 36)]),
    "attention, grouped heads": (lambda x: causal_attention(x, 6, 2), lambda x: torch_attention(x, 6, 2),
                                 [normal(2, 5, 40)]),
    "attention in blocks": (lambda x: blockwise_attention(x, 6, 2), lambda x: torch_attention(x, 6, 2),
                            [normal(2, 1100, 20)]),
    "cross_entropy_sum": (lambda x: cross_entropy_sum(x, TARGETS),
                          lambda x: F.cross_entropy(x, torch.tensor(TARGETS), reduction="sum"), [normal(4, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients(name):
    ours, theirs, inputs = OPERATIONS[name]
    a = [Tensor(x.copy(), requires_grad=True) for x in inputs]
    b = [torch.tensor(x, requires_grad=True) for x in inputs]
    y, z = ours(*a), theirs(*b)
    np.testing.assert_allclose(y.data, z.detach().numpy(), rtol=1e-12, atol=1e-13)
    weights = normal(*y.shape)
    y.backward(np.asarray(weights))
    z.backward(torch.tensor(weights))
    for x, t in zip(a, b, strict=True):
        np.testing.assert_allclose(x.grad, t.grad.numpy(), rtol=1e-11, atol=1e-12)


OPTIMIZERS = {
    "AdamW": (
        lambda ps: AdamW(ps, lr=3e-3, betas=(0.85, 0.95), eps=1e-6, weight_decay=0.1),
        lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.85, 0.95), eps=1e-6),
    ),
    "SGD": (lambda ps: SGD(ps, lr=3e-2, momentum=0.9), lambda groups: torch.optim.SGD(groups, lr=3e-2, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping(name):
    make_ours, make_theirs = OPTIMIZERS[name]
    values = [normal(7, 5), normal(9)]
    ours = [Parameter(v.copy()) for v in values]
    theirs = [torch.nn.Parameter(torch.tensor(v)) for v in values]
    decay = 0.1 if name == "AdamW" else 0.0
    groups = [{"params": [theirs[0]], "weight_decay": decay}, {"params": [theirs[1]], "weight_decay": 0.0}]
    a, b = make_ours(ours), make_theirs(groups)
    for _ in range(20):
        for p, t in zip(ours, theirs, strict=True):
            g = normal(*p.shape)
            p.grad, t.grad = g.copy(), torch.tensor(g)
        norm = clip_grad_norm(ours, 5.0)
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 5.0).item(), rel=1e-12)
        a.step()
        b.step()
    for p, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.data, t.detach().numpy(), rtol=1e-12, atol=1e-14)
