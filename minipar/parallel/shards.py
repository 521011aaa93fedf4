"""This rank's chunks of buckets, and the whole gradients that backward allocates and ZeRO frees.

A chunk holds shards of parameters. The optimizer updates these shards.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from minipar.autograd import Tensor, mapping
from minipar.backend import Array
from minipar.memory import allocate
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import Bucket
from minipar.parallel.hybrid import Pending
from minipar.parallel.placement import ParameterShard, bucket_slice


class Chunk:
    """This rank's part of a bucket: its flat `data` and `gradient`, and a shard for each parameter in it."""

    def __init__(self, bucket: Bucket, data: Array, gradient: Array) -> None:
        self.data = data
        self.gradient = gradient  # the step's first sum over the ranks; then all of them added up
        self.shards: list[Parameter] = []
        self.later_sums: list[
            Array
        ] = []  # the other sums of the step, which `accept_sums` adds to `gradient`
        start = 0
        for p in bucket.parameters:
            elements = bucket_slice(p).own  # the elements of p that lie in this chunk
            if elements:
                self.add_shard(p, elements, start)
                start += len(elements)

    def add_shard(self, whole: Parameter, elements: range, start: int) -> None:
        """Make a shard of these elements of `whole`. The first one is element `start` of the chunk."""
        stop = start + len(elements)
        shard = ParameterShard(whole, self.data[start:stop], elements)
        shard.grad_buffer = self.gradient[start:stop]
        self.shards.append(shard)

    def room_for_sum(self) -> Array:
        """Return the array for the next sum: `gradient`, or a new one while the guard leaves a sum in `gradient`."""
        if all(shard.grad is None for shard in self.shards):
            return self.gradient
        self.later_sums.append(allocate("buffers", self.gradient.size, self.gradient.dtype))
        return self.later_sums[-1]

    def accept_sums(self) -> None:
        """Add up the sums, which have arrived, and make them the gradients of the shards."""
        for gradient in self.later_sums:
            self.gradient += gradient
        self.later_sums = []
        for shard in self.shards:
            shard.grad = shard.grad_buffer


def all_shards(chunks: Mapping[Bucket, Chunk]) -> list[Parameter]:
    """Return the shards of all chunks. Without elements it is an empty one: optimizers find the guard through it."""
    if not any(chunk.shards for chunk in chunks.values()):
        bucket, chunk = next(iter(chunks.items()))
        chunk.add_shard(bucket.parameters[0], range(0), 0)
    return list(chain.from_iterable([chunk.shards for chunk in chunks.values()]))


def allocate_gradient(bucket: Bucket, works: Sequence[Pending], sends: bool) -> None:
    """Make the array in which backward writes a bucket's whole gradient, unless there is one.

    If this backward `sends` gradients, wait first for all reduce-scatters under way (`works`) but the
    last, which frees their whole gradients. Under `no_sync` the array stays until the last microbatch.
    """
    if bucket.gradient is not None:
        return
    if sends:
        for work in works[:-1]:
            work.wait()
    kind = "buffers" if sends else "gradients"  # the kind of memory in minipar/memory.py's account
    bucket.set_gradient(allocate(kind, bucket.size, bucket.parameters[0].grad_dtype))


def at_backward(x: Any, call: Callable[[], None]) -> Any:
    """Return x, or the items of a tuple or list, through an identity at which backward calls `call()`."""
    if isinstance(x, tuple | list):
        return type(x)([at_backward(item, call) for item in x])
    if not (isinstance(x, Tensor) and x.requires_grad):
        return x  # such as tokens: backward does not come here

    def backward(grad: Array) -> Array:
        call()
        return grad

    return mapping(x, lambda array: array, backward)
