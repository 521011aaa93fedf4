"""Flat storage: all parameters of a model in one array, all gradients in another, and buckets, which are slices of
both.

A message then needs no packing: a bucket of gradients is contiguous memory that the collective reduces where it lies,
and backward wrote it there in the first place. ZeRO cuts the same arrays into one chunk per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minipar.backend import Array, xp
from minipar.nn import Parameter

# PyTorch DDP's sizes (Li et al. 2020, section 4.2): a small first bucket, so that communication starts early in
# backward.
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters whose gradients travel together: elements start:stop of the flat arrays."""

    parameters: tuple[Parameter, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class FlatBuffers:
    """Moves `parameters` (of one dtype) into one flat array, in order, and gives each a place in a flat gradient array.

    `.parameters` and `.gradients` are the flat arrays, of `.size` elements, without padding.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        dtypes = {str(p.dtype) for p in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"flat storage needs parameters of one dtype, found {sorted(dtypes) or 'no parameters'}")
        self.members = list(parameters)
        self.size = sum(p.size for p in self.members)
        self.parameters: Array = xp.empty(self.size, dtype=self.members[0].dtype)
        self.gradients: Array = xp.zeros(self.size, dtype=self.members[0].dtype)
        self.offsets: list[int] = []
        offset = 0
        for p in self.members:
            view = self.parameters[offset : offset + p.size].reshape(p.shape)
            view[...] = p.data
            p.data = view
            p.grad = None
            p.grad_buffer = self.gradients[offset : offset + p.size].reshape(p.shape)
            self.offsets.append(offset)
            offset += p.size

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Make the flat gradient array valid for `parameters`: ties folded in, zeros where backward left no
        gradient.
        """
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
        itemsize = self.parameters.dtype.itemsize
        buckets: list[Bucket] = []
        stop, group = self.size, []
        for p, offset in zip(reversed(self.members), reversed(self.offsets), strict=True):
            group.append(p)
            if (stop - offset) * itemsize >= (bucket_bytes if buckets else first_bucket_bytes):
                buckets.append(Bucket(tuple(group), offset, stop))
                stop, group = offset, []
        if group:
            buckets.append(Bucket(tuple(group), 0, stop))
        return buckets
