"""ZeRO: data parallelism without the redundancy (Rajbhandari et al. 2020, arXiv 1910.02054).

Plain data parallelism keeps everything on every rank: parameters, gradients, optimizer state. Each stage cuts one more
of them into one chunk per rank, and each is the class before it with one thing changed:

    stage 1   optimizer state: each rank updates its own chunk of the parameters, then all gather the updated chunks
    stage 2   gradients: a bucket's full gradient lives from backward's arrival in it until it is reduce-scattered
    stage 3   parameters: a unit's full parameters live from just before they are used until just after
              (fully_sharded.py)

A bucket is a unit (`buffers.units`) in every stage, chunk r of each belongs to rank r, and an all-reduce is a
reduce-scatter and an all-gather: so all stages add the same numbers in the same order and end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minipar.autograd import Function, Tensor
from minipar.backend import Array, xp
from minipar.comm import Communicator
from minipar.memory import hold
from minipar.nn import GPT, Parameter, Part, squared_norm
from minipar.parallel.buffers import Bucket, FlatBuffers, units
from minipar.parallel.data import DistributedDataParallel
from minipar.parallel.pipeline.split import PipelineParallel
from minipar.parallel.tensor.plan import TensorParallel


class Chunk:
    """This rank's part of a bucket: flat arrays, and as `shards` the pieces of parameters that they hold.

    A shard is a Parameter for the optimizer's eyes: one-dimensional, but decaying as the whole parameter does. `summed`
    says whether `gradient` holds a sum over the ranks already, of an earlier microbatch.
    """

    def __init__(self, bucket: Bucket, start: int, stop: int, data: Array, gradient: Array) -> None:
        self.data, self.gradient, self.summed = data, gradient, False
        self.shards: list[Parameter] = []
        self.parameters: list[Parameter] = []  # of which each shard is a piece
        for p, first, last in bucket.pieces(start, stop):
            shard = Parameter(data[first - start : last - start])
            shard.grad_buffer = gradient[first - start : last - start]
            shard.decays = p.decays
            self.shards.append(shard)
            self.parameters.append(p)


class ZeroStage1(DistributedDataParallel):
    """Optimizer state sharded: used as DistributedDataParallel is, for a GPT.

    On the wire per synchronized step: Psi (p-1)/p elements per rank to reduce-scatter the gradients and as many to
    gather the updated parameters; 2 Psi in all, what an all-reduce costs. And one float64 all-reduced for the norm.
    """

    stage = 1
    model: GPT

    def __init__(
        self,
        model: GPT,
        comm: Communicator,
        algorithm: str = "ring",
        *,
        tensor: TensorParallel | None = None,
        pipeline: PipelineParallel | None = None,
    ) -> None:
        groups = units(model) if pipeline is None else pipeline.groups
        super().__init__(model, comm, algorithm, groups=groups, tensor=tensor, pipeline=pipeline)
        self.chunks: dict[Bucket, Chunk] = {}
        for bucket in reversed(self.buckets):  # in the order of the model
            start, stop = bucket.chunk(comm.rank, comm.size)
            self.chunks[bucket] = Chunk(bucket, start, stop, *self._cut(bucket, start, stop))

    def _cut(self, bucket: Bucket, start: int, stop: int) -> tuple[Array, Array]:
        """The arrays of this rank's chunk: parameters and gradients."""
        own = slice(bucket.start + start, bucket.start + stop)
        return self.buffers.parameters[own], self.buffers.gradients[own]

    @property
    def optimized(self) -> list[Parameter]:
        """The shards: all that this rank's optimizer knows."""
        return [shard for chunk in self.chunks.values() for shard in chunk.shards]

    def optimized_elements(self) -> list[tuple[Parameter, range]]:
        own = self.owned()
        return [(p, own[p]) for chunk in self.chunks.values() for p in chunk.parameters]

    def zero_grad(self) -> None:
        super().zero_grad()
        for chunk in self.chunks.values():
            chunk.summed = False
            for shard in chunk.shards:
                shard.grad = None

    def _start(self, bucket: Bucket) -> None:
        self._complete(bucket)
        # The sum may overwrite this rank's own chunk of what is summed: that chunk is read last.
        self._reduce_scatter(self.buffers.gradients[bucket.start : bucket.stop], self.chunks[bucket].gradient)

    def _reduce_scatter(self, full: Array, out: Array) -> None:
        self._works.append(self.comm.reduce_scatter(full, out=out, algorithm=self.algorithm, async_op=True))

    def synchronize(self) -> None:
        """Start what backward has not started, then wait: every shard's gradient is now the sum over ranks."""
        super().synchronize()
        for chunk in self.chunks.values():
            chunk.summed = True
            for shard in chunk.shards:
                shard.grad = shard.grad_buffer

    def _squares(self) -> np.ndarray:
        squares = np.zeros((1, len(self.chunks), 2))
        for i, chunk in enumerate(self.chunks.values()):
            for p, shard in zip(chunk.parameters, chunk.shards, strict=True):
                squares[0, i, self._is_split(p)] += squared_norm([shard.grad_buffer])
        return squares

    def _total(self, squares: np.ndarray) -> float:
        """Every rank has its own chunks only, so each element counts once. On the wire: one float64 all-reduced."""
        return float(self.comm.all_reduce(squares, algorithm="ordered")[0])

    def refresh_parameters(self) -> None:
        """Gather what every rank's optimizer made of its chunks. On the wire: Psi (p-1)/p elements per rank."""
        works = []
        for bucket, chunk in self.chunks.items():
            out = self.buffers.parameters[bucket.start : bucket.stop]
            works.append(self.comm.all_gather(chunk.data, out=out, algorithm="pairwise", async_op=True))
        for work in works:
            work.wait()


