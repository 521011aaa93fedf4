"""Placements: for each parameter of the serial model, what every mesh axis does to it on one rank.

Each strategy records its part and knows nothing of the others. Everything that spans axes is a
loop over placements.

    tp   Shard(dim), Replicate or Partial   NB: the terms of torch.distributed.tensor
    pp   the pipeline rank that owns the parameter
    ep   the expert-parallel rank that holds the parameter, an expert's
    dp   the parameter's slice of a bucket; chunk r of a bucket belongs to data-parallel rank r
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minipar.backend import Array, xp
from minipar.comm.algorithms import chunk_bounds
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter, check_names, drawn_names


@dataclass(frozen=True)
class Whole:
    """A parameter that every tensor-parallel rank holds whole: a Replicate or a Partial."""

    rank: int = 0
    ranks: int = 1

    def __str__(self) -> str:
        return type(self).__name__


class Replicate(Whole):
    """Every tensor-parallel rank holds the whole parameter and computes its whole gradient."""


class Partial(Whole):
    """A whole parameter whose gradient on a rank is one term of a sum over the ranks of tp.

    With sequence parallelism the gradient of a norm covers a rank's tokens.
    """


@dataclass(frozen=True)
class Shard:
    """Each tensor-parallel rank holds a slice along `dim` of each of `groups` equal stretches.

    `size` is that dim's length in the serial model, which zeros pad to a multiple of groups*ranks.
    """

    rank: int
    ranks: int
    dim: int
    size: int
    groups: int = 1

    def __str__(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"Shard({self.dim}{groups})"

    @property
    def step(self) -> int:
        """This rank's length of one stretch, padding included."""
        return -(-self.size // (self.groups * self.ranks))

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each rank's part of an array of `shape`."""
        local = list(shape)
        local[self.dim] = self.groups * self.step
        return tuple(local)

    def part(self, whole: Array) -> Array:
        """Copy this rank's part out of the serial array."""
        padding = [(0, 0)] * whole.ndim
        padding[self.dim] = (0, self.step * self.groups * self.ranks - self.size)
        stretches = xp.split(xp.pad(whole, padding), self.groups, axis=self.dim)
        own = along(self.dim, self.rank * self.step, (self.rank + 1) * self.step)
        return xp.concatenate([stretch[own] for stretch in stretches], axis=self.dim)

    def join(self, parts: Sequence[Array]) -> Array:
        """Join all ranks' parts, given in rank order, into the serial array; padding is removed."""
        stretches = [xp.split(part, self.groups, axis=self.dim) for part in parts]
        ordered = []
        for group in range(self.groups):
            ordered += [stretches[rank][group] for rank in range(self.ranks)]
        return xp.concatenate(ordered, axis=self.dim)[along(self.dim, 0, self.size)]


TensorPlacement = Shard | Replicate | Partial


def along(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    """Return the index of elements start:stop along `dim`."""
    return (slice(None),) * dim + (slice(start, stop),)


@dataclass(frozen=True)
class BucketSlice:
    """A parameter's `size` elements inside a bucket, whose chunk r belongs to dp rank r."""

    offset: int  # where the parameter's first element is in the bucket
    size: int
    bucket_size: int
    rank: int
    ranks: int
    replica: int = 0  # which of the groups that hold all chunks (hybrid sharding)

    def elements(self, rank: int, ranks: int) -> range:
        """Return the parameter's elements in chunk `rank` of the bucket's `ranks` chunks."""
        start, stop = chunk_bounds(self.bucket_size, ranks)[rank]
        return range(self.clip(start), self.clip(stop))

    def clip(self, position: int) -> int:
        """Return the parameter's element at this position of the bucket, or its nearest end."""
        return min(max(position - self.offset, 0), self.size)

    @property
    def own(self) -> range:
        """The elements whose optimizer state this rank writes to a checkpoint, in every stage."""
        return self.elements(self.rank, self.ranks)


@dataclass(frozen=True)
class Placement:
    """The record of where one parameter is.

    A unit is what travels in one bucket; the gradient's norm is summed unit by unit.
    """

    name: str  # name and shape are those of the serial model
    shape: tuple[int, ...]
    tp: TensorPlacement = Replicate()
    pp: int = 0
    ep: int | None = None  # None: every expert-parallel rank holds it
    dp: BucketSlice | None = None
    unit: int = 0  # the number of the parameter's unit, in the model's order
    units: int = 0  # on all pipeline ranks together

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what a tensor-parallel rank holds."""
        return self.tp.local_shape(self.shape) if isinstance(self.tp, Shard) else self.shape

    def describe(self) -> str:
        """Say what a rank computes with, such as `up.weight, tp rank 1 of 2`."""
        if not isinstance(self.tp, Shard):
            return self.name
        return f"{self.name}, tp rank {self.tp.rank} of {self.tp.ranks}"


def attach_placements(model: Module) -> None:
    """Give every parameter of a serial model its Placement, unless it has one already.

    UsageError if two layers have one name: the strategies are where a model is seen as a whole.
    """
    check_names(drawn_names(model.parameters()))
    for name, parameter in model.named_parameters():
        if parameter.placement is None:
            parameter.placement = Placement(name, parameter.shape)
        elif not parameter.placement.name:  # its layer was made parallel outside of a model
            update(parameter, name=name)


def update(parameter: Parameter, **changes: Any) -> None:
    """Record what one strategy does to a parameter: `update(p, tp=Shard(...))`."""
    parameter.placement = replace(placement_of(parameter), **changes)


def placement_of(parameter: Parameter) -> Placement:
    """Return a parameter's Placement; ValueError if no strategy has placed it."""
    if parameter.placement is None:
        raise ValueError(
            "this parameter has no placement: call attach_placements(model) or wrap the model in a strategy first"
        )
    return parameter.placement


def number_units(units: Sequence[Sequence[Parameter]]) -> None:
    """Record the unit of each parameter, by which the gradient's norm is summed. A pipeline's own numbers stay."""
    for number, unit in enumerate(units):
        for p in unit:
            if placement_of(p).units == 0:
                update(p, unit=number, units=len(units))


class ParameterShard(Parameter):
    """This rank's elements of a parameter: a 1-D Parameter, which decays as the whole one does."""

    __slots__ = ("elements",)

    def __init__(self, whole: Parameter, data: Array, elements: range) -> None:
        super().__init__(data)
        self.decays = whole.decays
        self.placement = whole.placement
        self.elements = elements

    def __repr__(self) -> str:
        elements = f"{self.elements.start}:{self.elements.stop}"
        return f"ParameterShard({self.placement.name}[{elements}], {self.dtype})"

    def describe(self) -> str:
        """Say which elements of the model these are, such as `up.weight, tp rank 1 of 2[0:120]`."""
        return f"{super().describe()}[{self.elements.start}:{self.elements.stop}]"


def elements_of(parameter: Parameter) -> range:
    """Return which elements of a local parameter the optimizer's one holds: its own, or all."""
    if isinstance(parameter, ParameterShard):
        return parameter.elements
    return range(parameter.size)
