"""This rank's chunks of buckets, and the whole gradients that backward allocates and ZeRO frees.

A chunk holds shards of parameters. The optimizer updates these shards.
"""

from collections.abc import Sequence

from minipar.backend import Array
from minipar.comm.work import Work
from minipar.memory import allocate
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import BackwardHooks, Bucket
from minipar.parallel.placement import ParameterShard, bucket_slice


class Chunk:
    """This rank's part of a bucket: its flat `data` and `gradient`, and a shard for each parameter in it."""

    def __init__(self, bucket: Bucket, data: Array, gradient: Array) -> None:
        self.data = data
        self.gradient = gradient  # the step's first sum over the ranks; then all of them added up
        self.later_sums: list[Array] = []  # the step's other sums, which `accept_sums` adds to `gradient`
        self.shards: list[Parameter] = []
        start = 0
        for p in bucket.parameters:
            elements = bucket_slice(p).own  # the elements of p that lie in this chunk
            # One empty shard stays: an optimizer without parameters would take no part in collective steps.
            if elements or (data.size == 0 and not self.shards):
                stop = start + len(elements)
                shard = ParameterShard(p, data[start:stop], elements)
                shard.grad_buffer = gradient[start:stop]
                self.shards.append(shard)
                start = stop

    def room_for_sum(self) -> Array:
        """Return the array for the next sum: `gradient`, or a new one while that holds the step's first sum."""
        if self.shards[0].grad is None:  # the step's first sum: `zero_grad` has forgotten the last step's
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


class ShardedBucket(Bucket):
    """A bucket whose values lie in one flat array; this rank updates its chunk of them."""

    values: Array
    chunk: Chunk


def allocate_next_gradient(hooks: BackwardHooks, works: Sequence[Work]) -> None:
    """Allocate the whole gradient of the bucket that backward completes next, unless there is one.

    Wait first for all but the last of the reduce-scatters under way (`works`); this frees the whole
    gradients of those. Under `no_sync` allocate the whole gradients of all buckets, which stay until the
    last microbatch.
    """
    if not hooks.enabled:
        for bucket in hooks.buckets:
            bucket.allocate_gradient("gradients")
    elif hooks.unsent and hooks.unsent[0].gradient is None:
        for work in works[:-1]:
            work.wait()
        hooks.unsent[0].allocate_gradient("buffers")
