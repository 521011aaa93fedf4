"""Claims about the autograd: every backward is the adjoint of its forward, and the engine runs each exactly once."""

import threading
import weakref

import numpy as np
import pytest

from minipar.autograd import (
    Function,
    Gradient,
    Tensor,
    checkpoint,
    defer_weight_gradients,
    linear,
    no_grad,
    operation,
    queue_callback,
)
from minipar.autograd.gradcheck import gradcheck

RANDOM = np.random.Generator(np.random.Philox(1))


def normal(*shape):
    return RANDOM.standard_normal(shape)


def positive(*shape):
    return RANDOM.uniform(0.5, 2.0, shape)


OPERATIONS = {
    "add": (lambda a, b: a + b, [normal(3, 4), normal(3, 4)]),
    "add, broadcast": (lambda a, b: a + b, [normal(2, 3, 4), normal(3, 1)]),
    "add, a scalar": (lambda a: 2.0 + a + 1.0, [normal(3)]),
    "sub, broadcast": (lambda a, b: a - b, [normal(4), normal(2, 1, 4)]),
    "sub from a constant": (lambda a: 1.0 - a, [normal(5)]),
    "mul, broadcast": (lambda a, b: a * b, [normal(2, 1, 3), normal(4, 1)]),
    "mul by itself": (lambda a: a * a, [normal(3, 2)]),
    "div, broadcast": (lambda a, b: a / b, [normal(2, 3), positive(3)]),
    "div of a constant": (lambda a: 3.0 / a, [positive(4)]),
    "neg": (lambda a: -a, [normal(3)]),
    "power": (lambda a: a**3.0, [positive(3, 2)]),
    "exp": (lambda a: a.exp(), [normal(3, 2)]),
    "log": (lambda a: a.log(), [positive(3, 2)]),
    "tanh": (lambda a: a.tanh(), [normal(3, 2)]),
    "matmul": (lambda a, b: a @ b, [normal(3, 4), normal(4, 5)]),
    "matmul, batched": (lambda a, b: a @ b, [normal(2, 3, 4), normal(2, 4, 5)]),
    "matmul, batch broadcast": (lambda a, b: a @ b, [normal(2, 1, 3, 4), normal(5, 4, 2)]),
    "matmul, matrix on the right of a batch": (lambda a, b: a @ b, [normal(2, 3, 4), normal(4, 5)]),
    "reshape": (lambda a: a.reshape(4, -1), [normal(2, 3, 4)]),
    "transpose": (lambda a: a.transpose(1, 2, 0), [normal(2, 3, 4)]),
    "transpose, negative axes": (lambda a: a.transpose(0, -1, -2), [normal(2, 3, 4)]),
    "index by slice": (lambda a: a[1:, ::2], [normal(3, 5)]),
    "index by repeated integers": (lambda a: a[np.array([0, 2, 0, 0])], [normal(3, 2)]),
    "index by two arrays": (lambda a: a[np.array([0, 1, 1]), np.array([2, 0, 0])], [normal(2, 3)]),
    "index by a mask": (lambda a: a[np.array([True, False, True])], [normal(3, 2)]),
    "sum": (lambda a: a.sum(), [normal(3, 4)]),
    "sum over dims": (lambda a: a.sum((0, 2)), [normal(2, 3, 4)]),
    "sum, keepdims": (lambda a: a.sum(-1, keepdims=True), [normal(2, 3)]),
    "mean": (lambda a: a.mean(1), [normal(3, 4)]),
    "a view used twice": (lambda a: a.reshape(6) * a.transpose(1, 0).reshape(6), [normal(2, 3)]),
    "a residual branch": (lambda a, w: a + (a @ w).tanh() + a, [normal(3, 4), normal(4, 4)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_backward_is_the_adjoint_of_forward(name):
    function, inputs = OPERATIONS[name]
    gradcheck(function, inputs)


def test_a_new_operation_is_one_rule():
    @operation
    def scaled_product(a, b, scale=1.0):
        da = Gradient(lambda g, b: g * b * scale, b=b)
        db = Gradient(lambda g, a: g * a * scale, a=a)
        return a * b * scale, da, db

    gradcheck(lambda a, b: scaled_product(a, b, scale=3.0), [normal(2, 3), normal(3)])
    gradcheck(lambda a: scaled_product(a, 2.0) + scaled_product(2.0, a, 0.5), [normal(3)])


def test_an_operation_keeps_only_what_its_gradients_need():
    constant, x = np.ones(3), Tensor(normal(3), requires_grad=True)
    kept = weakref.ref(x.data)
    y = (x * constant).sum()
    x.data = np.zeros(3)  # nothing but the graph could hold the old values: the gradient of x * c does not need x
    assert kept() is None
    y.backward()
    assert np.array_equal(x.grad, constant)


class _WrongSquare(Function):
    def forward(self, x):
        self.save_for_backward(x=x)
        return x * x

    def backward(self, grad, x):
        return grad * x  # the 2 is missing


def test_gradcheck_catches_a_wrong_and_a_missing_gradient():
    with pytest.raises(AssertionError, match=r"input 0 of shape \(3,\)"):
        gradcheck(_WrongSquare.apply, [normal(3)])
    with pytest.raises(AssertionError, match="input 1"):
        gradcheck(lambda a, b: a * b.detach(), [normal(3), normal(3)])
    with pytest.raises(ValueError, match="float64"):
        gradcheck(lambda a: a, [normal(3).astype(np.float32)])


@pytest.mark.parametrize("dim", [None, 0, 2, (0, 1)])
def test_sums_and_means_are_numpys(dim):
    x = normal(3, 4, 5)
    for keepdims in (False, True):
        np.testing.assert_allclose(Tensor(x).sum(dim, keepdims).data, x.sum(dim, keepdims=keepdims), rtol=1e-13)
        np.testing.assert_allclose(Tensor(x).mean(dim, keepdims).data, x.mean(dim, keepdims=keepdims), rtol=1e-13)


def test_a_chain_of_20_000_additions_does_not_recurse():
    x = Tensor(np.array(1.0), requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1e-5
    y.backward()
    assert x.grad == 1.0
    z = x
    for _ in range(20_000):
        z = z + x
    del z  # a graph nobody ran is also freed without recursion


def test_gradients_of_several_backward_passes_add_up():
    x = Tensor(np.ones(2), requires_grad=True)
    (x * 2.0).sum().backward()
    (x * 3.0).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0]


def test_gradients_are_written_into_the_buffer_in_place():
    x = Tensor(np.ones((2, 2)), requires_grad=True)
    x.grad_buffer = np.full((2, 2), np.nan)
    linear(Tensor(np.eye(2)), x).sum().backward()
    assert x.grad is x.grad_buffer and x.grad.tolist() == [[1, 1], [1, 1]]
    (x * 2.0).sum().backward()
    assert x.grad is x.grad_buffer and x.grad.tolist() == [[3, 3], [3, 3]]


def test_a_buffer_gets_the_gradient_of_any_operation():
    x = Tensor(np.ones(2), requires_grad=True)
    x.grad_buffer = np.full(2, np.nan)
    (x * 3.0).sum().backward()
    assert x.grad is x.grad_buffer and x.grad.tolist() == [3, 3]


def test_the_gradient_of_a_shared_array_is_not_overwritten():
    """Both inputs of an addition receive the same gradient array; adding to one must not change the other."""
    a, b = Tensor(np.ones(3), requires_grad=True), Tensor(np.ones(3), requires_grad=True)
    s = a + b
    (s + a * 2.0).sum().backward()
    assert a.grad.tolist() == [3.0] * 3 and b.grad.tolist() == [1.0] * 3


def test_float32_stays_float32():
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    y = ((x * 2.0 + 1) / 3 - x**2.0).mean()
    y.backward()
    assert y.dtype == np.float32 and x.grad.dtype == np.float32


def test_hooks_fire_once_when_all_uses_of_a_leaf_are_counted():
    x, seen = Tensor(np.ones(2), requires_grad=True), []
    remove = x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.copy()))
    (x * 2.0 + x * 3.0 + x).sum().backward()
    assert len(seen) == 1 and seen[0].tolist() == [6.0, 6.0]
    remove()
    (x * 2.0).sum().backward()
    assert len(seen) == 1
    with pytest.raises(ValueError, match="hooks are for leaves"):
        (x * 2.0).register_post_accumulate_grad_hook(print)


def test_no_grad_records_nothing_and_ends_after_an_error():
    x = Tensor(np.ones(2), requires_grad=True)
    with pytest.raises(RuntimeError), no_grad():
        assert not (x * 2.0).requires_grad
        raise RuntimeError
    assert (x * 2.0).requires_grad


def test_no_grad_in_one_thread_does_not_switch_off_another():
    x, outcome = Tensor(np.ones(2), requires_grad=True), []
    with no_grad():
        thread = threading.Thread(target=lambda: outcome.append((x * 2.0).requires_grad))
        thread.start()
        thread.join()
    assert outcome == [True]


def test_backward_refuses_what_makes_no_sense():
    x = Tensor(np.ones(2), requires_grad=True)
    with pytest.raises(ValueError, match="needs one element"):
        (x * 2.0).backward()
    with pytest.raises(ValueError, match=r"gradient of shape \(3,\) for a tensor of shape \(2,\)"):
        (x * 2.0).backward(np.ones(3))
    with pytest.raises(ValueError, match="does not require"):
        Tensor(np.ones(1)).backward()
    y = (x * 2.0).sum()
    y.backward()
    with pytest.raises(ValueError, match="second time"):
        y.backward()


def test_backward_frees_what_forward_saved():
    x = Tensor(np.ones(2), requires_grad=True)
    y = (x * 2.0).exp().sum()
    node = y.node
    y.backward()
    assert node.saved == {} and node.input_nodes == node.input_leaves == () and node.freed


def test_backward_frees_a_node_s_results_before_the_next_node():
    returned = []

    class Add(Function):
        def forward(self, leaf, x):
            return leaf + x

        def backward(self, grad):
            gradients = grad.copy(), grad.copy()
            returned.append(weakref.ref(gradients[0]))
            return gradients

    class Before(Function):
        def forward(self, x):
            return x

        def backward(self, grad):
            assert returned[0]() is None, "the leaf has its own copy"
            return grad

    leaf, x = (Tensor(np.ones(2), requires_grad=True) for _ in range(2))
    Add.apply(leaf, Before.apply(x)).backward(np.ones(2))
    assert leaf.grad.sum() == x.grad.sum() == 2


def test_weight_gradients_can_be_put_off_and_are_the_same_bits():
    w, x, b = (Tensor(normal(4, 4), requires_grad=True) for _ in range(3))

    def loss():
        return linear(linear(x, w, b[0]), w).tanh().sum()

    loss().backward()
    expected = w.grad, x.grad
    w.grad = x.grad = b.grad = None
    fired = []
    w.register_post_accumulate_grad_hook(fired.append)
    with defer_weight_gradients() as queue:
        loss().backward()
    assert w.grad is None and np.array_equal(x.grad, expected[1]) and len(queue) == 2 and not fired
    queue.run()
    assert np.array_equal(w.grad, expected[0]) and len(queue) == 0 and len(fired) == 1


def test_recompute_gives_the_same_bits_and_keeps_no_inner_arrays():
    w1, w2 = (Tensor(normal(4, 4), requires_grad=True) for _ in range(2))
    x = Tensor(normal(3, 4), requires_grad=True)
    calls = []

    def block(x):
        calls.append(1)
        return linear(linear(x, w1).tanh(), w2)

    block(x).sum().backward()
    expected = [t.grad for t in (x, w1, w2)]
    for t in (x, w1, w2):
        t.grad = None
    out = checkpoint(block, x, parameters=[w1, w2])
    assert set(out.node.saved) == {"function", "inputs"} and len(out.node.saved["inputs"]) == 1
    out.sum().backward()
    assert len(calls) == 3
    for t, e in zip((x, w1, w2), expected, strict=True):
        assert np.array_equal(t.grad, e)


@pytest.mark.parametrize("needs", [False, True])
def test_a_parameter_of_two_recomputed_blocks_completes_once(needs):
    w, x, seen = Tensor(normal(4, 4), requires_grad=True), Tensor(normal(3, 4), requires_grad=needs), []
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.copy()))

    def block(x):
        return linear(x, w).tanh()

    y = checkpoint(block, x, parameters=[w])
    y = checkpoint(block, y, parameters=[w])
    (y.sum() + w.sum()).backward()
    assert len(seen) == 1 and np.array_equal(seen[0], w.grad)


