"""Claims about what keeps experts evenly used: the auxiliary loss's gradient, counts, biases and capacity."""

from math import ceil

import numpy as np
import pytest

from minipar.autograd import Tensor, checkpoint, flop_counter, no_grad
from minipar.autograd.gradcheck import gradcheck
from minipar.more.experts.mixtral import Mixtral, MixtralConfig, moe_layers

E, H = 5, 8
RANDOM = np.random.Generator(np.random.Philox(33))


def layer_of(top_k=2):
    config = MixtralConfig(11, H, 12, 1, 4, 2, 6, num_local_experts=E, num_experts_per_tok=top_k)
    (layer,) = moe_layers(Mixtral(config, seed=1, dtype="float64"))
    for parameter in layer.parameters():
        parameter.data[...] = RANDOM.standard_normal(parameter.shape)
    return layer


def probabilities(layer, x):
    """Return the router's probabilities of each token of one sample, (T, E)."""
    powers = np.exp(x @ layer.gate.weight.data.T)
    return powers / powers.sum(axis=1, keepdims=True)


def load_of(layer, x):
    """Count the assignments of one sample that each expert gets."""
    best = np.argsort(-probabilities(layer, x), axis=1, kind="stable")[:, : layer.top_k]
    return np.bincount(best.reshape(-1), minlength=E)


def auxiliary(layer, x, load):
    """The auxiliary loss of one sample, (T, h), whose tokens are counted in `load`."""
    return E * (load / load.sum() * probabilities(layer, x).mean(axis=0)).sum()


@pytest.mark.parametrize(("samples", "top_k"), [(1, 1), (1, 2), (3, 2), (2, E)])
def test_backward_adds_the_gradient_of_each_samples_loss(samples, top_k):
    """To both inputs of the router: the gradient of y dy, and 0.7 times the samples' auxiliary losses."""
    layer = layer_of(top_k)
    layer.aux_loss = 0.7 / 4  # over T
    x, dy, direction = RANDOM.standard_normal((3, samples, 4, H))
    across = RANDOM.standard_normal(layer.gate.weight.shape)
    loads = [load_of(layer, tokens) for tokens in x]

    def total(step):
        layer.gate.weight.data += step * across
        with no_grad():
            moved = x + step * direction
            value = (layer(Tensor(moved)).data * dy).sum()
        value += 0.7 * sum(auxiliary(layer, tokens, load) for tokens, load in zip(moved, loads, strict=True))
        layer.gate.weight.data -= step * across
        return value

    leaf = Tensor(x, requires_grad=True)
    layer(leaf).backward(dy)
    found = (leaf.grad * direction).sum() + (layer.gate.weight.grad * across).sum()
    assert found == pytest.approx((total(1e-6) - total(-1e-6)) / 2e-6, rel=1e-7)


def test_descent_on_the_loss_alone_evens_the_load_out():
    layer, x = layer_of(), RANDOM.standard_normal((1, 40, H))
    layer.aux_loss, spread = 1 / 40, []
    for _ in range(300):
        spread.append(np.ptp(load_of(layer, x[0])))
        layer.gate.weight.grad = None
        layer(Tensor(x)).backward(np.zeros_like(x))
        layer.gate.weight.data -= 0.3 * layer.gate.weight.grad
    assert max(spread[-100:]) <= 4 < 12 < spread[0]


def test_results_are_the_same_bits_with_the_loss():
    layer = layer_of()
    x = Tensor(RANDOM.standard_normal((2, 3, H)))
    before = layer(x).data
    layer.aux_loss = 3.0
    assert layer(x).data.tobytes() == before.tobytes()


def test_the_load_is_counted_once_for_each_backward():
    layer = layer_of()
    x = RANDOM.standard_normal((2, 3, H))
    load = sum(load_of(layer, sample) for sample in x)
    for run in (layer, lambda x: checkpoint(layer, x, parameters=layer.parameters())):
        layer.load[:] = 0
        with no_grad():
            layer(Tensor(x))
        y = run(Tensor(x))
        assert not layer.load.any()
        y.sum().backward()
        assert np.array_equal(layer.load, load)
        run(Tensor(x)).sum().backward()
        assert np.array_equal(layer.load, 2 * load) and layer.load.dtype == np.int64


def test_the_bias_decides_who_is_chosen_and_not_the_weights():
    layer, x = layer_of(), RANDOM.standard_normal((40, H))
    p = probabilities(layer, x)
    before = layer.route(Tensor(x))[0]
    layer.bias[:] = [0.3, 0, -2, 0, 0.1]
    indices, weights = layer.route(Tensor(x))
    assert np.array_equal(indices, np.argsort(-(p + layer.bias), axis=1)[:, :2]) and 2 not in indices
    assert (indices != before).any()
    chosen = np.take_along_axis(p, indices, axis=1)
    np.testing.assert_allclose(weights.data, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-14)


# ---- capacity --------------------------------------------------------------------------------------------------------


def limited(layer, x):
    """The layer's result (N, h) of tokens x, slot by slot and token by token, and how much is dropped."""
    p = probabilities(layer, x)
    best = np.argsort(-p, axis=1, kind="stable")[:, : layer.top_k]
    room = [ceil(layer.capacity_factor * best.size / E)] * E
    total, dropped = np.zeros_like(x), 0
    for slot in range(layer.top_k):
        for token, e in enumerate(best[:, slot]):
            if room[e] == 0:
                dropped += 1
                continue
            room[e] -= 1
            weight = p[token, e] / p[token, best[token]].sum()
            total[token] += weight * layer.experts[e](Tensor(x[token : token + 1])).data[0]
    return total, dropped


@pytest.mark.parametrize(
    ("factor", "top_k"), [(0.1, 2), (0.5, 1), (0.8, 2), (1, 3), (1.25, 2), (1, E), (9, 2), (1e300, 1)]
)
def test_an_expert_takes_first_choices_first_up_to_its_capacity(factor, top_k):
    layer, x = layer_of(top_k), RANDOM.standard_normal((3, 7, H)) + 1
    layer.capacity_factor = factor
    expected, dropped = limited(layer, x.reshape(-1, H))
    products = []
    with flop_counter(products.append):
        y = layer(Tensor(x, requires_grad=True))
    np.testing.assert_allclose(y.data.reshape(-1, H), expected, rtol=1e-12, atol=1e-12)
    rows = min(21, ceil(factor * 21 * top_k / E))
    assert layer.capacity(21) == rows and sum(products[1:]) == E * rows * 3 * 2 * H * 12
    y.backward(y.data)
    assert layer.dropped == dropped and (dropped == 0) == (factor >= 9 or top_k == E)
    layer.capacity_factor = 1e-9
    assert layer.capacity(21) == 1  # at least


@pytest.mark.parametrize("factor", [0.3, 0.8])
def test_the_gradient_with_a_capacity_passes_the_checker(factor):
    """It holds for the tokens, the weights of the router's choice, and every expert."""
    layer, x = layer_of(), RANDOM.standard_normal((9, H))
    layer.capacity_factor = factor
    indices, weights = layer.route(Tensor(x))
    names = [name for name, _ in layer.named_parameters() if "experts" in name]
    modules, values = dict(layer.named_modules()), dict(layer.named_parameters())

    def results(x, weights, *leaves):
        for name, leaf in zip(names, leaves, strict=True):
            modules[name.rpartition(".")[0]].weight = leaf
        return layer.compute(x, indices, weights)

    gradcheck(results, [x, weights.data, *(values[name].data.copy() for name in names)])
