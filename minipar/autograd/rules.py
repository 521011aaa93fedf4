"""The operations of Tensor as rules on arrays: each has its result and, next to it, its inputs' gradients.

A gradient is a function of g, the gradient of the result. One that reads arrays besides g is a
`Gradient`, which names them: they are what the graph keeps for backward, and it keeps no others.
Tensor undoes broadcasting afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minipar.autograd.guards import dim_order
from minipar.backend import Array, xp


class Gradient:
    """The gradient of an input: a function of g and of named arrays, which are kept for it."""

    def __init__(self, function: Callable[..., Any], **saved: Any) -> None:
        self.function = function
        self.saved = saved


@dataclass
class LazyGradient:
    """A gradient as a recipe: `compute(out)` writes it into `out` (or a new array when None) and returns it.

    Layers give their weight gradients this way: straight into flat storage, or later (`defer_weight_gradients`).
    """

    compute: Callable[[Array | None], Array]


# ---- elements ------------------------------------------------------------------------------------


def add(a: Any, b: Any) -> Any:
    """Add element by element."""
    return a + b, lambda g: g, lambda g: g


def sub(a: Any, b: Any) -> Any:
    """Subtract element by element."""
    return a - b, lambda g: g, lambda g: -g


def mul(a: Any, b: Any) -> Any:
    """Multiply element by element."""
    da = Gradient(lambda g, b: g * b, b=b)
    db = Gradient(lambda g, a: g * a, a=a)
    return a * b, da, db


def truediv(a: Any, b: Any) -> Any:
    """Divide element by element."""
    da = Gradient(lambda g, b: g / b, b=b)
    db = Gradient(lambda g, a, b: -g * a / (b * b), a=a, b=b)
    return a / b, da, db


def pow(x: Array, exponent: float) -> Any:
    """Raise to a constant power. NB: x * x is far faster than x**3 on float32 (75 times where we measured)."""
    dx = Gradient(lambda g, x: g * (exponent * x ** (exponent - 1)), x=x)
    return x**exponent, dx


def exp(x: Array) -> Any:
    """Raise e to the power of each element."""
    y = xp.exp(x)
    return y, Gradient(lambda g, y: g * y, y=y)


def log(x: Array) -> Any:
    """Take the natural logarithm of each element."""
    return xp.log(x), Gradient(lambda g, x: g / x, x=x)


def tanh(x: Array) -> Any:
    """Take the hyperbolic tangent of each element."""
    y = xp.tanh(x)
    return y, Gradient(lambda g, y: g * (1 - y * y), y=y)


def relu(x: Array) -> Any:
    """Replace negative elements by 0. The gradient at 0 is 0, as PyTorch's."""
    positive = x > 0
    dx = Gradient(lambda g, positive: g * positive, positive=positive)
    return xp.maximum(x, 0), dx


# ---- rows and matrices ---------------------------------------------------------------------------


def softmax(x: Array, dim: int = -1) -> Any:
    """Divide e^x by its sum over a dim: positive values that add up to 1."""
    y = xp.exp(x - x.max(axis=dim, keepdims=True))
    y /= y.sum(axis=dim, keepdims=True)

    def gradient(g: Array, y: Array) -> Array:
        return y * (g - (g * y).sum(axis=dim, keepdims=True))

    return y, Gradient(gradient, y=y)


def sum(x: Array, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """Add up the elements over a dim, over several, or over all."""
    shape = x.shape
    kept = x.sum(axis=dim, keepdims=True).shape
    return x.sum(axis=dim, keepdims=keepdims), lambda g: xp.broadcast_to(g.reshape(kept), shape)


def max(x: Array, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """Return the largest element over a dim, over several, or over all.

    Elements that are equally large share the gradient evenly, as in torch.amax. (torch.max(dim) gives it to one.)
    """
    top = x.max(axis=dim, keepdims=True)
    is_top = x == top
    share = (is_top / is_top.sum(axis=dim, keepdims=True)).astype(x.dtype)
    shape = top.shape
    dx = Gradient(lambda g, share: g.reshape(shape) * share, share=share)
    return x.max(axis=dim, keepdims=keepdims), dx


def matmul(a: Array, b: Array) -> Any:
    """Multiply matrices, (..., n, k) @ (..., k, m) -> (..., n, m); the leading dims broadcast."""
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul needs matrices, but the shapes are {a.shape} and {b.shape}")
    da = Gradient(lambda g, b: xp.matmul(g, b.swapaxes(-1, -2)), b=b)
    db = Gradient(lambda g, a: xp.matmul(a.swapaxes(-1, -2), g), a=a)
    return xp.matmul(a, b), da, db


# ---- the same elements in other places -----------------------------------------------------------


def reshape(x: Array, *shape: int) -> Any:
    """Give the elements, in row-major order, another shape; one size may be -1, which is what is left."""
    before = x.shape
    return x.reshape(shape), lambda g: g.reshape(before)


def transpose(x: Array, *dims: int) -> Any:
    """Swap two dims, as PyTorch does. Permute all dims if all of three or more are named; reverse them if none is.

    ValueError for other dims. NB: NumPy's transpose(0, 1) leaves a matrix as it is, and PyTorch's swaps its dims.
    """
    order = dim_order(x.shape, dims)
    inverse = sorted(range(x.ndim), key=lambda i: order[i])
    return x.transpose(order), lambda g: g.transpose(inverse)


def swapaxes(x: Array, dim: int, other: int) -> Any:
    """Swap two dims."""
    return x.swapaxes(dim, other), lambda g: g.swapaxes(dim, other)


def getitem(x: Array, index: Any) -> Any:
    """Index as NumPy does: slices, integers, arrays of integers or booleans. Repeated elements add gradients up."""
    shape = x.shape

    def gradient(g: Array, index: Any) -> Array:
        full = xp.zeros(shape, dtype=g.dtype)
        xp.add.at(full, index, g)
        return full

    return x[index], Gradient(gradient, index=index)