def test_recomputed_blocks_free_their_inputs_as_backward_goes():
    w, refs, alive = Tensor(normal(4, 4), requires_grad=True), [], []

    def block(x):
        if x.requires_grad:  # the second run, in backward
            alive.append(sum(ref() is not None for ref in refs))
            refs.append(weakref.ref(x))
        return linear(x, w).tanh()

    y = Tensor(normal(3, 4), requires_grad=True)
    for _ in range(4):
        y = checkpoint(block, y, parameters=[w])
    y.sum().backward()
    assert alive == [0, 0, 0, 0]


# ---- callbacks at the end of a backward pass -------------------------------------------------------------------------


def test_callbacks_run_once_in_order_when_backward_ends():
    a, b, events = Tensor(np.ones(2), requires_grad=True), Tensor(np.ones(2), requires_grad=True), []
    for name, leaf in (("a", a), ("b", b)):
        leaf.register_post_accumulate_grad_hook(
            lambda leaf, name=name: queue_callback(lambda: events.append((name, a.grad[0], b.grad[0])))
        )
    ((a * 2.0).exp() + b * 3.0).sum().backward()
    assert sorted(events) == [("a", a.grad[0], 3.0), ("b", a.grad[0], 3.0)]  # both gradients complete in each call
    first = [name for name, *_ in events]
    ((a * 2.0).exp() + b * 3.0).sum().backward()
    assert [name for name, *_ in events] == first * 2


