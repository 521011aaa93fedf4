"""Claims about the graph: gradients of several users add up, hooks keep their order, and recompute keeps the bits."""

import threading
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from minipar.autograd import (
    Function,
    LazyGradient,
    Tensor,
    checkpoint,
    defer_weight_gradients,
    linear,
    no_grad,
    queue_callback,
)
from minipar.memory import MemoryLedger, hold

DRAW = np.random.Generator(np.random.Philox(4)).standard_normal


def leaf(*shape):
    return Tensor(DRAW(shape), requires_grad=True)


def test_a_result_gets_the_gradients_of_all_its_users():
    """Not only a leaf does: of y = exp(x), used by three operations, of which one uses it twice."""
    x = leaf(3, 4)
    y = x.exp()
    (y * y + y.tanh() - 2.0 * y).sum().backward()
    value = np.exp(x.data)
    expected = value * (2 * value + 1 - np.tanh(value) ** 2 - 2)
    np.testing.assert_allclose(x.grad, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2), (3, 1), (3, 2), (1, 3, 1), (4, 1, 2), (4, 3, 2)])
def test_a_gradient_has_the_shape_before_broadcasting(shape):
    x, g = leaf(*shape), DRAW((4, 3, 2))
    (x + np.ones((4, 3, 2))).backward(g)
    sizes = (1, 1, 1, *shape)[-3:]
    stretched = tuple(i for i, size in enumerate(sizes) if size == 1)
    assert x.grad.shape == shape
    np.testing.assert_allclose(x.grad, g.sum(axis=stretched).reshape(shape), rtol=1e-13)


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (2, 1), (3,), ()])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_gradient_of_another_shape_is_refused(shape, is_leaf):
    """Also one of as many elements, or one that broadcasting would stretch."""
    x = leaf(2, 3)
    y = x if is_leaf else x * 2.0
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        y.backward(np.ones(shape))
    assert x.grad is None


def test_an_array_times_a_tensor_is_a_tensor_with_its_gradient():
    a, x, g = DRAW((3, 4)), leaf(4, 5), DRAW((3, 5))
    y = a @ x
    y.backward(g)
    np.testing.assert_array_equal(y.data, a @ x.data)
    np.testing.assert_array_equal(x.grad, a.T @ g)
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(4,\)"):
        a @ leaf(4)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_leafs_gradient_is_a_buffer_unless_it_is_named():
    with MemoryLedger().recording() as ledger:
        x = leaf(1000)
        x.exp().backward(np.ones(1000))
        assert ledger.held["buffers"] == x.grad.nbytes == 8000
        x.exp().backward(np.ones(1000))  # added in place
        assert ledger.held["buffers"] == 8000
        x.grad = None
        x.grad_buffer = np.empty(1000)
        hold("gradients", x.grad_buffer)
        x.exp().backward(np.ones(1000))
        assert (ledger.held["gradients"], ledger.held["buffers"], ledger.held["activations"]) == (8000, 0, 0)


def test_gradients_on_their_way_are_activations():
    """The peak has two results that are saved, the gradient of the second, and that of the first."""
    with MemoryLedger().recording() as ledger:
        x = leaf(1000)
        y = x.exp().exp()
        assert ledger.held["activations"] == 2 * 8000
        y.backward(np.ones(1000))
        assert ledger.peak_parts["activations"] == ledger.peak == 4 * 8000
        assert (ledger.held["activations"], ledger.held["buffers"]) == (8000, 8000)  # y, and x.grad


# ---- no_grad, hooks and callbacks ------------------------------------------------------------------------------------


def test_no_grad_inside_no_grad_leaves_it_off():
    x = leaf(2)
    with no_grad():
        with pytest.raises(KeyError), no_grad():
            raise KeyError
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad


def test_a_hooks_remover_removes_that_hook_alone():
    x, seen = leaf(2), []
    removers = [x.register_post_accumulate_grad_hook(lambda _, i=i: seen.append(i)) for i in range(3)]
    removers[1]()
    (x * 2.0).sum().backward()
    assert seen == [0, 2]


