"""Linear, Embedding, LayerNorm: parameters and one call each.

Initial weights are drawn by name (see init.py), so a layer of the same name and seed has the same weights in any
layout. With `deferred=True` the values are computed later, by `materialize`. `of` makes a layer of given values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minipar.autograd import Tensor, embedding, layer_norm, linear
from minipar.backend import Array, from_host, xp
from minipar.nn import init
from minipar.nn.module import Deferred, Module, Parameter


def _normal(seed: int, name: str, shape: tuple[int, ...], std: float, dtype: str) -> Deferred:
    """Describe a parameter drawn from N(0, std^2) by name."""
    kind = np.dtype(dtype)
    return Deferred(shape, kind, lambda: from_host(init.normal(seed, name, shape, std).astype(kind)))


def _constant(value: float, size: int, dtype: str) -> Deferred:
    """Describe a parameter whose elements are all `value`."""
    kind = np.dtype(dtype)
    return Deferred((size,), kind, lambda: xp.full(size, value, dtype=kind))


def _tensor(x: Any, dtype: Any) -> Tensor:
    """Return x if it is a Tensor, else a Tensor of the array x in this dtype."""
    return x if isinstance(x, Tensor) else Tensor(xp.asarray(x, dtype=dtype))


class Linear(Module):
    """x @ weight + bias: (..., in) -> (..., out). x may be a Tensor or an array, which is converted to weight's dtype.

    NB: weight is (in, out), as in GPT-2's checkpoints (Hugging Face calls the layer Conv1D); torch.nn.Linear stores
    (out, in).
    """

    bias: Parameter | None

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        name: str,
        seed: int = 0,
        dtype: str = "float32",
        std: float = 0.02,
        bias: bool = True,
        deferred: bool = False,
    ) -> None:
        self.weight = Parameter(_normal(seed, f"{name}.weight", (n_in, n_out), std, dtype))
        self.bias = Parameter(_constant(0, n_out, dtype)) if bias else None
        if not deferred:
            self.materialize()

    @classmethod
    def of(cls, weight: Array | Deferred, bias: Array | Deferred | None = None) -> Linear:
        """Make a layer of these values: weight (in, out), bias (out,) or none."""
        layer = cls.__new__(cls)
        layer.weight, layer.bias = Parameter(weight), None if bias is None else Parameter(bias)
        return layer

    def forward(self, x: Tensor | Array) -> Tensor:
        return linear(_tensor(x, self.weight.dtype), self.weight, self.bias)


class Embedding(Module):
    """Rows of weight (count, dim) by index: integers (...,) -> (..., dim)."""

    def __init__(
        self,
        count: int,
        dim: int,
        *,
        name: str,
        seed: int = 0,
        dtype: str = "float32",
        std: float = 0.02,
        deferred: bool = False,
    ) -> None:
        self.weight = Parameter(_normal(seed, f"{name}.weight", (count, dim), std, dtype))
        if not deferred:
            self.materialize()

    @classmethod
    def of(cls, weight: Array | Deferred) -> Embedding:
        """Make a layer of these values: weight (count, dim)."""
        layer = cls.__new__(cls)
        layer.weight = Parameter(weight)
        return layer

    def forward(self, index: Array) -> Tensor:
        return embedding(self.weight, index)


class LayerNorm(Module):
    """LayerNorm over the last dim with a gain and a bias: (..., size) -> (..., size). x is a Tensor or an array."""

    def __init__(self, size: int, eps: float = 1e-5, dtype: str = "float32", deferred: bool = False) -> None:
        self.weight, self.bias = Parameter(_constant(1, size, dtype)), Parameter(_constant(0, size, dtype))
        self.eps = eps
        if not deferred:
            self.materialize()

    @classmethod
    def of(cls, weight: Array | Deferred, bias: Array | Deferred, eps: float = 1e-5) -> LayerNorm:
        """Make a layer of these values: weight and bias (size,)."""
        layer = cls.__new__(cls)
        layer.weight, layer.bias, layer.eps = Parameter(weight), Parameter(bias), eps
        return layer

    def forward(self, x: Tensor | Array) -> Tensor:
        return layer_norm(_tensor(x, self.weight.dtype), self.weight, self.bias, self.eps)