def test_callbacks_wait_for_the_outermost_backward():
    w, inner, events = Tensor(normal(4, 4), requires_grad=True), Tensor(np.ones(4), requires_grad=True), []
    inner.register_post_accumulate_grad_hook(lambda leaf: queue_callback(lambda: events.append("callback")))
    w.register_post_accumulate_grad_hook(lambda leaf: events.append("outer leaf is complete"))

    def block(x):
        return (x + inner).tanh()

    checkpoint(block, linear(Tensor(normal(3, 4)), w)).sum().backward()  # `inner` is complete in the inner backward
    assert events == ["outer leaf is complete", "callback"]


def test_a_backward_that_fails_drops_its_callbacks():
    x, events = Tensor(np.ones(2), requires_grad=True), []

    def fail(leaf):
        queue_callback(lambda: events.append("callback"))
        raise RuntimeError("in a hook")

    remove = x.register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="in a hook"):
        (x * 2.0).sum().backward()
    remove()
    (x * 2.0).sum().backward()
    assert events == []


def test_queueing_a_callback_outside_of_backward_is_an_error():
    with pytest.raises(ValueError, match="no backward pass is running"):
        queue_callback(print)
    x = Tensor(np.ones(2), requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda leaf: queue_callback(lambda: queue_callback(print)))
    with pytest.raises(ValueError, match="no backward pass is running"):  # a callback runs after the pass
        (x * 2.0).sum().backward()


def test_callbacks_of_one_thread_stay_in_that_thread():
    x, events = Tensor(np.ones(2), requires_grad=True), []

    def hook(leaf):
        def other():
            with pytest.raises(ValueError, match="no backward pass is running"):
                queue_callback(print)
            events.append("another thread")

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    x.register_post_accumulate_grad_hook(hook)
    (x * 2.0).sum().backward()
    assert events == ["another thread"]


def test_callbacks_work_while_weight_gradients_are_deferred():
    w, x, events = Tensor(normal(4, 4), requires_grad=True), Tensor(normal(3, 4), requires_grad=True), []
    for name, leaf in (("weight", w), ("input", x)):
        leaf.register_post_accumulate_grad_hook(
            lambda leaf, name=name: queue_callback(lambda: events.append(f"end of {name}'s half"))
        )
    with defer_weight_gradients() as queue:
        linear(x, w).sum().backward()
    assert events == ["end of input's half"]
    queue.run()
    assert events == ["end of input's half", "end of weight's half"]