def test_callbacks_run_in_order_when_all_gradients_are_complete():
    """Three of one hook, and more of a second leaf, whose hook runs later; in each of two passes."""
    first, second = leaf(2, 2), leaf(2, 2)
    events = []

    def note(number):
        assert first.grad is not None and second.grad is not None
        events.append(number)

    for each, numbers in ((first, (0, 1, 2)), (second, (3, 4))):

        def hook(_, numbers=numbers):
            for number in numbers:
                queue_callback(partial(note, number))

        each.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        linear(linear(leaf(2, 2), second).tanh(), first).sum().backward()
    assert events == [0, 1, 2, 3, 4] * 2


def test_callbacks_wait_for_the_outermost_backward():
    w, inner, events = leaf(4, 4), leaf(4), []
    inner.register_post_accumulate_grad_hook(lambda _: queue_callback(lambda: events.append("callback")))
    w.register_post_accumulate_grad_hook(lambda _: events.append("outer leaf is complete"))
    block = linear(Tensor(DRAW((3, 4))), w)
    checkpoint(lambda x: (x + inner).tanh(), block).sum().backward()  # `inner` is complete in the inner backward
    assert events == ["outer leaf is complete", "callback"]


def test_a_backward_that_fails_drops_its_callbacks():
    x, events = leaf(2), []

    def fail(_):
        queue_callback(lambda: events.append("callback"))
        raise KeyError

    remove = x.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError):
        (x * 2.0).sum().backward()
    remove()
    (x * 2.0).sum().backward()
    assert events == []


def test_queueing_a_callback_outside_of_backward_is_an_error():
    with pytest.raises(ValueError):
        queue_callback(print)
    x = leaf(2)
    x.register_post_accumulate_grad_hook(lambda _: queue_callback(lambda: queue_callback(print)))
    with pytest.raises(ValueError):  # a callback runs after the pass
        (x * 2.0).sum().backward()


def test_callbacks_of_one_thread_stay_in_that_thread():
    x, events = leaf(2), []

    def other():
        with pytest.raises(ValueError):
            queue_callback(print)
        events.append("another thread")

    def hook(_):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    x.register_post_accumulate_grad_hook(hook)
    (x * 2.0).sum().backward()
    assert events == ["another thread"]


# ---- gradients that are put off, or still on their way ---------------------------------------------------------------


def test_gradients_put_off_are_added_in_the_order_of_the_passes():
    """As bits show: of three microbatches, since a sum of two has no order. Hooks run when the queue does."""
    weight, inputs, fired = leaf(6, 5), [DRAW((7, 6)) for _ in range(3)], []

    def passes():
        weight.grad = None
        for x in inputs:
            linear(Tensor(x, requires_grad=True), weight).tanh().sum().backward()

    passes()
    expected = weight.grad.tobytes()
    weight.register_post_accumulate_grad_hook(fired.append)
    with defer_weight_gradients() as queue:
        passes()
    assert weight.grad is None and len(queue) == 3 and not fired
    queue.run()
    assert weight.grad.tobytes() == expected and len(queue) == 0 and len(fired) == 3


def test_a_weight_used_twice_is_complete_once_the_queue_ran():
    w, x, fired = leaf(4, 4), leaf(4, 4), []
    linear(linear(x, w), w).tanh().sum().backward()
    expected = w.grad, x.grad
    w.grad = x.grad = None
    w.register_post_accumulate_grad_hook(fired.append)
    with defer_weight_gradients() as queue:
        linear(linear(x, w), w).tanh().sum().backward()
    assert np.array_equal(x.grad, expected[1]) and not fired
    queue.run()
    assert np.array_equal(w.grad, expected[0]) and len(fired) == 1


def test_callbacks_work_while_weight_gradients_are_deferred():
    w, x, events = leaf(4, 4), leaf(3, 4), []
    for name, each in (("weight", w), ("input", x)):
        each.register_post_accumulate_grad_hook(lambda _, name=name: queue_callback(lambda: events.append(name)))
    with defer_weight_gradients() as queue:
        linear(x, w).sum().backward()
    assert events == ["input"]
    queue.run()
    assert events == ["input", "weight"]


class Doubled(Function):
    """x + w with doubled gradients, of which that of w is a recipe."""

    def forward(self, x, w):
        return x + w

    def backward(self, grad):
        return 2 * grad, LazyGradient(lambda out: 2 * grad)