@dataclass(frozen=True)
class Place:
    """Where a part of the model stands on this rank: the buckets that it reads, those of the parts before and after it
    (what backward and forward need next; none where the pipeline stage ends, and none for the embedding, whose backward
    does not read it), and the buckets whose gradient its backward is the last to add to.
    """

    name: str
    buckets: Sequence[Bucket]
    previous: Sequence[Bucket]
    following: Sequence[Bucket]
    completes: Sequence[Bucket]


def places(model: GPT, buckets: Sequence[Bucket], pipeline: PipelineParallel | None) -> Iterator[tuple[Part, Place]]:
    """This rank's parts in the model's order: all of them, or those of its pipeline stages."""
    home = {p: bucket for bucket in buckets for p in bucket.parameters}
    seen: set[Bucket] = set()
    for run in [model.parts] if pipeline is None else [stage.parts for stage in pipeline.stages.values()]:
        # A head that borrows its embedding from another rank reads no bucket for it.
        reads = [list(dict.fromkeys(home[p] for p in part.parameters if p in home)) for part in run]
        for i, part in enumerate(run):
            previous = reads[i - 1] if i > 0 and run[i - 1].name != "embedding" else []
            following = reads[i + 1] if i + 1 < len(run) else []
            yield part, Place(part.name, reads[i], previous, following, [b for b in reads[i] if b not in seen])
            seen.update(reads[i])


class _OnBackward(Function):
    """The identity; `call()` when backward passes through."""

    def forward(self, x: Array, call: Callable[[], None]) -> Array:
        self.call = call
        return x

    def backward(self, grad: Array) -> Any:
        self.call()
        return grad, None


class ZeroStage2(ZeroStage1):
    """Optimizer state and gradients sharded.

    A bucket's full gradient is made when backward comes to its unit, reduce-scattered when it is complete, and freed:
    there are never more than two of them. (Microbatches that accumulate under `no_sync` keep all of them, as in FSDP;
    `backward` and `synchronize` for each microbatch keep gradients sharded, and send them as many times.)

    On the wire: as stage 1.
    """

    stage = 2

    def __init__(
        self,
        model: GPT,
        comm: Communicator,
        algorithm: str = "ring",
        *,
        tensor: TensorParallel | None = None,
        pipeline: PipelineParallel | None = None,
    ) -> None:
        super().__init__(model, comm, algorithm, tensor=tensor, pipeline=pipeline)
        self._full: dict[Bucket, Array] = {}  # the full gradients that exist
        self._late: list[tuple[Chunk, Array]] = []  # sums to be added to what a chunk holds already
        for part, place in places(model, self.buckets, pipeline):
            self._remove_hooks.append(partial(setattr, part, "run", part.run))
            part.run = self._around(place, part.run)

    def _store(self, parameters: Sequence[Parameter]) -> Any:
        return FlatBuffers(parameters, gradients=False)

    def _cut(self, bucket: Bucket, start: int, stop: int) -> tuple[Array, Array]:
        gradient = xp.empty(stop - start, dtype=self.buffers.dtype)
        hold("gradients", gradient)
        return self.buffers.parameters[bucket.start + start : bucket.start + stop], gradient

    def _around(self, place: Place, run: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """A part of the model with something to do before and after its forward and its backward.

        Backward goes through an operation's output first and its input last, so identities at these two places tell.
        """

        def around(x: Any) -> Tensor:
            self._before_forward(place)
            if isinstance(x, Tensor):
                x = _OnBackward.apply(x, partial(self._after_backward, place))
            y = run(x)
            self._after_forward(place)
            return _OnBackward.apply(y, partial(self._before_backward, place))

        return around

    def _before_forward(self, place: Place) -> None:
        pass

    def _after_forward(self, place: Place) -> None:
        pass

    def _before_backward(self, place: Place) -> None:
        for bucket in place.completes:
            self._open(bucket)

    def _after_backward(self, place: Place) -> None:
        pass

    def _open(self, bucket: Bucket) -> None:
        """Room for the bucket's full gradient, in which backward writes. What has come already moves in."""
        if bucket in self._full:
            return
        if self._syncing:
            for work in self._works[: max(0, len(self._works) - 1)]:  # one may still travel; the others are freed
                work.wait()
        full = self._full[bucket] = xp.empty(bucket.size, dtype=self.buffers.dtype)
        hold("buffers" if self._syncing else "gradients", full)
        for p, place in bucket.views(full):
            if p.grad is not None:
                place[...] = p.grad
                p.grad = place
            p.grad_buffer = place

    def _start(self, bucket: Bucket) -> None:
        self._open(bucket)  # if backward has not come there: parameters that the loss does not use
        self._complete(bucket)
        chunk = self.chunks[bucket]
        out = chunk.gradient
        if chunk.summed:
            out = xp.empty_like(out)
            hold("buffers", out)
            self._late.append((chunk, out))
        self._reduce_scatter(self._full.pop(bucket), out)
        for p in bucket.parameters:
            p.grad = p.grad_buffer = None  # the message alone holds the full gradient now, and frees it

    def synchronize(self) -> None:
        super().synchronize()
        for chunk, gradient in self._late:
            chunk.gradient += gradient
        self._late = []
