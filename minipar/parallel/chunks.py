"""This rank's chunks of buckets.

A chunk holds shards of parameters. The optimizer updates these shards.
"""

from collections.abc import Sequence

from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.memory import allocate
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import Bucket
from minipar.parallel.placement import ParameterShard, placement_of


class Chunk:
    """This rank's part of a bucket: its flat `data` and `gradient`, and a shard for each parameter in it."""

    def __init__(self, bucket: Bucket, data: Array, gradient: Array) -> None:
        self.comm = bucket.comm
        self.data = data
        self.gradient = gradient  # the step's first sum over the ranks; then all of them added up
        self.arriving = gradient  # the sum under way; `accept_sum` adds a later one to `gradient`
        self.shards: list[Parameter] = []
        start = 0
        for p in bucket.parameters:
            recorded = placement_of(p).dp
            assert recorded is not None  # the bucket has recorded it
            elements = recorded.own  # the elements of p that lie in this chunk
            # One empty shard stays: an optimizer without parameters would take no part in collective steps.
            if elements or (data.size == 0 and not self.shards):
                stop = start + len(elements)
                shard = ParameterShard(p, data[start:stop], elements)
                shard.grad_buffer = gradient[start:stop]
                self.shards.append(shard)
                start = stop

    def start_sum(self, gradient: Array, algorithm: str) -> Work:
        """Start to reduce-scatter a bucket's whole gradient. This rank gets its chunk of the sum over the ranks.

        The sum goes into the chunk's `gradient`, or into a new array while that holds earlier sums of the step.
        """
        if self.shards[0].grad is None:  # the step's first sum: `zero_grad` has forgotten the last step's
            self.arriving = self.gradient
        else:
            self.arriving = allocate("buffers", self.gradient.size, self.gradient.dtype)
        return self.comm.reduce_scatter(gradient, out=self.arriving, algorithm=algorithm, async_op=True)

    def accept_sum(self) -> None:
        """Add the sum, which has arrived, to those before it, and make the result the shards' gradients."""
        if self.arriving is not self.gradient:
            self.gradient += self.arriving
            self.arriving = self.gradient
        for shard in self.shards:
            shard.grad = shard.grad_buffer

    def start_gather(self, whole: Array) -> Work:
        """Start to gather all ranks' chunks of a bucket into `whole`. Sends (d-1)/d of its bytes."""
        return self.comm.all_gather(self.data, out=whole, algorithm="pairwise", async_op=True)


class ShardedBucket(Bucket):
    """A bucket whose values lie in one flat array; this rank updates its chunk of them.

    With `keeps_gradient` the whole gradient stays, too. Then the sum is written into this rank's part of
    it, which every algorithm of the reduce-scatter reads before.
    """

    def __init__(self, parameters: Sequence[Parameter], comm: Communicator, keeps_gradient: bool) -> None:
        super().__init__(parameters, comm)
        self.values = self.flatten_values("parameters")
        data = self.values[self.own]
        if keeps_gradient:
            gradient = self.allocate_gradient("gradients")[self.own]
        else:
            gradient = allocate("gradients", data.size, self.gradient_dtype)
        self.chunk = Chunk(self, data, gradient)
        self.updated = self.chunk.shards
