"""The operations of Tensor as rules on arrays: each returns its result and its inputs' gradients.

The gradient of an input is a function of g, the gradient of the result. One that reads arrays
besides g is a `Gradient`, which names them: they are what the graph keeps for backward, and it
keeps no others. Tensor undoes broadcasting afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar.backend import Array, xp

Dims = int | tuple[int, ...] | None  # one dim, several, or all
Result = tuple[Any, ...]  # the result, then the gradient of each input


class Gradient:
    """The gradient of an input: a function of g and of named arrays, which are kept for it."""

    def __init__(self, function: Callable[..., Any], **saved: Any) -> None:
        self.function = function
        self.saved = saved


@dataclass
class LazyGradient:
    """A gradient that is computed later: `compute(out)` writes it into `out`, or into a new array when None.

    Layers give their weight gradients this way: straight into flat storage, or later
    (`defer_weight_gradients`). `compute` returns the array.
    """

    compute: Callable[[Array | None], Array]


Gradients = tuple[Array | LazyGradient | None, ...]  # one for each input, None where it needs none


# ---- elements ------------------------------------------------------------------------------------


def same(g: Array) -> Array:
    """Return g, the gradient of a term."""
    return g


def add(a: Array, b: Array) -> Result:
    """Add element by element."""
    return a + b, same, same


def sub(a: Array, b: Array) -> Result:
    """Subtract element by element."""

    def db(g: Array) -> Array:
        return -g

    return a - b, same, db


def mul(a: Array, b: Array) -> Result:
    """Multiply element by element."""

    def da(g: Array, b: Array) -> Array:
        return g * b

    def db(g: Array, a: Array) -> Array:
        return g * a

    return a * b, Gradient(da, b=b), Gradient(db, a=a)


def truediv(a: Array, b: Array) -> Result:
    """Divide element by element."""

    def da(g: Array, b: Array) -> Array:
        return g / b

    def db(g: Array, a: Array, b: Array) -> Array:
        return -g * a / (b * b)

    return a / b, Gradient(da, b=b), Gradient(db, a=a, b=b)


def pow(x: Array, exponent: float) -> Result:
    """Raise to a constant power.

    NB: x * x is far faster than x**3 on float32 (75 times where we measured).
    """

    def dx(g: Array, x: Array) -> Array:
        return g * (exponent * x ** (exponent - 1))

    return x**exponent, Gradient(dx, x=x)


def exp(x: Array) -> Result:
    """Raise e to the power of each element."""
    y = xp.exp(x)

    def dx(g: Array, y: Array) -> Array:
        return g * y

    return y, Gradient(dx, y=y)


def log(x: Array) -> Result:
    """Take the natural logarithm of each element."""

    def dx(g: Array, x: Array) -> Array:
        return g / x

    return xp.log(x), Gradient(dx, x=x)


def tanh(x: Array) -> Result:
    """Take the hyperbolic tangent of each element."""
    y = xp.tanh(x)

    def dx(g: Array, y: Array) -> Array:
        return g * (1 - y * y)

    return y, Gradient(dx, y=y)


def relu(x: Array) -> Result:
    """Replace negative elements by 0. The gradient at 0 is 0, as PyTorch's."""
    positive = x > 0

    def dx(g: Array, positive: Array) -> Array:
        return g * positive

    return xp.maximum(x, 0), Gradient(dx, positive=positive)


def sqrt(x: Array) -> Result:
    """Take the square root of each element."""
    y = xp.sqrt(x)

    def dx(g: Array, y: Array) -> Array:
        return g / (2 * y)

    return y, Gradient(dx, y=y)


def abs(x: Array) -> Result:
    """Take the absolute value of each element. The gradient at 0 is 0, as PyTorch's."""

    def dx(g: Array, x: Array) -> Array:
        return g * xp.sign(x)

    return xp.abs(x), Gradient(dx, x=x)


def sigmoid(x: Array) -> Result:
    """Compute 1 / (1 + e^-x) of each element."""
    y = 0.5 + 0.5 * xp.tanh(0.5 * x)  # exp(-x) would overflow

    def dx(g: Array, y: Array) -> Array:
        return g * y * (1 - y)

    return y, Gradient(dx, y=y)


def where(condition: Array, a: Array, b: Array) -> Result:
    """Take the elements of a where the condition (booleans) is True, and those of b elsewhere."""

    def da(g: Array, condition: Array) -> Array:
        return xp.where(condition, g, 0)

    def db(g: Array, condition: Array) -> Array:
        return xp.where(condition, 0, g)

    of_a = Gradient(da, condition=condition)
    of_b = Gradient(db, condition=condition)
    return xp.where(condition, a, b), None, of_a, of_b


# ---- rows and matrices ---------------------------------------------------------------------------


def softmax(x: Array, dim: int = -1) -> Result:
    """Divide e^x by its sum over a dim: positive values that add up to 1."""
    y = xp.exp(x - x.max(axis=dim, keepdims=True))
    y /= y.sum(axis=dim, keepdims=True)

    def dx(g: Array, y: Array) -> Array:
        return y * (g - (g * y).sum(axis=dim, keepdims=True))

    return y, Gradient(dx, y=y)


