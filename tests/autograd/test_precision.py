"""Claims about floats of 2 bytes: nodes compute in float32, and what stays is rounded once."""

import numpy as np
import pytest
from training import in_blocks

from minipar.autograd import Tensor, checkpoint, linear, mapping
from minipar.more.precision import enable_two_bytes

enable_two_bytes()

RANDOM = np.random.Generator(np.random.Philox(9))
NARROW = ["float16", "bfloat16"]


def leaf(dtype, *shape):
    return Tensor(RANDOM.standard_normal(shape).astype(dtype), requires_grad=True)


def wide(array):
    return array.astype("float32")


@pytest.mark.parametrize("dtype", NARROW)
def test_a_product_and_its_gradients_are_rounded_once(dtype):
    x, w, g = leaf(dtype, 5, 40), leaf(dtype, 40, 3), RANDOM.standard_normal((5, 3)).astype(dtype)
    y = linear(x, w)
    y.backward(g)
    assert y.data.tobytes() == (wide(x.data) @ wide(w.data)).astype(dtype).tobytes()
    assert x.grad.tobytes() == (wide(g) @ wide(w.data).T).astype(dtype).tobytes()
    assert w.grad.tobytes() == (wide(x.data).T @ wide(g)).astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_saved_is_rounded_and_read_in_float32(dtype):
    x, g = leaf(dtype, 4, 6), RANDOM.standard_normal((4, 6)).astype(dtype)
    y = x.exp()
    assert {array.dtype for array in y.node.saved.values()} == {np.dtype(dtype)}
    y.backward(g)
    assert x.grad.tobytes() == (wide(g) * wide(y.data)).astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_smaller_than_the_result_stays_float32(dtype):
    qkv = leaf(dtype, 1, 6, 12)
    saved = in_blocks(qkv, 2).node.saved
    assert saved["lse"].dtype == np.float32 and saved["lse"].size < saved["out"].size
    assert saved["out"].dtype == saved["qkv"].dtype == dtype
    total = qkv.sum()
    assert total.dtype == np.float32 and total.data == wide(qkv.data).sum()  # a sum is not rounded
    assert qkv.sum(0).dtype == dtype


@pytest.mark.parametrize("dtype", NARROW)
def test_a_gradient_in_a_buffer_of_float32_is_not_rounded(dtype):
    x, w, g = leaf(dtype, 5, 40), leaf(dtype, 40, 3), RANDOM.standard_normal((5, 3)).astype(dtype)
    w.grad_buffer = np.full((40, 3), 7, "float32")
    linear(x, w).backward(g)
    assert w.grad is w.grad_buffer and w.grad.tobytes() == (wide(x.data).T @ wide(g)).tobytes()
    x.grad, x.grad_dtype = None, "float32"
    linear(x, w).backward(g)
    assert x.grad.tobytes() == (wide(g) @ wide(w.data).T).tobytes()  # nor one whose leaf says so


@pytest.mark.parametrize("dtype", NARROW)
def test_what_only_moves_values_does_not_widen_them(dtype):
    x, seen = leaf(dtype, 3, 4), []

    def note(array):
        seen.append(array.dtype)
        return array

    mapping(x, note, note).backward(np.ones((3, 4), dtype))
    checkpoint(lambda y: mapping(y, note, note), x).backward(np.ones((3, 4), dtype))
    assert seen == [np.dtype(dtype)] * 5 and x.grad.dtype == dtype


@pytest.mark.parametrize("dtype", NARROW)
def test_one_narrow_input_makes_the_result_narrow(dtype):
    x, w = leaf(dtype, 2, 3), leaf("float32", 2, 3)
    y = x * w
    y.backward(np.ones((2, 3), dtype))
    assert y.dtype == dtype and x.grad.dtype == dtype and w.grad.dtype == np.float32
    assert w.grad.tobytes() == wide(x.data).tobytes()
