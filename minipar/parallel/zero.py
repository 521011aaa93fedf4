"""ZeRO stages 1 and 2: data parallelism without its redundancy (arXiv 1910.02054).

Plain data parallelism keeps everything on every rank. Each stage cuts one more kind of model state
into chunks, one per rank. Stages 1 and 2 send as much as data parallelism: an all-reduce is a
reduce-scatter followed by an all-gather, and the optimizer's update fits between the two.

    stage 1   optimizer state: each rank updates its own chunk, then all ranks gather the chunks
    stage 2   gradients too: a bucket's whole gradient exists only until it is reduce-scattered
    stage 3   parameters too (fsdp.py)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd import Tensor
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.memory import allocate
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import BackwardHooks, Bucket
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.groups import Group, by_unit, groups_over, place_groups, segments_of
from minipar.parallel.guards import check_wrapping, refuse_late_state
from minipar.parallel.hybrid import Pending, in_dtype, over_shards, replicas_of_shards, set_gradient_dtype
from minipar.parallel.loss import global_mean_loss
from minipar.parallel.shards import Chunk, all_shards, allocate_gradient, at_backward
from minipar.parallel.state import gather_state
from minipar.parallel.step_guard import Guard


class ZeroStage1:
    """Data parallelism with sharded optimizer state: each rank updates its chunk of the model.

    Use it as DistributedDataParallel. Each of `groups`, or each unit of the model, becomes a bucket,
    of which rank r has chunk r. `parameters()` returns its shards: AdamW keeps moments for 1/d of the
    model. In a step, each rank sends 2 Psi (d-1)/d elements, and one float64 for the norm. With
    `replicas` = q, d/q neighbours hold a replica of the shards (hybrid.py), and d/q stands for d.
    """

    # The guard refuses a second pass with a sum: it would sum the first pass's sum again.
    accumulates_sums = False

    def __init__(
        self, model: Module, comm: Communicator, algorithm: str = "ring", *,
        groups: Sequence[Group] | None = None, replicas: int = 1,
        before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
        gradient_dtype: DTypeLike | None = None, reduce_dtype: DTypeLike | None = None,
    ) -> None:  # fmt: skip
        check_wrapping(model, comm, algorithm, replicas)
        self.model = model
        self.comm = comm
        self.algorithm = algorithm
        self.before_reduce = before_reduce
        self.shard_comm = over_shards(comm, replicas)  # the ranks that share one replica of the shards
        self.norm_comm = self.shard_comm  # each of them knows the squares of its own shards
        groups = groups_over(comm, by_unit(model)) if groups is None else groups
        place_groups(model, comm, groups, before_reduce, replicas)
        self.gradient_dtype = set_gradient_dtype(model, gradient_dtype)
        self.values: dict[Bucket, Array] = {}  # all parameters of each bucket, in one flat array
        self.chunks: dict[Bucket, Chunk] = {}  # this rank's chunk of each bucket
        replica = comm.rank // self.shard_comm.size  # the number of this rank's replica
        for group in groups:
            # A group that has ranks of its own, as experts do, is cut over these ranks.
            chunk_comm = self.shard_comm if group.comm is comm else group.comm
            bucket = Bucket(group, in_dtype(chunk_comm, reduce_dtype, self.gradient_dtype), replica)
            values = allocate("parameters", bucket.size, bucket.parameters[0].dtype)
            for p, view in bucket.views(values):
                p.move_to(view)
            self.values[bucket] = values
            gradient = self.allocate_own_gradient(bucket)
            self.chunks[bucket] = Chunk(bucket, values[bucket.own], gradient)
        self.wrap_segments()
        # Backward completes the last parameters first, so the last bucket is the first to be sent.
        self.buckets = list(reversed(self.chunks))
        self.shards = all_shards(self.chunks)
        self.guard = Guard(self)  # its hooks run before those that send, so that it refuses first
        self.hooks = BackwardHooks(self.buckets, self.reduce, comm.progress)
        self.works: list[Pending] = []  # the reduce-scatters under way

    def allocate_own_gradient(self, bucket: Bucket) -> Array:
        """Allocate the bucket's whole gradient for all steps; return this rank's chunk of it, for the sum."""
        whole = allocate("gradients", bucket.size, self.gradient_dtype)
        bucket.set_gradient(whole)
        return whole[bucket.own]  # the reduce-scatter reads this chunk last, and so may write into it

    def wrap_segments(self) -> None:
        """Do nothing: backward finds the whole gradients allocated."""

    def __call__(self, *inputs: Array) -> Tensor:
        return self.model(*inputs)

    def parameters(self) -> list[Parameter]:
        """Return this rank's shards, in the model's order."""
        return self.shards

    def loss(self, x: Array, y: Array) -> Tensor:
        """Return the mean loss over the targets of all ranks. All ranks call it; see loss.py."""
        self.guard.before_loss(x, y)
        return global_mean_loss(self.model, self.comm, x, y, self.guard.before_backward, self.after_backward)

    def reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket's gradients, and return at once; this rank gets its chunk of the sum."""
        gradient = bucket.complete()
        if self.before_reduce is not None:
            self.before_reduce(bucket.parameters)
        out = self.chunks[bucket].room_for_sum()
        self.works.append(
            bucket.comm.reduce_scatter(gradient, out=out, algorithm=self.algorithm, async_op=True)
        )

    def after_backward(self) -> None:
        """Finish the sum, unless inside `no_sync`. Each loss of a pass queues this; later calls find no gradients."""
        if self.hooks.enabled and self.hooks.has_gradients:
            self.synchronize()

    def synchronize(self) -> None:
        """Send the remaining buckets; wait until every shard has the sum over all ranks. Backward ends with this."""
        self.hooks.finish()
        for work in self.works:
            work.wait()
        self.works = []
        for chunk in self.chunks.values():
            chunk.accept_sums()
        self.guard.after_sum()

    def after_step(self) -> None:
        """Gather the chunks, which the ranks' optimizers have updated. Sends Psi (d-1)/d elements."""
        works = []
        for bucket, chunk in self.chunks.items():
            out = self.values[bucket]
            works.append(bucket.comm.all_gather(chunk.data, out=out, algorithm="pairwise", async_op=True))
        for work in works:
            work.wait()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward accumulate and send nothing: for all microbatches but the last."""
        return self.hooks.no_sync()

    def scaled_backward(self) -> AbstractContextManager[None]:
        """Allow backward of a loss that the caller has scaled; call `synchronize` afterwards."""
        return self.guard.scaled_backward()

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        self.model.zero_grad()

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Return the whole gradient's 2-norm; scale a gradient of a larger norm down to `max_norm`. Sends a float64."""
        self.guard.before_norm()
        return clip_grad_norm(self.shards, max_norm, self.norm_comm)

    def replicas(self) -> list[tuple[Communicator, Sequence[Parameter]]]:
        """Return the ranks that hold the same parameters, for each bucket, and those that hold the same shards."""
        of_parameters = [(bucket.holders, bucket.parameters) for bucket in self.buckets]
        return [*of_parameters, *replicas_of_shards(self.shard_comm, self.shards)]

    def gather_parameter(self, parameter: Parameter) -> Array:
        """Return all values of a parameter. This rank has them."""
        return parameter.data

    def state_dict(self) -> dict[str, np.ndarray]:
        """Collect the whole model on rank 0, as `gather_state` does."""
        self.guard.before_state()
        return gather_state(self.model, self.shards, self.comm)

    load_state_dict = refuse_late_state  # the model's `load_state_dict` comes before the wrapper