def test_a_recipe_for_a_result_is_computed_at_once():
    x, w = leaf(3), leaf(3)
    with defer_weight_gradients() as queue:
        Doubled.apply(x, w * 5.0).backward(np.ones(3))
    assert len(queue) == 0 and w.grad.tolist() == [10.0] * 3 and x.grad.tolist() == [2.0] * 3


# ---- recompute -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [False, True])
def test_recompute_gives_the_same_bits_and_keeps_only_inputs(needs):
    """NB: a block's input needs no gradient where the embedding is frozen, or where it is an array of data."""
    x, w1, w2 = Tensor(DRAW((3, 4)), needs), leaf(4, 5), leaf(5, 2)
    gradients, calls = [], []

    def block(x):
        calls.append(1)
        return linear(linear(x, w1).tanh(), w2)

    for recompute in (False, True):
        x.grad = w1.grad = w2.grad = None
        with MemoryLedger().recording() as ledger:
            y = checkpoint(block, x, parameters=[w1, w2]) if recompute else block(x)
            kept = ledger.held["activations"] - y.data.nbytes
        assert kept == (12 if recompute else 12 + 15) * 8  # x, and the tanh
        y.sum().backward()
        gradients.append([None if each.grad is None else each.grad.tobytes() for each in (x, w1, w2)])
    plain, recomputed = gradients
    assert len(calls) == 3 and recomputed == plain
    assert (plain[0] is not None) == needs and None not in plain[1:]


@pytest.mark.parametrize("depth", [1, 2])
def test_backward_inside_no_grad_recomputes_all_the_same(depth):
    """`no_grad` is about forward passes; the block is run again to get gradients, nested blocks too."""
    x, w, gradients = leaf(3, 4), leaf(4, 4), []

    def block(x):
        return linear(x, w).tanh()

    def outer(x):
        return checkpoint(block, x, parameters=[w]) if depth == 2 else block(x)

    for context in (nullcontext, no_grad):
        x.grad = w.grad = None
        y = checkpoint(outer, x, parameters=[w]).sum()
        with context():
            y.backward()
            assert (x * 2.0).requires_grad == (context is nullcontext)  # restored
        gradients.append([x.grad.tobytes(), w.grad.tobytes()])
    assert gradients[0] == gradients[1]


def test_a_block_that_reads_a_result_from_outside_is_refused():
    """Backward would go through that result's graph twice. A leaf may be read so."""
    x, w, outside = leaf(3, 4), leaf(4, 4), leaf(3, 4)
    h = x * 2.0
    with pytest.raises(ValueError, match=r"checkpoint: .*Mul.* input"):
        checkpoint(lambda y: linear(y, w) + h, h, parameters=[w]).sum().backward()
    checkpoint(lambda y: linear(y, w) + outside, x * 2.0, parameters=[w]).sum().backward()
    assert outside.grad.tolist() == np.ones((3, 4)).tolist() and x.grad is not None
    checkpoint(lambda y: y, x * 2.0).sum().backward()


@pytest.mark.parametrize("block_is_last", [False, True])
def test_an_input_that_a_block_does_not_use_gets_nothing_from_it(block_is_last):
    """Its other users' gradients stay, whether they arrive before the block's or after them."""
    x, unused = leaf(3, 4), leaf(3, 4)
    y, z = x.exp(), unused.exp()
    other = z * 3.0 if block_is_last else None
    block = checkpoint(lambda a, b: a * 2.0, y, z)
    if other is None:
        other = z * 3.0
    (block + other).sum().backward()
    assert np.array_equal(x.grad, 2 * np.exp(x.data)) and np.array_equal(unused.grad, 3 * np.exp(unused.data))
    x.grad = unused.grad = None
    checkpoint(lambda a, b: a * 2.0, x.exp(), unused.exp()).sum().backward()
    assert x.grad is not None and unused.grad is None


@pytest.mark.parametrize("needs", [False, True])
def test_a_parameter_of_two_recomputed_blocks_completes_once(needs):
    w, x, seen = leaf(4, 4), Tensor(DRAW((3, 4)), needs), []
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.copy()))
    y = x
    for _ in range(2):
        y = checkpoint(lambda x: linear(x, w).tanh(), y, parameters=[w])
    (y.sum() + w.sum()).backward()
    assert len(seen) == 1 and np.array_equal(seen[0], w.grad)
