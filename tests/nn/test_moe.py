"""Claims about a layer of experts: each token's weighted sum, the router's choice, experts without tokens."""

from dataclasses import replace

import numpy as np
import pytest

from minipar.autograd import Tensor
from minipar.autograd.gradcheck import gradcheck
from minipar.more.experts.mixtral import Mixtral, MixtralConfig, MoE
from minipar.nn import AdamW

SMALL = MixtralConfig(11, 8, 12, 2, 4, 2, 6, num_local_experts=4, num_experts_per_tok=2)


RANDOM = np.random.Generator(np.random.Philox(20))


def layer_of(experts=4, top_k=2, router=None):
    """A layer of experts on its own, with hidden 8; `router` is its matrix."""
    config = replace(SMALL, num_local_experts=experts, num_experts_per_tok=top_k)
    layer: MoE = Mixtral(config, seed=1, dtype="float64").model.layers[0].mlp
    for parameter in layer.parameters():
        parameter.data[...] = RANDOM.standard_normal(parameter.shape)
    if router is not None:
        layer.gate.weight.data[...] = router
    return layer


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (3, 1), (5, 3), (2, 2), (1, 1)])
def test_the_layer_is_each_tokens_weighted_sum_of_its_experts(experts, top_k):
    """Token by token and expert by expert, in plain NumPy."""
    layer = layer_of(experts, top_k)
    x = RANDOM.standard_normal((2, 3, 8))
    y = layer(Tensor(x)).data
    assert y.shape == x.shape
    for token, result in zip(x.reshape(-1, 8), y.reshape(-1, 8), strict=True):
        powers = np.exp(layer.gate.weight.data @ token)
        best = sorted(range(experts), key=lambda e: -powers[e])[:top_k]
        total = np.zeros(8)
        for e in best:
            w1, w2, w3 = (getattr(layer.experts[e], name).weight.data for name in ("w1", "w2", "w3"))
            gate = w1 @ token
            total += powers[e] / powers[best].sum() * (w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ token)))
        np.testing.assert_allclose(result, total, rtol=1e-12)


def test_of_equal_probabilities_the_first_experts_win():
    router = np.zeros((5, 8))
    router[:, 0] = [0, 1, 0, 1, 0]
    layer = layer_of(5, 3, router)
    x = np.zeros((2, 8))
    x[:, 0] = [1.0, -1.0]
    indices, weights = layer.route(Tensor(x))
    assert indices.tolist() == [[1, 3, 0], [0, 2, 4]]
    assert np.array_equal(weights.data.sum(-1), [1, 1]) and np.ptp(weights.data[1]) == 0


@pytest.mark.parametrize(("experts", "top_k"), [(17, 2), (40, 40), (64, 5), (200, 3)])
def test_of_many_equal_experts_the_first_win(experts, top_k):
    """NumPy sorts up to 16 values stably in any case."""
    layer = layer_of(experts, top_k, np.zeros((experts, 8)))
    indices, _ = layer.route(Tensor(RANDOM.standard_normal((5, 8))))
    assert indices.tolist() == [list(range(top_k))] * 5
    layer.gate.weight.data[1::2, 0] = 1.0  # odd experts come first, and among them the first of equals
    indices, _ = layer.route(Tensor(np.eye(1, 8)))
    assert indices.tolist() == [sorted(range(experts), key=lambda e: (-(e % 2), e))[:top_k]]


def test_experts_without_tokens_have_zero_gradients_and_decay():
    layer = layer_of(4, 2, np.outer([3, -3, 2, -3], np.ones(8)))
    x = np.abs(RANDOM.standard_normal((1, 6, 8)))
    assert set(layer.route(Tensor(x[0]))[0].reshape(-1)) == {0, 2}
    layer(Tensor(x)).sum().backward()
    before = {name: p.data.copy() for name, p in layer.named_parameters()}
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
    AdamW(layer.parameters(), lr=0.1, weight_decay=0.5).step()
    for e, expert in enumerate(layer.experts):
        for name, p in expert.named_parameters():
            assert p.grad.any() == (e in (0, 2))
            if not p.grad.any():
                assert np.array_equal(p.data, before[f"experts.{e}.{name}"] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0, 5), (5, 0, 0), (1, 2, 2)])
def test_each_expert_runs_on_its_stretch_of_rows(counts):
    layer = layer_of(3)
    x = RANDOM.standard_normal((5, 8))
    parts = np.split(x, np.cumsum(counts)[:-1])
    expected = [expert(Tensor(part)).data for expert, part in zip(layer.experts, parts, strict=True)]
    np.testing.assert_array_equal(layer.run_experts(Tensor(x), np.array(counts)).data, np.concatenate(expected))
    gradcheck(lambda x: (layer.run_experts(x, np.array(counts)) ** 2).sum(), [x])


MANY = RANDOM.integers(0, 3, (300, 2))  # so many that a sort which is not stable would change their order


def test_rows_are_sorted_by_expert_and_then_by_token():
    """And each token finds the results of its own two rows."""
    layer = layer_of(4)
    x = RANDOM.standard_normal((300, 8))
    expected = [token for expert in range(4) for token, chosen in enumerate(MANY) for each in chosen if each == expert]

    def run_experts(xs, counts):
        assert np.array_equal(xs.data, x[expected])
        assert counts.tolist() == [*np.bincount(MANY.reshape(-1)), 0]
        return xs

    layer.run_experts = run_experts
    weights = RANDOM.standard_normal((300, 2))
    y = layer.compute(Tensor(x), MANY, Tensor(weights))
    np.testing.assert_allclose(y.data, x * weights.sum(axis=1, keepdims=True), rtol=1e-12, atol=1e-12)
