"""The elementary operations: each forward beside its backward.

Shapes broadcast as in NumPy; `unbroadcast` is the one place that undoes it. Constants (Python numbers, arrays) may
stand wherever a Tensor may; they get no gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, xp


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum `grad` over the dims that broadcasting `shape` added or stretched: the adjoint of broadcasting."""
    if grad.shape == shape:
        return grad
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return grad.sum(axis=stretched, keepdims=True) if stretched else grad


def _shape(x: Any) -> tuple[int, ...]:
    return getattr(x, "shape", ())


class _Add(Function):
    def forward(self, a: Any, b: Any) -> Array:
        self.shapes = _shape(a), _shape(b)
        return a + b

    def backward(self, grad: Array) -> Any:
        return tuple(unbroadcast(grad, s) if n else None for s, n in zip(self.shapes, self.needs, strict=True))


class _Sub(Function):
    def forward(self, a: Any, b: Any) -> Array:
        self.shapes = _shape(a), _shape(b)
        return a - b

    def backward(self, grad: Array) -> Any:
        a, b = self.shapes
        return unbroadcast(grad, a) if self.needs[0] else None, unbroadcast(-grad, b) if self.needs[1] else None


class _Mul(Function):
    def forward(self, a: Any, b: Any) -> Array:
        self.a = a if self.needs[1] else None
        self.b = b if self.needs[0] else None
        self.shapes = _shape(a), _shape(b)
        return a * b

    def backward(self, grad: Array) -> Any:
        return (
            unbroadcast(grad * self.b, self.shapes[0]) if self.needs[0] else None,
            unbroadcast(grad * self.a, self.shapes[1]) if self.needs[1] else None,
        )


class _Div(Function):
    def forward(self, a: Any, b: Any) -> Array:
        self.a, self.b = a, b
        return a / b

    def backward(self, grad: Array) -> Any:
        return (
            unbroadcast(grad / self.b, _shape(self.a)) if self.needs[0] else None,
            unbroadcast(-grad * self.a / (self.b * self.b), _shape(self.b)) if self.needs[1] else None,
        )


class _Power(Function):
    def forward(self, x: Array, exponent: float) -> Array:
        self.x, self.exponent = x, exponent
        return x**exponent

    def backward(self, grad: Array) -> Any:
        return grad * (self.exponent * self.x ** (self.exponent - 1)), None


class _Exp(Function):
    def forward(self, x: Array) -> Array:
        self.y = xp.exp(x)
        return self.y

    def backward(self, grad: Array) -> Array:
        return grad * self.y


class _Log(Function):
    def forward(self, x: Array) -> Array:
        self.x = x
        return xp.log(x)

    def backward(self, grad: Array) -> Array:
        return grad / self.x


class _Tanh(Function):
    def forward(self, x: Array) -> Array:
        self.y = xp.tanh(x)
        return self.y

    def backward(self, grad: Array) -> Array:
        return grad * (1 - self.y * self.y)


class _MatMul(Function):
    """(..., n, k) @ (..., k, m) -> (..., n, m); the leading (batch) dims broadcast. 2 dims or more on both sides."""

    def forward(self, a: Array, b: Array) -> Array:
        if a.ndim < 2 or b.ndim < 2:
            raise ValueError(f"matmul needs matrices, but the shapes are {a.shape} and {b.shape}")
        self.a, self.b = a, b
        return xp.matmul(a, b)

    def backward(self, grad: Array) -> Any:
        a, b = self.a, self.b
        return (
            unbroadcast(xp.matmul(grad, b.swapaxes(-1, -2)), a.shape) if self.needs[0] else None,
            unbroadcast(xp.matmul(a.swapaxes(-1, -2), grad), b.shape) if self.needs[1] else None,
        )


class _Reshape(Function):
    def forward(self, x: Array, shape: tuple[int, ...]) -> Array:
        self.shape = x.shape
        return x.reshape(shape)

    def backward(self, grad: Array) -> Any:
        return grad.reshape(self.shape), None


class _Transpose(Function):
    def forward(self, x: Array, axes: tuple[int, ...]) -> Array:
        self.axes = axes
        return x.transpose(axes)

    def backward(self, grad: Array) -> Any:
        inverse = sorted(range(len(self.axes)), key=lambda i: self.axes[i] % grad.ndim)
        return grad.transpose(inverse), None


class _GetItem(Function):
    """Slices, integers, and integer or boolean arrays as NumPy indexes them; an element taken twice gets both
    gradients.
    """

    def forward(self, x: Array, index: Any) -> Array:
        self.shape, self.index = x.shape, index
        return x[index]

    def backward(self, grad: Array) -> Any:
        full = xp.zeros(self.shape, dtype=grad.dtype)
        xp.add.at(full, self.index, grad)
        return full, None


class _Sum(Function):
    def forward(self, x: Array, dim: Any, keepdims: bool) -> Array:
        self.shape, self.kept = x.shape, x.sum(axis=dim, keepdims=True).shape
        return x.sum(axis=dim, keepdims=keepdims)

    def backward(self, grad: Array) -> Any:
        return xp.broadcast_to(grad.reshape(self.kept), self.shape), None, None


class _Max(Function):
    """Equal maxima share the gradient."""

    def forward(self, x: Array, dim: int | None, keepdims: bool) -> Array:
        top = x.max(axis=dim, keepdims=True)
        self.is_top = x == top
        self.count = self.is_top.sum(axis=dim, keepdims=True).astype(x.dtype)
        return top if keepdims else x.max(axis=dim)

    def backward(self, grad: Array) -> Any:
        return self.is_top * (grad.reshape(self.count.shape) / self.count), None, None


class _Concatenate(Function):
    def forward(self, dim: int, *parts: Array) -> Array:
        self.dim, self.cuts = dim, list(itertools.accumulate(part.shape[dim] for part in parts))[:-1]
        return xp.concatenate(parts, axis=dim)

    def backward(self, grad: Array) -> Any:
        return (None, *xp.split(grad, self.cuts, axis=self.dim))


def add(a: Any, b: Any) -> Tensor:
    return _Add.apply(a, b)


def sub(a: Any, b: Any) -> Tensor:
    return _Sub.apply(a, b)


def mul(a: Any, b: Any) -> Tensor:
    return _Mul.apply(a, b)


def div(a: Any, b: Any) -> Tensor:
    return _Div.apply(a, b)


def power(x: Tensor, exponent: float) -> Tensor:
    """x ** exponent for a constant exponent. NB: x * x is far faster than x ** 3 on float32 (75 times where we
    measured).
    """
    return _Power.apply(x, exponent)


def exp(x: Tensor) -> Tensor:
    return _Exp.apply(x)


def log(x: Tensor) -> Tensor:
    return _Log.apply(x)


def tanh(x: Tensor) -> Tensor:
    return _Tanh.apply(x)


def matmul(a: Any, b: Any) -> Tensor:
    """Batched matrix product, (..., n, k) @ (..., k, m) -> (..., n, m)."""
    return _MatMul.apply(a, b)


def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return _Reshape.apply(x, shape)


def transpose(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return _Transpose.apply(x, axes)


def getitem(x: Tensor, index: Any) -> Tensor:
    return _GetItem.apply(x, index)


def sum(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    return _Sum.apply(x, dim, keepdims)


def mean(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    total = sum(x, dim, keepdims)
    return mul(total, total.size / x.size)


def max(x: Tensor, dim: int | None = None, keepdims: bool = False) -> Tensor:
    return _Max.apply(x, dim, keepdims)


def concatenate(parts: list[Tensor], dim: int = 0) -> Tensor:
    return _Concatenate.apply(dim, *parts)
