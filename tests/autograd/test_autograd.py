"""Claims about the autograd: every backward is the adjoint of its forward, and the engine runs each exactly once."""

import threading
import weakref

import numpy as np
import pytest

from minipar.autograd import Function, Gradient, Tensor, checkpoint, linear, no_grad, operation
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


@pytest.mark.parametrize("operation", [lambda x: linear(Tensor(np.eye(2)), x), lambda x: x * 1.0])
def test_gradients_are_written_into_the_buffer_in_place(operation):
    x = Tensor(np.ones((2, 2)), requires_grad=True)
    x.grad_buffer = np.full((2, 2), np.nan)
    operation(x).sum().backward()
    assert x.grad is x.grad_buffer and x.grad.tolist() == [[1, 1], [1, 1]]
    (x * 2.0).sum().backward()
    assert x.grad is x.grad_buffer and x.grad.tolist() == [[3, 3], [3, 3]]


def test_the_gradient_of_a_shared_array_is_not_overwritten():
    """Both inputs of an addition receive the same gradient array; adding to one must not change the other."""
    a, b = Tensor(np.ones(3), requires_grad=True), Tensor(np.ones(3), requires_grad=True)
    s = a + b
    (s + a * 2.0).sum().backward()
    assert a.grad.tolist() == [3.0] * 3 and b.grad.tolist() == [1.0] * 3


def test_hooks_fire_once_when_all_uses_of_a_leaf_are_counted():
    x, seen = Tensor(np.ones(2), requires_grad=True), []
    remove = x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.tolist()))
    (x * 2.0 + x * 3.0 + x).sum().backward()
    remove()
    (x * 2.0).sum().backward()
    assert seen == [[6.0, 6.0]]
    with pytest.raises(ValueError):
        (x * 2.0).register_post_accumulate_grad_hook(print)


def test_no_grad_records_nothing_in_its_own_thread():
    x, outcome = Tensor(np.ones(2), requires_grad=True), []
    with no_grad():
        assert not (x * 2.0).requires_grad
        thread = threading.Thread(target=lambda: outcome.append((x * 2.0).requires_grad))
        thread.start()
        thread.join()
    assert outcome == [True] and (x * 2.0).requires_grad


def test_backward_refuses_what_makes_no_sense():
    x = Tensor(np.ones(2), requires_grad=True)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        (x * 2.0).backward()  # of two elements
    with pytest.raises(ValueError):
        Tensor(np.ones(1)).backward()
    y = (x * 2.0).sum()
    y.backward()
    with pytest.raises(ValueError):
        y.backward()  # a second time


def test_backward_frees_what_forward_saved():
    x = Tensor(np.ones(2), requires_grad=True)
    y = (x * 2.0).exp().sum()
    node = y.node
    y.backward()
    assert node.saved == {} and node.inputs == () and node.freed


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
