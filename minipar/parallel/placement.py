"""Placements: for each parameter of the serial model, what every mesh axis does to it, as seen from one rank.

Each strategy records its part and knows nothing of the others. Everything that spans axes is a loop over placements.

    tp   Shard(dim), Replicate or Partial   NB: the terms of torch.distributed.tensor
    pp   the pipeline rank that owns the parameter
    ep   the expert-parallel rank that holds the parameter, an expert's
    dp   the parameter's place in a bucket; chunk r of a bucket belongs to data-parallel rank r
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minipar.backend import Array, xp
from minipar.comm.algorithms import chunk_bounds
from minipar.nn.module import Module, Parameter


@dataclass(frozen=True)
class Replicate:
    """Every tensor-parallel rank holds the whole parameter and computes its whole gradient."""

    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Partial(Replicate):
    """A whole parameter whose gradient covers this rank's tokens only (sequence parallelism) or its columns only."""


@dataclass(frozen=True)
class Shard(Replicate):
    """Each tensor-parallel rank holds a part of the parameter: a slice along `dim` of each of `groups` equal stretches.

    `size` is that dim's length in the serial model, padded with zeros to a multiple of groups*ranks.
    """

    dim: int = 0
    size: int = 0
    groups: int = 1

    @property
    def step(self) -> int:
        """This rank's length of one stretch, padding included."""
        return -(-self.size // (self.groups * self.ranks))

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each rank's part of an array of `shape`."""
        return tuple(self.groups * self.step if dim == self.dim else size for dim, size in enumerate(shape))

    def part(self, whole: Array) -> Array:
        """Copy this rank's part out of the serial array."""
        padding = [(0, 0)] * whole.ndim
        padding[self.dim] = (0, self.step * self.groups * self.ranks - self.size)
        stretches = xp.split(xp.pad(whole, padding), self.groups, axis=self.dim)
        own = (slice(None),) * self.dim + (slice(self.rank * self.step, (self.rank + 1) * self.step),)
        return xp.concatenate([stretch[own] for stretch in stretches], axis=self.dim)

    def join(self, parts: Sequence[Array]) -> Array:
        """Join all ranks' parts, given in rank order, into the serial array; padding is removed."""
        pieces = [xp.split(part, self.groups, axis=self.dim) for part in parts]
        whole = xp.concatenate([piece[g] for g in range(self.groups) for piece in pieces], axis=self.dim)
        return whole[(slice(None),) * self.dim + (slice(0, self.size),)]


@dataclass(frozen=True)
class BucketSlice:
    """A parameter's `size` elements inside a bucket, whose chunk r belongs to data-parallel rank r."""

    offset: int  # of the parameter's first element in the bucket
    size: int
    bucket_size: int
    rank: int
    ranks: int
    replica: int = 0  # which of the groups that hold all chunks (hybrid sharding)

    def elements(self, rank: int, ranks: int) -> range:
        """Return the parameter's elements in chunk `rank` of a bucket that is cut into `ranks` chunks."""
        start, stop = chunk_bounds(self.bucket_size, ranks)[rank]
        start, stop = (min(max(end - self.offset, 0), self.size) for end in (start, stop))
        return range(start, stop)

    @property
    def own(self) -> range:
        """The elements whose optimizer state, in every ZeRO stage, this rank writes to a checkpoint."""
        return self.elements(self.rank, self.ranks)


@dataclass(frozen=True)
class Placement:
    """One parameter's place. A unit is what travels in one bucket; the gradient's norm is summed unit by unit."""

    name: str  # name and shape are those of the serial model
    shape: tuple[int, ...]
    tp: Replicate = Replicate()
    pp: int = 0
    ep: int | None = None  # None: every expert-parallel rank holds it
    dp: BucketSlice | None = None
    unit: int = 0  # the number of the parameter's unit, in the model's order
    units: int = 0  # on all pipeline ranks together


def place(model: Module) -> None:
    """Give every parameter of a serial model its Placement, unless it has one already."""
    for name, parameter in model.named_parameters():
        if parameter.placement is None:
            parameter.placement = Placement(name, parameter.shape)
        elif not parameter.placement.name:  # a layer that was made parallel before it became part of a model
            update(parameter, name=name)


def update(parameter: Parameter, **changes: Any) -> None:
    """Record what one strategy does to a parameter: `update(p, tp=Shard(...))`."""
    parameter.placement = replace(placement_of(parameter), **changes)


def placement_of(parameter: Parameter) -> Placement:
    """Return a parameter's Placement; ValueError if no strategy has placed it."""
    if parameter.placement is None:
        raise ValueError("this parameter has no placement: call place(model) or wrap the model in a strategy first")
    return parameter.placement


def bucket_slice(parameter: Parameter) -> BucketSlice:
    """Return a parameter's place in its bucket; ValueError if data parallelism has not placed it."""
    place = placement_of(parameter).dp
    if place is None:
        raise ValueError(f"{placement_of(parameter).name} is in no bucket: wrap the model in a data-parallel strategy")
    return place


class ParameterShard(Parameter):
    """This rank's elements of a parameter: a 1-D Parameter for the optimizer, which decays as the whole one does."""

    __slots__ = ("elements",)

    def __init__(self, whole: Parameter, data: Array, elements: range) -> None:
        super().__init__(data)
        self.decays, self.placement, self.elements = whole.decays, whole.placement, elements


def elements_of(parameter: Parameter) -> range:
    """Return which of the local parameter's elements the optimizer's `parameter` holds: its own, or all."""
    return parameter.elements if isinstance(parameter, ParameterShard) else range(parameter.size)
