"""Flat storage: all parameters of a model in one array, all gradients in another, and buckets, which are slices of
both.

A message then needs no packing: a bucket of gradients is contiguous memory that the collective reduces where it lies,
and backward wrote it there in the first place. ZeRO cuts each bucket into one chunk per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minipar.backend import Array, xp
from minipar.comm import chunk_bounds
from minipar.memory import hold
from minipar.nn import GPT, Parameter

# PyTorch DDP's sizes (Li et al. 2020, section 4.2): a small first bucket, so that communication starts early in
# backward.
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Bucket:
    """Neighbouring parameters that travel together: elements start:stop of the flat order."""

    parameters: tuple[Parameter, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def views(self, array: Array) -> Iterator[tuple[Parameter, Array]]:
        """Each parameter with its place, in its shape, in an array of the bucket's elements."""
        offset = 0
        for p in self.parameters:
            yield p, array[offset : offset + p.size].reshape(p.shape)
            offset += p.size

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Parameter, int, int]]:
        """The parameters that elements start:stop of the bucket belong to, and which of these are whose."""
        offset = 0
        for p in self.parameters:
            first, last = max(start, offset), min(stop, offset + p.size)
            if first < last:
                yield p, first, last
            offset += p.size

    def chunk(self, rank: int, ranks: int) -> tuple[int, int]:
        """(start, stop), counted from the bucket's start, of the part that belongs to `rank`."""
        return chunk_bounds(self.size, ranks)[rank]


class FlatOrder:
    """Parameters of one dtype one after another: `.size` elements in all, without padding. Holds no numbers."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        dtypes = {str(p.dtype) for p in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"flat storage needs parameters of one dtype, found {sorted(dtypes) or 'no parameters'}")
        self.members = list(parameters)
        self.dtype = self.members[0].dtype
        self.offsets: list[int] = []
        self.size = 0
        for p in self.members:
            self.offsets.append(self.size)
            self.size += p.size

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Make the gradient storage valid for `parameters`: ties folded in, zeros where backward left no gradient."""
        for p in parameters:
            p.fold_tied_gradients()
            if p.grad is None and p.grad_buffer is not None:
                p.grad_buffer[...] = 0
                p.grad = p.grad_buffer

    def buckets(self, bucket_bytes: int = BUCKET_BYTES, first_bucket_bytes: int = FIRST_BUCKET_BYTES) -> list[Bucket]:
        """Buckets in reverse parameter order, which is about the order in which backward completes gradients.

        A bucket is closed once it holds `bucket_bytes` (the first: `first_bucket_bytes`) or more. Every parameter is in
        exactly one.
        """
        groups: list[list[Parameter]] = []
        held = 0
        for p in reversed(self.members):
            if held == 0:
                groups.append([])
            groups[-1].insert(0, p)
            held += p.size * self.dtype.itemsize
            if held >= (bucket_bytes if len(groups) > 1 else first_bucket_bytes):
                held = 0
        return self.buckets_of(groups[::-1])

    def buckets_of(self, groups: Sequence[Sequence[Parameter]]) -> list[Bucket]:
        """A bucket for each group, last group first; the groups, one after another, are this order's parameters."""
        buckets: list[Bucket] = []
        start = 0
        for group in groups:
            stop = start + sum(p.size for p in group)
            buckets.insert(0, Bucket(tuple(group), start, stop))
            start = stop
        return buckets


class FlatBuffers(FlatOrder):
    """Moves `parameters` into one flat array, in order, and gives each a place in a flat gradient array.

    `.parameters` and `.gradients` are the flat arrays. With `gradients=False` there is no array for them: whoever asks
    for this gives the parameters their places when backward comes.
    """

    def __init__(self, parameters: Sequence[Parameter], gradients: bool = True) -> None:
        super().__init__(parameters)
        self.parameters: Array = xp.empty(self.size, dtype=self.dtype)
        self.gradients: Array = xp.zeros(self.size, dtype=self.dtype) if gradients else None
        hold("parameters", self.parameters)
        hold("gradients", self.gradients)
        whole = Bucket(tuple(self.members), 0, self.size)
        for p, place in whole.views(self.parameters):
            p.move_to(place)
            p.grad = None
        if gradients:
            for p, place in whole.views(self.gradients):
                p.grad_buffer = place


def units(model: GPT) -> list[list[Parameter]]:
    """The model's parameters by what runs at one time: a group for each block, and one, the first, for the embedding
    and the head, which share the token embedding.

    The unit in which FSDP gathers, and the bucket of every ZeRO stage: with the same buckets all stages add the same
    numbers in the same order.
    """
    groups: list[list[Parameter]] = []
    for part in model.parts:
        shared = [group for group in groups if not set(part.parameters).isdisjoint(group)]
        if shared:
            shared[0] += [p for p in part.parameters if p not in set(shared[0])]
        else:
            groups.append(list(part.parameters))
    return groups
