"""Dropout with masks that are the same numbers in every layout.

A mask is drawn for each sample from a Philox generator keyed by the layer's name, the step and the sample's number in
the global batch. Whoever computes a sample, or a part of it, gets its part of that one mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from minipar.autograd import Tensor, dropout, randomness
from minipar.backend import Array, from_host
from minipar.nn.init import generator
from minipar.nn.module import Module


@dataclass(frozen=True)
class DropoutKeys:
    """What a forward pass's masks depend on: the run's seed, the step, and the samples' numbers in the global batch."""

    seed: int
    step: int
    samples: Sequence[int]


@contextmanager
def dropping(keys: DropoutKeys) -> Iterator[None]:
    """Forward passes inside the block go through dropout with these keys; outside of such a block dropout is off."""
    token = randomness.set(keys)
    try:
        yield
    finally:
        randomness.reset(token)


@dataclass(frozen=True)
class Window:
    """Part `index` of `count` equal parts of dim `dim`: what a model that holds only this much sees of a mask."""

    dim: int
    index: int
    count: int


class Dropout(Module):
    """Each element is zeroed with probability `p`, the others are scaled by 1/(1 - p): (B, ...) -> (B, ...).

    `name` tells this layer's masks from another's. With a `window` the layer sees that part of the whole mask.
    """

    def __init__(self, name: str, p: float) -> None:
        self.name, self.p = name, p
        self.window: Window | None = None

    def keep(self, shape: tuple[int, ...]) -> Array | None:
        """The mask for an array of this shape, True where an element stays; None while dropout is off."""
        keys: DropoutKeys | None = randomness.get()
        if self.p == 0 or keys is None:
            return None
        if len(keys.samples) != shape[0]:
            raise ValueError(f"dropout {self.name}: {shape[0]} samples, but keys for {len(keys.samples)}")
        whole, part = list(shape), [slice(None)] * len(shape)
        if self.window is not None:
            dim, size = self.window.dim, shape[self.window.dim]
            whole[dim] = size * self.window.count
            part[dim] = slice(self.window.index * size, (self.window.index + 1) * size)
        mask = np.empty(shape, dtype=bool)
        for row, sample in enumerate(keys.samples):
            random = generator(keys.seed, f"dropout {self.name} {keys.step} {sample}").random(
                whole[1:], dtype=np.float32
            )
            np.greater_equal(random[tuple(part[1:])], self.p, out=mask[row])
        return from_host(mask)

    def forward(self, x: Tensor) -> Tensor:
        keep = self.keep(x.shape)
        return x if keep is None else dropout(x, keep, self.p)
