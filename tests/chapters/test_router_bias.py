"""The claim of chapter 12's balancing by biases: they decide who is chosen, and not the weights."""

import numpy as np

from chapters.support.ch12.balance import Router
from minipar.autograd import Tensor
from minipar.more.experts.mixtral import Mixtral, MixtralConfig, moe_layers


def test_the_bias_decides_who_is_chosen_and_not_the_weights():
    config = MixtralConfig(17, 16, 24, 1, 4, 2, 8, num_local_experts=5, num_experts_per_tok=2)
    (layer,) = moe_layers(Mixtral(config, dtype="float64"))
    router = Router(layer, rate=0.1)
    x = np.random.default_rng(0).standard_normal((40, 16))
    logits = layer.gate(Tensor(x)).data
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    before, _ = router.route(Tensor(x))
    router.bias[:] = [0.3, 0, -2, 0, 0.1]
    indices, weights = router.route(Tensor(x))
    assert np.array_equal(indices, np.argsort(-(p + router.bias), axis=1)[:, :2]) and 2 not in indices
    assert (indices != before).any()
    chosen = np.take_along_axis(p, indices, axis=1)
    np.testing.assert_allclose(weights.data, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-14)
