"""Claims about the operations that a PyTorch user expects: values, gradients, ties and dims."""

import warnings

import numpy as np
import pytest

from minipar.autograd import Tensor, concatenate, softmax, stack, where
from minipar.autograd.gradcheck import gradcheck

RANDOM = np.random.Generator(np.random.Philox(31))


def normal(*shape):
    return RANDOM.standard_normal(shape)


def leaf(values, dtype="float64"):
    return Tensor(np.array(values, dtype), requires_grad=True)


def distinct(*shape):
    """Values that differ by at least 1: no step of a difference quotient changes which one is the largest."""
    return RANDOM.permutation(int(np.prod(shape))).reshape(shape).astype(float)


GRADIENTS = {
    "relu": (lambda a: a.relu(), [distinct(3, 4) - 5.5]),
    "softmax": (lambda a: a.softmax(), [normal(3, 4)]),
    "softmax over the first dim": (lambda a: a.softmax(0), [normal(3, 4)]),
    "softmax over a middle dim": (lambda a: softmax(a, -2), [normal(2, 3, 4)]),
    "softmax of broadcast scores": (lambda a, b: (a + b).softmax(-1), [normal(2, 3, 1), normal(4)]),
    "max": (lambda a: a.max(), [distinct(3, 4)]),
    "max over a dim": (lambda a: a.max(1), [distinct(2, 3, 4)]),
    "max over negative dims": (lambda a: a.max((-1, 0)), [distinct(2, 3, 4)]),
    "max, keepdims": (lambda a: a - a.max(-1, keepdims=True), [distinct(2, 3)]),
    "max of broadcast values": (lambda a, b: (a + b).max(0), [distinct(3, 1), 20 * distinct(4)]),
    "max, two equal values": (lambda a: a.max(-1), [np.array([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]])]),
    "swapaxes": (lambda a: a.swapaxes(0, 2) * np.arange(24.0).reshape(4, 3, 2), [normal(2, 3, 4)]),
    "swapaxes, negative": (lambda a: a.swapaxes(-1, 0) @ np.ones((2, 5)), [normal(2, 3, 4)]),
    "transpose of two dims": (lambda a: a.transpose(1, 2) @ np.ones((3, 2)), [normal(2, 3, 4)]),
    "transpose of two dims, negative": (lambda a: a.transpose(-1, -2) @ np.ones((3, 2)), [normal(2, 3, 4)]),
    "transpose of a matrix": (lambda a: a.transpose(0, 1) @ np.ones((2, 3)), [normal(2, 3)]),
    "transpose of all dims": (lambda a: a.transpose() @ np.ones((2, 3)), [normal(2, 3)]),
    "sqrt": (lambda a: a.sqrt(), [1 + normal(3, 2) ** 2]),
    "abs": (lambda a: abs(a) * a.abs(), [distinct(3, 2) - 2.5]),
    "sigmoid": (lambda a: a.sigmoid(), [3 * normal(3, 2)]),
    "log_softmax": (lambda a: a.log_softmax(), [normal(3, 4)]),
    "log_softmax over the first dim": (lambda a: a.log_softmax(0), [normal(3, 4)]),
    "where": (lambda a, b: where(np.array([[True], [False]]), a, b), [normal(2, 3), normal(3)]),
    "stack": (lambda a, b: stack([a, b], 1) * np.arange(12.0).reshape(2, 2, 3), [normal(2, 3), normal(2, 3)]),
    "split": (lambda a: a.split(2, 1)[0] * a.split(2, 1)[1].sum(), [normal(2, 3)]),
    "the transpose": (lambda a: a.T @ np.ones((2, 3)), [normal(2, 3)]),
    "concatenate": (lambda a, b: concatenate([a, b]) * np.arange(5.0)[:, None], [normal(2, 3), normal(3, 3)]),
    "concatenate, dim 1": (lambda a, b: concatenate([a, b, a], 1) ** 2.0, [normal(2, 3), normal(2, 1)]),
    "concatenate, dim -1": (lambda a, b: concatenate((a, b), dim=-1).exp(), [normal(2, 1, 3), normal(2, 1, 2)]),
    "concatenate with a constant": (lambda a: concatenate([np.ones((1, 2)), a]) ** 2.0, [normal(3, 2)]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_backward_is_the_adjoint_of_forward(name):
    function, inputs = GRADIENTS[name]
    gradcheck(function, inputs)


def test_values_are_numpys():
    x = normal(2, 3, 4)
    powers = np.exp(x)
    for dim in (0, 1, 2, -1, -3):
        np.testing.assert_allclose(Tensor(x).softmax(dim).data, powers / powers.sum(dim, keepdims=True), rtol=1e-13)
    assert np.array_equal(Tensor(x).softmax().data, Tensor(x).softmax(2).data)
    for dim in (None, 0, -1, (0, 2)):
        assert Tensor(x).max(dim).shape == Tensor(x).sum(dim).shape == Tensor(x).mean(dim).shape == x.max(dim).shape
        for keepdims in (False, True):
            assert np.array_equal(Tensor(x).max(dim, keepdims).data, x.max(dim, keepdims=keepdims))
            np.testing.assert_allclose(Tensor(x).sum(dim, keepdims).data, x.sum(dim, keepdims=keepdims), rtol=1e-13)
            np.testing.assert_allclose(Tensor(x).mean(dim, keepdims).data, x.mean(dim, keepdims=keepdims), rtol=1e-13)
    assert np.array_equal(Tensor(x).relu().data, np.maximum(x, 0))
    assert np.array_equal(Tensor(x).swapaxes(0, -1).data, x.swapaxes(0, -1))
    assert np.array_equal(concatenate([Tensor(x), x], dim=1).data, np.concatenate([x, x], axis=1))


def test_operators_compute_what_numpys_do():
    x, y = normal(3, 3), 2 + normal(3, 3) ** 2
    a, b = Tensor(x), Tensor(y)
    assert np.array_equal((-a).data, -x)
    assert np.array_equal((a + b).data, x + y) and np.array_equal((y + a).data, y + x)
    assert np.array_equal((a - b).data, x - y) and np.array_equal((1.0 - a).data, 1.0 - x)
    assert np.array_equal((a * b).data, x * y) and np.array_equal((3.0 * a).data, 3.0 * x)
    assert np.array_equal((a / b).data, x / y) and np.array_equal((1.0 / b).data, 1.0 / y)
    assert np.array_equal((a @ b).data, x @ y) and np.array_equal((a**2.0).data, x**2.0)
    assert np.array_equal(a.exp().data, np.exp(x)) and np.array_equal(b.log().data, np.log(y))
    assert np.array_equal(a.tanh().data, np.tanh(x)) and np.array_equal(a[1:, ::2].data, x[1:, ::2])
    assert np.array_equal(a.reshape(9).data, x.reshape(9)) and np.array_equal(a.transpose(1, 0).data, x.T)


def test_equal_maxima_share_the_gradient_evenly():
    x = leaf([[5, 5, 5, 1], [0, 2, 2, -1]])
    x.max(-1).backward(np.array([6.0, 8.0]))
    assert x.grad.tolist() == [[2, 2, 2, 0], [0, 4, 4, 0]]
    whole = leaf([7, 7, 7, 7])
    whole.max().backward()
    assert whole.grad.tolist() == [0.25] * 4


def test_relu_has_no_slope_at_zero_and_keeps_nan():
    x = leaf([-1, 0, 2, np.nan])
    x.relu().backward(np.ones(4))
    assert x.grad[:3].tolist() == [0, 0, 1] and np.isnan(x.relu().data[3])


def test_softmax_of_huge_values_does_not_overflow():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = softmax(Tensor(np.array([1000.0, 0.0, -np.inf])))
    assert y.data.tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operations_keep_the_dtype(dtype):
    x = leaf(normal(2, 3), dtype)
    every = [x.relu(), x.softmax(), x.max(0), x.swapaxes(0, 1), x.transpose(0, 1), concatenate([x, x])]
    every += [x.exp(), (x * x).log(), x.tanh(), x**2.0, x / 2.0, x.mean(1), x.sum(0), x.reshape(6), x[:, :2] @ x]
    every += [x[0], x[:, 1:], x[[1, 0, 1]], x[np.array([True, False])]]
    for y in every:
        x.grad = None
        y.sum().backward()
        assert y.dtype == dtype and x.grad.dtype == dtype


def test_two_dims_are_swapped_as_in_torch():
    x = normal(2, 3, 4)
    assert np.array_equal(Tensor(x).transpose(1, 2).data, x.swapaxes(1, 2))
    assert np.array_equal(Tensor(x[0]).transpose(0, 1).data, x[0].T)  # NumPy's would leave it
    assert np.array_equal(Tensor(x).transpose(2, 0, 1).data, x.transpose(2, 0, 1))
    for dims in ((-3, 2), (0, -1), (2, -3)):  # the first dim and the last, from either end
        assert np.array_equal(Tensor(x).transpose(*dims).data, x.swapaxes(0, 2))


@pytest.mark.parametrize("dims", [(0,), (0, 3), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3), (-4, 0)])
def test_a_transpose_of_other_dims_is_refused(dims):
    with pytest.raises((ValueError, IndexError)):
        Tensor(normal(2, 3, 4)).transpose(*dims)


