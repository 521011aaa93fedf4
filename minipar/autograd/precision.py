"""Floats of 2 bytes, bfloat16 and float16: operations compute in float32 and round what stays.

A node whose inputs have 2 bytes runs forward and backward on float32 copies. The result, the saved
arrays and the gradients of the inputs are rounded to 2 bytes. Two things stay float32: saved arrays
that are smaller than the result, such as a log-sum-exp for each row, and gradients that are written
into a `grad_buffer`. No operation knows of this file.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike

from minipar.autograd.rules import AnyGradient, Gradients, LazyGradient, PendingGradient
from minipar.backend import Array, xp


def forward(node: Any, arrays: Sequence[Any], tensors: Sequence[Any]) -> Array:
    """Run the forward of a Function on arrays, of which those of `tensors` may have 2 bytes."""
    narrow = [tensor.dtype for tensor in tensors if tensor.dtype.itemsize == 2]
    if not narrow or not node.widens:
        return node.forward(*arrays)
    node.narrow = narrow[0]
    output = node.forward(*[cast_floats(array, "float32") for array in arrays])
    cast_saved(node, node.narrow, least=output.size)
    if output.ndim == 0:
        return output  # a sum, such as the loss
    return output.astype(node.narrow)


def backward(node: Any, grad: Array) -> Sequence[AnyGradient]:
    """Run the backward of a Function. Return a gradient or None for each input."""
    if node.narrow is None:
        return as_tuple(node.backward(grad, **node.saved))
    cast_saved(node, "float32")
    gradients = as_tuple(node.backward(cast_floats(grad, "float32"), **node.saved))
    rounded = []
    for gradient, leaf in zip(gradients, node.input_leaves, strict=True):
        if leaf is None:
            gradient = cast_floats(gradient, node.narrow)
        elif leaf.grad_buffer is None:
            gradient = cast_floats(gradient, leaf.grad_dtype)
        rounded.append(gradient)
    return rounded


def as_tuple(gradients: Gradients | Array) -> Gradients:
    """Return what a backward returned as a tuple: a function of one input may return its gradient alone."""
    return gradients if isinstance(gradients, tuple) else (gradients,)


def cast_saved(node: Any, dtype: DTypeLike, least: int = 0) -> None:
    """Convert the saved arrays that have at least so many elements."""
    for name, value in node.saved.items():
        if isinstance(value, xp.ndarray) and value.size >= least:
            node.saved[name] = cast_floats(value, dtype)


def cast_floats(value: Any, dtype: DTypeLike) -> Any:
    """Convert an array of float32 or 2-byte floats, or a gradient's recipe; return other values as they are."""
    if isinstance(value, LazyGradient):
        return LazyGradient(lambda out: cast_floats(value.compute(None), dtype))
    if isinstance(value, PendingGradient):
        return PendingGradient(lambda: cast_floats(value.wait(), dtype))
    is_array = isinstance(value, xp.ndarray)
    # V is the kind of bfloat16, which NumPy does not know by itself.
    if is_array and value.dtype.kind in "fV" and value.dtype.itemsize <= 4:
        return value.astype(dtype, copy=False)
    return value
