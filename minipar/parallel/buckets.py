"""Buckets: parameters whose gradients travel in one message, in flat storage that needs no packing.

All parameters of a model lie in one flat array, all gradients in another, and a bucket is a slice of both. A message is
then contiguous memory: backward writes the gradients there and the collective reduces them in place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minipar.autograd import Tensor
from minipar.backend import Array, xp
from minipar.comm.algorithms import chunk_bounds
from minipar.comm.communicator import Communicator
from minipar.memory import hold
from minipar.nn.module import Module, Parameter, Part
from minipar.parallel.placement import BucketSlice, placement_of, update

# PyTorch DDP's sizes (Li et al. 2020, section 4.2): a small first bucket, so that communication starts early.
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20

Groups = Sequence[Sequence[Parameter]]  # all parameters of a model in its order, cut into buckets


@dataclass(eq=False)
class Bucket:
    """Neighbouring parameters that travel together: elements start:stop of the flat order. `comm` has their chunks."""

    parameters: tuple[Parameter, ...]
    start: int
    stop: int
    comm: Communicator

    @property
    def size(self) -> int:
        return self.stop - self.start

    def views(self, array: Array) -> Iterator[tuple[Parameter, Array]]:
        """Yield each parameter with its view, in its shape, of an array of the bucket's elements."""
        offset = 0
        for p in self.parameters:
            yield p, array[offset : offset + p.size].reshape(p.shape)
            offset += p.size

    @property
    def chunk(self) -> tuple[int, int]:
        """Return (start, stop), counted from the bucket's start, of this rank's chunk."""
        return chunk_bounds(self.size, self.comm.size)[self.comm.rank]

    def complete(self) -> None:
        """Make the gradient storage valid: add tied gradients, and write zeros where backward left no gradient."""
        for p in self.parameters:
            p.fold_tied_gradients()
            if p.grad is None and p.grad_buffer is not None:
                p.grad_buffer[...] = 0
                p.grad = p.grad_buffer

    def leaves(self) -> set[Tensor]:
        """Return what backward completes before the bucket may travel: its parameters and the leaves tied to them."""
        return {leaf for p in self.parameters for leaf in (p, *p.ties)}


def by_size(parameters: Sequence[Parameter], bucket_bytes: int, first_bucket_bytes: int) -> list[list[Parameter]]:
    """Group parameters, in the model's order, into buckets of `bucket_bytes` or more, filled from the last one on."""
    groups: list[list[Parameter]] = []
    held = 0
    for p in reversed(parameters):
        if held == 0:
            groups.insert(0, [])
        groups[0].insert(0, p)
        held += p.size * p.dtype.itemsize
        if held >= (bucket_bytes if len(groups) > 1 else first_bucket_bytes):
            held = 0
    return groups


def parts_of(model: Module) -> list[Part]:
    """Return the model's parts, in the order in which they run; a model that lists none is one part."""
    return getattr(model, "parts", None) or [Part("model", model.forward, model.parameters(), is_last=True)]


def by_unit(model: Module) -> list[list[Parameter]]:
    """Group the model's parameters by what runs at one time, in the model's order: what FSDP gathers at a time.

    GPT: one group for each block, and one, the first, for the embedding and the head, which share the token embedding.
    """
    groups: list[list[Parameter]] = []
    for part in parts_of(model):
        shared = [group for group in groups if not set(part.parameters).isdisjoint(group)]
        if shared:
            shared[0] += [p for p in part.parameters if p not in set(shared[0])]
        else:
            groups.append(list(part.parameters))
    return groups


def make_buckets(groups: Groups, comm: Communicator, replica: int = 0) -> list[Bucket]:
    """Make and place a bucket for each group, in the order in which they travel: the last group first.

    The groups, one after another, are the flat order. Of several groups of ranks that hold all chunks, `comm` is the
    one with number `replica`. Parameters with other `Owner.replicas` (experts) have a bucket of their own.
    ValueError for parameters of several dtypes, or of none.
    """
    dtypes = {str(p.dtype) for group in groups for p in group}
    if len(dtypes) != 1:
        raise ValueError(f"flat storage needs parameters of one dtype, but there are {sorted(dtypes) or 'none'}")
    buckets: list[Bucket] = []
    start = 0
    for i, group in enumerate(groups):
        holders: dict[Communicator, list[Parameter]] = {}
        for p in group:
            holders.setdefault((p.owner and p.owner.replicas) or comm, []).append(p)
        for ranks, parameters in holders.items():
            bucket = Bucket(tuple(parameters), start, start + sum(p.size for p in parameters), ranks)
            buckets.insert(0, bucket)
            for p in parameters:
                update(p, dp=BucketSlice(start - bucket.start, p.size, bucket.size, ranks.rank, ranks.size, replica))
                if placement_of(p).units == 0:  # a pipeline numbers the units of all its ranks
                    update(p, unit=i, units=len(groups))
                start += p.size
    return buckets


class FlatBuffers:
    """A flat array into which all the buckets' parameters move, and one of `gradient_dtype` that backward writes."""

    def __init__(self, buckets: Sequence[Bucket], gradient_dtype: Any) -> None:
        size, dtype = buckets[0].stop, buckets[0].parameters[0].dtype  # the first to travel is the end of the order
        self.parameters: Array = xp.empty(size, dtype=dtype)
        self.gradients: Array = xp.zeros(size, dtype=gradient_dtype) if gradient_dtype is not None else None
        hold("parameters", self.parameters)
        hold("gradients", self.gradients)
        for bucket in reversed(buckets):
            for p, view in bucket.views(self.parameters[bucket.start : bucket.stop]):
                p.move_to(view)
                p.grad = None
            if self.gradients is not None:
                for p, view in bucket.views(self.gradients[bucket.start : bucket.stop]):
                    p.grad_buffer = view
