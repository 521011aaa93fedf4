"""This rank's chunks of buckets, and the whole gradients that backward allocates and ZeRO frees.

A chunk holds shards of parameters. The optimizer updates these shards.
"""

from collections.abc import Callable, Mapping, Sequence
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
        self.later_sums: list[Array] = []  # the other sums of the step, which `accept_sums` adds to `gradient`
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
        """Return the array for the next sum: `gradient`, or a new array if `gradient` holds a sum already."""
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
    """Return the shards of all chunks. A rank without elements has one empty shard.

    An optimizer finds the guard of its strategy through the parameters that it holds, so it needs
    one on each rank.
    """
    if not any(chunk.shards for chunk in chunks.values()):
        bucket, chunk = next(iter(chunks.items()))
        chunk.add_shard(bucket.parameters[0], range(0), 0)
    return [shard for chunk in chunks.values() for shard in chunk.shards]


def allocate_gradient(bucket: Bucket, dtype: Any, works: Sequence[Pending], sends: bool) -> None:
    """Make the array in which backward writes a bucket's whole gradient, unless there is one.

    `sends` says whether this backward sends gradients. If it does, this function first waits for
    all reduce-scatters under way (`works`) but the last, so that their whole gradients are freed.
    If it does not (`no_sync`), the array stays until the last microbatch.
    """
    if bucket.gradient is not None:
        return
    if sends:
        for work in works[:-1]:
            work.wait()
    kind = "buffers" if sends else "gradients"  # the kind of memory in minipar/memory.py's account
    bucket.set_gradient(allocate(kind, bucket.size, dtype))


def at_backward(x: Any, call: Callable[[], None]) -> Any:
    """Return x through an identity; backward calls `call()` when it comes to the identity.

    x may be a tuple or a list. A value without a gradient, such as tokens, is returned as it is,
    and `call()` does not happen.
    """
    if isinstance(x, tuple | list):
        return type(x)([at_backward(item, call) for item in x])
    if not (isinstance(x, Tensor) and x.requires_grad):
        return x

    def backward(grad: Array) -> Array:
        call()
        return grad

    return mapping(x, lambda array: array, backward)