def test_a_tensor_of_one_element_is_a_number_as_in_torch():
    loss = (leaf([1.5, 2.5]) * 1.0).sum()
    assert float(loss) == loss.item() == 4.0
    assert f"{loss:.3f}" == "4.000" and f"{loss:>8.1f}" == "     4.0" and f"{loss}" == "4.0"
    assert float(leaf([3.0])) == 3.0
    assert loss < 4.5 and 3 < loss and loss <= 4 and loss >= loss and not loss > 4
    assert round(loss / 3.0, 2) == 1.33 and abs(leaf([-3.0])).item() == 3.0


def test_a_number_of_numpy_is_an_array_without_dims():
    """CuPy's are, but NumPy's reductions give numbers, to which nothing can be added in place."""
    number = np.float64(2.5)
    for x in (Tensor(number), Tensor(number, requires_grad=True) * 1.0, leaf([1.0, 1.5]).sum()):
        assert type(x.data) is np.ndarray and x.data.shape == () and x.item() == 2.5


@pytest.mark.parametrize("shape", [(2,), (0, 3)])
def test_a_tensor_of_other_sizes_is_no_number(shape):
    for call in (float, Tensor.item, round, lambda x: x < 3):
        with pytest.raises(ValueError, match="array of size 1"):
            call(Tensor(np.zeros(shape)))


@pytest.mark.parametrize("function", [np.argmax, np.asarray, lambda x: np.array([x, x]), np.linalg.norm])
def test_a_function_of_numpy_is_told_to_take_the_array(function):
    """np.argmax of a tensor would otherwise be that of one object, 0."""
    with pytest.raises(TypeError, match=r"\.data"):
        function(leaf([[1.0, 2.0]]))


def test_an_exponent_has_no_gradient_so_it_must_be_a_constant():
    x, p = leaf([2.0, 3.0]), leaf([2.0])
    with pytest.raises(ValueError, match="Pow.* constant"):
        x**p
    assert (x ** Tensor(p.data)).data.tolist() == [4.0, 9.0]