class ZeroStage2(ZeroStage1):
    """Data parallelism with sharded gradients, too: a whole gradient exists only until it is sent.

    At most two exist at a time: backward writes one while the other is sent. (That of the matrix that
    embedding and head share exists besides.) Microbatches that accumulate under `no_sync` keep the
    whole gradients of all buckets, as in PyTorch's FSDP. With `synchronize` after each microbatch
    gradients stay sharded, and each microbatch sends them. Sends as much as stage 1.
    """

    accumulates_sums = True  # several passes may each send their gradients: the chunk adds the sums up

    def allocate_own_gradient(self, bucket: Bucket) -> Array:
        """Allocate this rank's chunk of the gradient alone."""
        return allocate("gradients", bucket.own.stop - bucket.own.start, self.gradient_dtype)

    def wrap_segments(self) -> None:
        """Let backward allocate a bucket's whole gradient when it comes to a segment that reads the bucket."""
        for bucket in self.chunks:
            for segment in segments_of(self.model):
                if not set(segment.parameters).isdisjoint(bucket.parameters):
                    # Backward comes to this first one last, and completes the bucket there.
                    segment.run = partial(self.run, bucket, segment.run)
                    break

    def run(self, bucket: Bucket, forward: Callable[[Any], Tensor], x: Any) -> Tensor:
        """Run a segment of the model. Backward calls `pre_backward` when it comes to the segment."""
        return at_backward(forward(x), partial(self.pre_backward, bucket))

    def pre_backward(self, bucket: Bucket) -> None:
        """Allocate the whole gradient. If this pass sends it, wait first for all sums but the newest."""
        allocate_gradient(bucket, self.works, self.hooks.enabled)

    def reduce(self, bucket: Bucket) -> None:
        """Start the sum as stage 1 does. Then the message alone refers to the whole gradient."""
        # No segment has done so if the loss does not use the bucket.
        allocate_gradient(bucket, self.works, self.hooks.enabled)
        super().reduce(bucket)
        bucket.drop_gradient()
