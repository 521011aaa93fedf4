"""Linear, Embedding, LayerNorm and Dropout, and the generators of weights and masks.

Random values come from counter-based generators that are keyed by a name and never by a rank. A
layer of the same name and seed therefore starts from the same weights in every layout: a rank that
holds a slice takes that slice of the whole. A dropout mask is drawn for each sample, keyed by the
layer's name, the step and the sample's index in the global batch, so whoever computes a sample
draws that one mask.
"""

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd.checks import check_ids
from minipar.autograd.fused import dropout, embedding, layer_norm, linear
from minipar.autograd.tensor import Tensor, randomness
from minipar.backend import Array, from_host, setting, xp
from minipar.errors import UsageError
from minipar.nn.module import Module, array_of
from minipar.nn.parameter import Parameter, placeholder


def generator(seed: int, name: str) -> np.random.Generator:
    """Return a Philox generator (Salmon et al. 2011) whose 128-bit key is a hash of (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Draw float64 values from N(0, std^2): the same for the same (seed, name, shape) everywhere."""
    return generator(seed, name).standard_normal(shape) * std


def drawn(name: str, shape: tuple[int, ...], seed: int | None, dtype: str, std: float) -> Parameter:
    """Make a parameter of values from N(0, std^2), drawn by name.

    With seed None it has a shape and no values, as on PyTorch's meta device.
    """
    if seed is None:
        return Parameter(placeholder(shape, dtype))
    parameter = Parameter(from_host(normal(seed, name, shape, std).astype(dtype)))
    parameter.drawn_by = (seed, name)
    return parameter


def constant(value: float, size: int, dtype: str) -> Parameter:
    """Make a parameter whose elements are all `value`."""
    return Parameter(xp.full(size, value, dtype=dtype))


def as_tensor(x: Tensor | Array, dtype: DTypeLike) -> Tensor:
    """Return x if it is a Tensor, else a Tensor of the array x in this dtype."""
    if isinstance(x, Tensor):
        return x
    return Tensor(xp.asarray(x, dtype=dtype))


class Linear(Module):
    """The layer x @ weight + bias: (..., in) -> (..., out).

    x may be a Tensor or an array, which is converted to weight's dtype. NB: weight is (in, out), as
    in GPT-2's checkpoints (Hugging Face's Conv1D). If `transposed` it is (out, in), as in
    torch.nn.Linear and Llama's checkpoints. It is drawn from N(0, std^2) by `name` and `seed`; the
    bias starts as 0.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        name: str,
        bias: bool = True,
        transposed: bool = False,
        seed: int | None = 0,
        dtype: str = "float32",
        std: float = 0.02,
    ) -> None:
        shape = (n_out, n_in) if transposed else (n_in, n_out)
        self.transposed = transposed
        self.weight = drawn(f"{name}.weight", shape, seed, dtype, std)
        self.bias = constant(0, n_out, dtype) if bias else None

    def forward(self, x: Tensor | Array) -> Tensor:
        x = as_tensor(x, self.weight.dtype)
        return linear(x, self.weight, self.bias, self.transposed)


class Embedding(Module):
    """The rows of a matrix (count, dim) by index: integers (...,) -> (..., dim).

    The matrix is drawn as Linear's. UsageError for an index that is not in 0..count-1.
    """

    def __init__(
        self,
        count: int,
        dim: int,
        *,
        name: str,
        seed: int | None = 0,
        dtype: str = "float32",
        std: float = 0.02,
    ) -> None:
        self.name = name
        self.count = count
        self.weight = drawn(f"{name}.weight", (count, dim), seed, dtype, std)

    def forward(self, index: Array) -> Tensor:
        return embedding(self.weight, self.checked(index))

    def checked(self, index: Array) -> Array:
        """Return the index as an array, every element of which is in 0..count-1."""
        index = array_of(index)
        check_ids(index, self.count, "token", where=f" of {self.name}")
        return from_host(index)


class LayerNorm(Module):
    """LayerNorm over the last dim with a gain and a bias: (..., size) -> (..., size)."""

    def __init__(self, size: int, eps: float = 1e-5, dtype: str = "float32") -> None:
        self.weight = constant(1, size, dtype)
        self.bias = constant(0, size, dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class DropoutKeys:
    """The keys of a forward pass's masks."""

    seed: int  # the run's
    step: int
    samples: Sequence[int]  # their indices in the global batch


def dropping(keys: DropoutKeys) -> AbstractContextManager[DropoutKeys]:
    """Apply dropout with these keys in forward passes inside the block.

    Dropout is off outside of such a block.
    """
    return setting(randomness, keys)


class Dropout(Module):
    """Dropout: each element is zero with probability `p`, the others are scaled by 1/(1 - p).

    (B, ...) -> (B, ...).
    """

    def __init__(self, name: str, p: float) -> None:
        if not 0 <= p < 1:
            raise UsageError(f"dropout = {p!r}: expected a probability from 0 on and below 1")
        self.name = name  # the masks are drawn by it
        self.p = p

    def mask(self, shape: tuple[int, ...]) -> Array | None:
        """Draw the samples' masks for an array of this shape, True where an element stays.

        The result is None while dropout is off. ValueError for keys of more or fewer samples.
        """
        keys = randomness.get()
        if self.p == 0 or keys is None:
            return None
        mask = np.empty(shape, dtype=bool)
        for row, sample in zip(mask, keys.samples, strict=True):
            stream = generator(keys.seed, f"dropout {self.name} {keys.step} {sample}")
            row[...] = stream.random(row.shape, dtype=np.float32) >= self.p
        return from_host(mask)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x.shape)
        return x if mask is None else dropout(x, mask, self.p)
