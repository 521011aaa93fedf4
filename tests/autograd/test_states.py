"""Claims about orders, restored states and refusals of the autograd: nested, after an error, and a second time."""

import numpy as np
import pytest

from minipar.autograd import Tensor, checkpoint, defer_weight_gradients, linear, no_grad, queue_callback
from minipar.nn import Parameter
from minipar.nn.optim import learning_rate

RANDOM = np.random.Generator(np.random.Philox(77))


def leaf(*shape):
    return Tensor(RANDOM.standard_normal(shape), requires_grad=True)


def test_callbacks_run_in_the_order_in_which_they_were_queued():
    first, second, events = leaf(3), leaf(3), []
    for name, tensor in (("first", first), ("second", second)):
        for number in range(3):
            tensor.register_post_accumulate_grad_hook(
                lambda _, event=f"{name} {number}": queue_callback(lambda: events.append(event))
            )
    ((second.exp() * 2.0 + 1.0).sum() + first.sum()).backward()  # the shorter branch of `first` is numbered last
    order = [event.split()[0] for event in events]
    assert [event.split()[1] for event in events] == ["0", "1", "2"] * 2
    assert order in (["first"] * 3 + ["second"] * 3, ["second"] * 3 + ["first"] * 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_recompute_works_inside_no_grad(depth):
    x, w = leaf(3, 4), leaf(4, 4)

    def block(x):
        y = linear(x, w).tanh()
        return y if depth == 1 else checkpoint(lambda z: linear(z, w).tanh(), y, parameters=[w])

    block(x).sum().backward()
    expected = x.grad, w.grad
    x.grad = w.grad = None
    loss = checkpoint(block, x, parameters=[w]).sum()
    with no_grad():
        loss.backward()
        assert not (x * 2.0).requires_grad  # still off after it
    assert np.array_equal(x.grad, expected[0]) and np.array_equal(w.grad, expected[1])


def test_no_grad_inside_no_grad_leaves_it_off():
    x = leaf(2)
    with no_grad():
        with no_grad():
            assert not (x * 2.0).requires_grad
        assert not (x * 2.0).requires_grad
        with pytest.raises(KeyError), no_grad():
            raise KeyError
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (2, 1), (1, 3), ()])
def test_a_gradient_of_another_shape_is_refused(shape):
    x = leaf(2, 3)
    for tensor in (x, x * 2.0):
        with pytest.raises(ValueError, match="gradient of shape"):
            tensor.backward(np.ones(shape))
    assert x.grad is None


def test_weight_gradients_are_put_off_no_longer_after_an_error():
    x, w = leaf(3, 4), leaf(4, 4)
    with pytest.raises(KeyError), defer_weight_gradients():
        raise KeyError
    linear(x, w).sum().backward()
    assert w.grad is not None


def test_an_inner_queue_gets_the_inner_gradients():
    x, w = Tensor(RANDOM.standard_normal((3, 4))), leaf(4, 4)
    with defer_weight_gradients() as outer:
        with defer_weight_gradients() as inner:
            linear(x, w).sum().backward()
        linear(x, w).sum().backward()
    assert (len(inner), len(outer)) == (1, 1) and w.grad is None
    inner.run()
    once = w.grad.copy()
    outer.run()
    outer.run()  # nothing is left
    assert np.array_equal(w.grad, 2 * once)


def test_a_hooks_remover_removes_that_hook_alone():
    x, seen = leaf(2), []
    removers = [x.register_post_accumulate_grad_hook(lambda _, i=i: seen.append(i)) for i in range(3)]
    removers[1]()
    (x * 2.0).sum().backward()
    assert seen == [0, 2]


def test_folding_tied_gradients_twice_adds_nothing():
    p = Parameter(np.ones((2, 2)))
    ties = [p.tie(), p.tie()]
    (linear(Tensor(np.eye(2)), p) + ties[0] * 2.0 + ties[1] * 3.0).sum().backward()
    for _ in range(2):
        p.fold_tied_gradients()
        assert p.grad.tolist() == [[6.0, 6.0]] * 2 and [tie.grad for tie in ties] == [None, None]


@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (10, 10), (0, 1)])
def test_a_cosine_stays_at_a_tenth_after_its_end(warmup, total):
    rates = [
        learning_rate(step, lr=2.0, schedule="cosine", warmup_steps=warmup, total_steps=total)
        for step in range(total + 20)
    ]
    after = rates[max(total, warmup + 1) :]
    assert after == pytest.approx([0.2] * len(after)) and len(after) >= 19
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
