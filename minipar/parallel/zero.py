"""ZeRO stages 1 and 2: data parallelism without its redundancy (Rajbhandari et al. 2020, arXiv 1910.02054).

Plain data parallelism keeps everything on every rank: parameters, gradients, optimizer state. Each stage cuts one more
of them into one chunk per rank.

    stage 1   optimizer state: each rank updates its own chunk of the parameters, then all gather the updated chunks
    stage 2   gradients too: a bucket's full gradient exists only until it is reduce-scattered (sharding.py)
    stage 3   parameters too (fsdp.py)

An all-reduce is a reduce-scatter and an all-gather, so stages 1 and 2 send what data parallelism sends: per step and
rank Psi (p-1)/p elements to reduce-scatter gradients, and as many to gather updated parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.backend import Array, xp
from minipar.comm import Communicator
from minipar.memory import hold
from minipar.nn import Module, Parameter, Part
from minipar.parallel.buckets import Bucket, FlatBuffers
from minipar.parallel.sharding import Chunk, ShardedDataParallel, ShardedGradients
from minipar.parallel.wrapper import BeforeReduce


def gather_parameters(comm: Communicator, chunks: dict[Bucket, Chunk], parameters: Array) -> None:
    """All-gather every rank's chunks into the flat array `parameters`. Sends Psi (p-1)/p elements per rank."""
    works = []
    for bucket, chunk in chunks.items():
        out = parameters[bucket.start : bucket.stop]
        works.append(comm.all_gather(chunk.data, out=out, algorithm="pairwise", async_op=True))
    for work in works:
        work.wait()


class ZeroStage1(ShardedDataParallel):
    """Optimizer state sharded; parameters and gradients are whole on every rank.

    Use it as DistributedDataParallel. `parameters()` are this rank's shards: AdamW keeps its two moments for 1/p of the
    model only. Sends 2 Psi (p-1)/p elements per rank and step, and one float64 for the norm.
    """

    stage = 1

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        algorithm: str = "ring",
        *,
        groups: Sequence[Sequence[Parameter]] | None = None,
        before_reduce: BeforeReduce | None = None,
    ) -> None:
        super().__init__(model, comm, algorithm, groups, before_reduce)
        self.buffers = FlatBuffers(self.buckets)
        for bucket in reversed(self.buckets):
            start, stop = bucket.chunk(comm.rank, comm.size)
            own = slice(bucket.start + start, bucket.start + stop)
            self.chunks[bucket] = Chunk(bucket, self.buffers.parameters[own], self.buffers.gradients[own], self)

    def _reduce_scatter(self, bucket: Bucket) -> None:
        # The sum may overwrite this rank's own chunk of what is summed: that chunk is read last.
        full, out = self.buffers.gradients[bucket.start : bucket.stop], self.chunks[bucket].gradient
        self._works.append(self.comm.reduce_scatter(full, out=out, algorithm=self.algorithm, async_op=True))

    def after_step(self) -> None:
        """Gather what every rank's optimizer made of its chunks."""
        gather_parameters(self.comm, self.chunks, self.buffers.parameters)


class ZeroStage2(ShardedGradients):
    """Optimizer state and gradients sharded; parameters are whole on every rank. Sends what stage 1 sends."""

    stage = 2

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        algorithm: str = "ring",
        *,
        groups: Sequence[Sequence[Parameter]] | None = None,
        runs: Sequence[Sequence[Part]] | None = None,
        before_reduce: BeforeReduce | None = None,
    ) -> None:
        super().__init__(model, comm, algorithm, groups, before_reduce, runs)
        self.buffers = FlatBuffers(self.buckets, gradients=False)
        for bucket in reversed(self.buckets):
            start, stop = bucket.chunk(comm.rank, comm.size)
            gradient = xp.empty(stop - start, dtype=self.dtype)
            hold("gradients", gradient)
            data = self.buffers.parameters[bucket.start + start : bucket.start + stop]
            self.chunks[bucket] = Chunk(bucket, data, gradient, self)

    def after_step(self) -> None:
        """Gather what every rank's optimizer made of its chunks."""
        gather_parameters(self.comm, self.chunks, self.buffers.parameters)
