"""Claims about what keeps experts evenly used: the gradient of the auxiliary loss."""

import numpy as np
import pytest

from minipar.autograd import Tensor, no_grad
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
