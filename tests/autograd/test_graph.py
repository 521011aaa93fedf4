"""Claims about the graph: what several users send to one result is added up, and what is put off keeps its order."""

import numpy as np

from minipar.autograd import Tensor, checkpoint, defer_weight_gradients, linear, randomness
from minipar.backend import setting

DRAW = np.random.Generator(np.random.Philox(4)).standard_normal


def test_a_result_gets_the_gradients_of_all_its_users():
    """Not only a leaf does: of y = exp(x), used by three operations, of which one uses it twice."""
    x = Tensor(DRAW((3, 4)), requires_grad=True)
    y = x.exp()
    (y * y + y.tanh() - 2.0 * y).sum().backward()
    value = np.exp(x.data)
    expected = value * (2 * value + 1 - np.tanh(value) ** 2 - 2)
    np.testing.assert_allclose(x.grad, expected, rtol=1e-13, atol=1e-13)


def test_gradients_put_off_are_added_in_the_order_of_the_passes():
    """As bits show: of three microbatches, since a sum of two has no order."""
    weight, inputs = Tensor(DRAW((6, 5)), requires_grad=True), [DRAW((7, 6)) for _ in range(3)]

    def passes():
        weight.grad = None
        for x in inputs:
            linear(Tensor(x, requires_grad=True), weight).tanh().sum().backward()

    passes()
    expected = weight.grad.tobytes()
    with defer_weight_gradients() as queue:
        passes()
    queue.run()
    assert weight.grad.tobytes() == expected


def test_a_recomputed_block_draws_with_the_keys_of_its_forward():
    """The block's masks are a function of the keys; those of backward's time are another forward's."""
    seen = []

    def block(x):
        seen.append(randomness.get())
        return x * 2.0

    with setting(randomness, "first"):
        y = checkpoint(block, Tensor(DRAW((2, 2)), requires_grad=True))
    with setting(randomness, "second"):
        y.sum().backward()
    assert seen == ["first", "first"]
