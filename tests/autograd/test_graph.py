"""Claims about the graph: what several users send to one result is added up, and what is put off keeps its order."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from minipar.autograd import (
    Function,
    LazyGradient,
    PendingGradient,
    Tensor,
    checkpoint,
    defer_weight_gradients,
    linear,
    queue_callback,
    randomness,
)
from minipar.backend import setting
from minipar.memory import MemoryLedger, hold

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


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (2, 1), (3,), ()])
@pytest.mark.parametrize("leaf", [True, False])
def test_a_gradient_of_another_shape_is_refused(shape, leaf):
    """Also one of as many elements, or one that broadcasting would stretch."""
    x = Tensor(DRAW((2, 3)), requires_grad=True)
    y = x if leaf else x * 2.0
    with pytest.raises(ValueError, match="gradient of shape .* for a tensor of shape .2, 3."):
        y.backward(np.ones(shape))
    assert x.grad is None


def test_callbacks_run_in_the_order_in_which_they_were_queued():
    """Three of one hook, and more of a second leaf, whose hook runs later."""
    first, second = (Tensor(DRAW((2, 2)), requires_grad=True) for _ in range(2))
    events = []
    for leaf, numbers in ((first, (0, 1, 2)), (second, (3, 4))):

        def hook(leaf, numbers=numbers):
            for number in numbers:
                queue_callback(partial(events.append, number))

        leaf.register_post_accumulate_grad_hook(hook)
    (linear(linear(Tensor(DRAW((2, 2))), second).tanh(), first)).sum().backward()
    assert events == [0, 1, 2, 3, 4]


def test_an_array_times_a_tensor_is_a_tensor_with_its_gradient():
    a, x, g = DRAW((3, 4)), Tensor(DRAW((4, 5)), requires_grad=True), DRAW((3, 5))
    y = a @ x
    y.backward(g)
    np.testing.assert_array_equal(y.data, a @ x.data)
    np.testing.assert_array_equal(x.grad, a.T @ g)
    with pytest.raises(ValueError, match=r"matmul needs matrices, but the shapes are \(3, 4\) and \(4,\)"):
        a @ Tensor(DRAW(4))


def test_a_leafs_gradient_is_a_buffer_unless_it_is_named():
    with MemoryLedger().recording() as ledger:
        x = Tensor(DRAW(1000), requires_grad=True)
        x.exp().backward(np.ones(1000))
        assert ledger.held["buffers"] == x.grad.nbytes == 8000
        x.exp().backward(np.ones(1000))  # added in place
        assert ledger.held["buffers"] == 8000
        x.grad = None
        assert ledger.held["buffers"] == 0
        x.grad_buffer = np.empty(1000)
        hold("gradients", x.grad_buffer)
        x.exp().backward(np.ones(1000))
        assert (ledger.held["gradients"], ledger.held["buffers"], ledger.held["activations"]) == (8000, 0, 0)


def test_gradients_on_their_way_are_activations():
    """The peak has two results that are saved, the gradient of the second, and that of the first."""
    with MemoryLedger().recording() as ledger:
        x = Tensor(DRAW(1000), requires_grad=True)
        y = x.exp().exp()
        assert ledger.held["activations"] == 2 * 8000
        y.backward(np.ones(1000))
        assert ledger.peak_parts["activations"] == ledger.peak == 4 * 8000
        assert (ledger.held["activations"], ledger.held["buffers"]) == (8000, 8000)  # y, and x.grad


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 1), (1, 2), (3, 1), (3, 2), (1, 3, 1), (4, 1, 2), (4, 3, 2)])
def test_a_gradient_has_the_shape_before_broadcasting(shape):
    x, g = Tensor(DRAW(shape), requires_grad=True), DRAW((4, 3, 2))
    (x + np.ones((4, 3, 2))).backward(g)
    sizes = (1, 1, 1, *shape)[-3:]
    stretched = tuple(i for i, size in enumerate(sizes) if size == 1)
    expected = g.sum(axis=stretched).reshape(shape)
    assert x.grad.shape == shape
    np.testing.assert_allclose(x.grad, expected, rtol=1e-13)


# ---- gradients that are still on their way ---------------------------------------------------------------------------


class Doubled(Function):
    """x + w with doubled gradients: that of x arrives later, and that of w is a recipe. `events` has the order."""

    events = []

    def forward(self, x, w):
        return x + w

    def backward(self, grad):
        def wait():
            self.events.append("x arrives")
            return 2 * grad

        def compute(out):
            self.events.append("w is computed")
            return 2 * grad

        return PendingGradient(wait), LazyGradient(compute)


@pytest.mark.parametrize("x_is_a_leaf", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_gradient_on_its_way_arrives_after_the_weights(dtype, x_is_a_leaf):
    """Where x is a leaf too, the order is that of the inputs. Only the recipe can be put off."""
    x, w = (Tensor(np.ones(3, dtype), requires_grad=True) for _ in range(2))
    for put_off in (False, True):
        x.grad = w.grad = None
        Doubled.events.clear()
        y = Doubled.apply(x if x_is_a_leaf else x * 3.0, w)
        with defer_weight_gradients() if put_off else nullcontext() as queue:
            y.backward(np.ones(3, dtype))
        expected = ["x arrives", "w is computed"] if x_is_a_leaf else ["w is computed", "x arrives"]
        assert Doubled.events == (["x arrives"] if put_off else expected)
        if put_off:
            assert w.grad is None and len(queue) == 1
            queue.run()
        assert x.grad.tolist() == [2.0 if x_is_a_leaf else 6.0] * 3 and w.grad.tolist() == [2.0] * 3
        assert x.grad.dtype == w.grad.dtype == dtype


def test_a_recipe_for_a_result_is_computed_at_once():
    x, w = (Tensor(np.ones(3), requires_grad=True) for _ in range(2))
    Doubled.events.clear()
    y = Doubled.apply(x, w * 5.0)
    with defer_weight_gradients() as queue:
        y.backward(np.ones(3))
    assert len(queue) == 0 and w.grad.tolist() == [10.0] * 3 and x.grad.tolist() == [2.0] * 3