def log_softmax(x: Array, dim: int = -1) -> Result:
    """Compute the logarithm of `softmax`, which does not overflow."""
    y = x - x.max(axis=dim, keepdims=True)
    y -= xp.log(xp.exp(y).sum(axis=dim, keepdims=True))

    def dx(g: Array, y: Array) -> Array:
        return g - xp.exp(y) * g.sum(axis=dim, keepdims=True)

    return y, Gradient(dx, y=y)


def sum(x: Array, dim: Dims = None, keepdims: bool = False) -> Result:
    """Add up the elements over a dim, over several, or over all."""
    shape = x.shape
    kept = x.sum(axis=dim, keepdims=True).shape

    def dx(g: Array) -> Array:
        return xp.broadcast_to(g.reshape(kept), shape)

    return x.sum(axis=dim, keepdims=keepdims), dx


def max(x: Array, dim: Dims = None, keepdims: bool = False) -> Result:
    """Return the largest element over a dim, over several, or over all.

    Elements that are equally large share the gradient evenly, as in torch.amax. (torch.max(dim)
    gives it to one.)
    """
    top = x.max(axis=dim, keepdims=True)
    is_top = x == top
    share = (is_top / is_top.sum(axis=dim, keepdims=True)).astype(x.dtype)
    kept = top.shape

    def dx(g: Array, share: Array) -> Array:
        return g.reshape(kept) * share

    return x.max(axis=dim, keepdims=keepdims), Gradient(dx, share=share)


def matmul(a: Array, b: Array) -> Result:
    """Multiply matrices, (..., n, k) @ (..., k, m) -> (..., n, m); the leading dims broadcast."""
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul needs matrices, but the shapes are {a.shape} and {b.shape}")

    def da(g: Array, b: Array) -> Array:
        return xp.matmul(g, b.swapaxes(-1, -2))

    def db(g: Array, a: Array) -> Array:
        return xp.matmul(a.swapaxes(-1, -2), g)

    return xp.matmul(a, b), Gradient(da, b=b), Gradient(db, a=a)


# ---- the same elements in other places -----------------------------------------------------------


def reshape(x: Array, *shape: int) -> Result:
    """Give the elements, in row-major order, another shape; one size may be -1: what is left."""
    before = x.shape

    def dx(g: Array) -> Array:
        return g.reshape(before)

    return x.reshape(shape), dx


def transpose(x: Array, *dims: int) -> Result:
    """Swap two dims, as PyTorch does.

    Permute all dims if all of three or more are named; reverse them if none is. NB: NumPy's
    transpose(0, 1) leaves a matrix as it is, and PyTorch's swaps its dims.
    """
    order = list(range(x.ndim))
    if len(dims) == 2:
        first, second = dims
        order[first], order[second] = order[second], order[first]
    elif dims:
        order = [order[dim] for dim in dims]
    else:
        order.reverse()
    inverse = [order.index(dim) for dim in range(x.ndim)]

    def dx(g: Array) -> Array:
        return g.transpose(inverse)

    return x.transpose(order), dx


def getitem(x: Array, index: Any) -> Result:
    """Index as NumPy does: slices, integers, arrays of integers or booleans.

    The gradients of elements that are taken several times add up, in the order of the result.
    """
    shape = x.shape

    def dx(g: Array, index: Any) -> Array:
        full = xp.zeros(shape, dtype=g.dtype)
        parts = index if isinstance(index, tuple) else (index,)
        if xp.module is np:
            np.add.at(full, index, g)
        elif not any(isinstance(part, list | xp.ndarray) for part in parts):
            full[index] += g  # no element is taken twice
        else:  # CuPy's `add.at` has no order
            element = xp.arange(full.size).reshape(shape)[index]  # which one of x it is, for all of g
            add_rows(g.reshape(-1, 1), element.reshape(-1), full.reshape(-1, 1))
        return full

    return x[index], Gradient(dx, index=index)


def add_rows(rows: Array, index: Array, out: Array) -> Array:
    """Set out[v] to the sum of the rows (N, h) whose index (N,) is v. Returns `out` (V, h).

    It takes a third of the time of NumPy's `add.at`.
    """
    out[...] = 0
    if not len(index):
        return out
    order = xp.argsort(index, kind="stable")
    ordered = index[order]
    if xp.module is np:
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))  # where each index's rows begin
        out[ordered[starts]] = np.add.reduceat(rows[order], starts, axis=0)
        return out
    # CuPy's `reduceat` takes differences of sums over all rows, which cancel, and `flatnonzero` waits.
    # Here each row adds the sum of the rows just before it that have its index: 1 of them, 2, 4, ...
    sums = rows[order]
    reach = 1
    while reach < len(ordered):
        same = (ordered[reach:] == ordered[:-reach])[:, None]
        sums[reach:] += xp.where(same, sums[:-reach], 0)
        reach *= 2
    values = xp.arange(len(out))
    last = xp.searchsorted(ordered, values, side="right") - 1  # where each index's rows end
    out[...] = xp.where((ordered[last] == values)[:, None], sums[last], 0)
    return out
