"""ZeRO stages 1 and 2: data parallelism without its redundancy (Rajbhandari et al. 2020, arXiv 1910.02054).

Plain data parallelism keeps everything on every rank. Each stage cuts one thing more into one chunk per rank. Stages 1
and 2 send what data parallelism sends, because an all-reduce is a reduce-scatter and an all-gather.

    stage 1   optimizer state: each rank updates its own chunk of the parameters, then all gather the updated chunks
    stage 2   gradients too: a bucket's full gradient exists only until it is reduce-scattered (sharding.py)
    stage 3   parameters too (fsdp.py)
"""

from collections.abc import Callable, Sequence
from typing import Any

from minipar.backend import xp
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.nn.module import Module, Parameter, zero_grad
from minipar.nn.optim import Optimizer
from minipar.parallel.buckets import Bucket, FlatBuffers, make_buckets
from minipar.parallel.placement import Placement
from minipar.parallel.sharding import Chunk, ShardedDataParallel, ShardedGradients
from minipar.parallel.wrapper import Wrapper


class ZeroStage1(ShardedDataParallel):
    """Optimizer state sharded: each rank updates its own chunk of the parameters, then all gather the chunks.

    Use it as DistributedDataParallel. `parameters()` are this rank's shards: AdamW keeps its two moments for 1/d of the
    model. `options` are groups (sharding.py). Sends 2 Psi (d-1)/d elements per rank and step, one float64 for the norm.
    """

    stage = 1

    def __init__(self, model: Module, comm: Communicator, algorithm: str = "ring", **options: Any) -> None:
        super().__init__(model, comm, algorithm, **options)
        self.buffers = FlatBuffers(self.buckets, self.gradient_dtype if self.stage == 1 else None)
        for bucket in reversed(self.buckets):
            start, stop = bucket.chunk
            own = slice(bucket.start + start, bucket.start + stop)
            whole = self.buffers.gradients
            gradient = self._allocate("gradients", stop - start, self.gradient_dtype) if whole is None else whole[own]
            self.chunks[bucket] = Chunk(bucket, self.buffers.parameters[own], gradient, self)

    def _reduce(self, bucket: Bucket) -> Work:
        # The sum may overwrite this rank's own chunk of what is summed: that chunk is read last.
        full, out = self.buffers.gradients[bucket.start : bucket.stop], self.chunks[bucket].gradient
        return self._reduce_scatter(bucket, full, out)

    def after_step(self) -> None:
        """Gather what every rank's optimizer made of its chunks. Sends Psi (d-1)/d elements per rank."""
        works = []
        for bucket, chunk in self.chunks.items():
            out = self.buffers.parameters[bucket.start : bucket.stop]
            works.append(bucket.comm.all_gather(chunk.data, out=out, algorithm="pairwise", async_op=True))
        for work in works:
            work.wait()


class ZeroStage2(ShardedGradients, ZeroStage1):
    """Stage 1 with gradients sharded too. Sends what stage 1 sends. `options` are groups and runs (sharding.py)."""

    stage = 2


class ZeroOptimizer:
    """ZeRO stage 1 as an optimizer, for a model that computes its gradients by itself, such as a PipelineModule.

        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp, lr=1e-3)
        loss = model(x, y)       # gradients of this replica's share of the global mean
        optimizer.step()         # sums them over dp, updates this rank's shard, gathers the parameters
        optimizer.zero_grad()

    `options` are the optimizer's. Sends 2 Psi (d-1)/d elements per rank and step, none of it hidden behind computation.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        optimizer: Callable[..., Optimizer],
        comm: Communicator,
        algorithm: str = "ring",
        **options: Any,
    ) -> None:
        self.parameters, self.comm, self.algorithm = list(parameters), comm, algorithm
        for i, p in enumerate(self.parameters):
            if isinstance(p.owner, Wrapper):
                raise ValueError("a wrapper sums these gradients already: write AdamW(wrapper.parameters()) instead")
            if p.owner is not None and p.owner.replicas is not None:
                raise ValueError("experts are summed over other ranks than all else: use mp.shard(model, comm, 1)")
            p.owner = None
            p.placement = p.placement or Placement(str(i), p.shape)
        (self.bucket,) = make_buckets([self.parameters], comm)
        self.buffers = FlatBuffers([self.bucket], xp.promote_types(self.parameters[0].dtype, "float32"))
        own = slice(*self.bucket.chunk)
        self.chunk = Chunk(self.bucket, self.buffers.parameters[own], self.buffers.gradients[own], None)
        self.optimizer = optimizer(self.chunk.shards, **options)

    def step(self) -> None:
        """Sum the gradients over the ranks, update this rank's shard, and gather the updated parameters."""
        self.bucket.complete()
        self.comm.reduce_scatter(self.buffers.gradients, out=self.chunk.gradient, algorithm=self.algorithm)
        for shard in self.chunk.shards:
            shard.grad = shard.grad_buffer
        self.optimizer.step()
        self.comm.all_gather(self.chunk.data, out=self.buffers.parameters, algorithm="pairwise")

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        zero_grad(self.parameters)
