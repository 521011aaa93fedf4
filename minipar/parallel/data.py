"""Data parallelism: every rank holds the whole model, takes a share of the batch, and all ranks sum their gradients.

First the naive form, one all-reduce after backward; then DistributedDataParallel, which starts reducing while backward
still runs. Both give each rank the gradient of the whole batch, because the loss is a sum over tokens divided by the
*global* count: the sum of the ranks' gradients is then the gradient of the global mean, whatever share each rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minipar.autograd import IGNORE_INDEX, Tensor
from minipar.backend import Array, to_host
from minipar.comm import Communicator, Work
from minipar.memory import hold
from minipar.nn import Module, Parameter, clip_grad_norm, squared_norm
from minipar.parallel.buffers import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, FlatBuffers
from minipar.parallel.pipeline.split import PipelineParallel
from minipar.parallel.tensor.plan import TensorParallel


def global_token_count(comm: Communicator, targets: Array) -> int:
    """How many targets count (are not -100) on all ranks together: what a summed loss is to be divided by.

    Averaging each rank's own mean would weigh a token on a rank with few of them more than one on a rank with many.
    On the wire: an all-reduce of one int64.
    """
    count = np.array([int((targets != IGNORE_INDEX).sum())], dtype=np.int64)
    comm.all_reduce(count)
    return int(count[0])


def all_reduce_gradients(buffers: FlatBuffers, comm: Communicator, algorithm: str = "ring") -> None:
    """Naive data parallelism: after backward, sum the whole flat gradient over the ranks in one all-reduce.

    On the wire: 2 Psi (p-1)/p elements per rank (Psi parameters, p ranks), none of it hidden behind computation.
    """
    buffers.complete(buffers.members)
    comm.all_reduce(buffers.gradients, algorithm=algorithm)


def accumulate_replicas(buffers: FlatBuffers, replicas: Iterable[int], backward: Callable[[int], None]) -> None:
    """One device in the place of several data-parallel ranks: their gradients one after another, added in rank order.

    `backward(r)` runs all of replica r's microbatches. Afterwards the flat gradients hold g_0 + g_1 + ..., added from
    left to right, which is what the `ordered` all-reduce computes, to the bit. Costs one more flat array.
    """
    total: Array | None = None
    for replica in replicas:
        for parameter in buffers.members:
            parameter.zero_grad()
        backward(replica)
        buffers.complete(buffers.members)
        if total is None:
            total = buffers.gradients.copy()
            hold("buffers", total)
        else:
            total += buffers.gradients
    if total is not None:
        buffers.gradients[...] = total


class DistributedDataParallel:
    """Gradient synchronization for `model` over `comm` (Li et al. 2020, arXiv 2006.15704).

    Parameters move into flat buffers; gradients are reduced in buckets, in reverse parameter order. A bucket's
    all-reduce starts as soon as backward has completed the last gradient in it, so most of the communication runs
    behind the rest of backward.

    `algorithm` is "ring", or "ordered" to sum contributions in rank order, which makes the result bit for bit that of
    one device accumulating the ranks' shards in order; ValueError for another. Use:

        ddp = DistributedDataParallel(model, comm)
        optimizer = AdamW(ddp.optimized)

        ddp.zero_grad()
        with ddp.no_sync():                    # microbatches before the last only accumulate
            loss_of_first_half.backward()
        loss_of_second_half.backward()         # buckets start travelling in here
        ddp.synchronize()                      # wait for them; every p.grad is now the sum over ranks
        ddp.clip_grad_norm(1.0)
        optimizer.step()
        ddp.refresh_parameters()

    Buckets hold `bucket_bytes`, or with `groups` the parameters of one group each (`buffers.units`); the groups must
    then list all parameters. `replicas` is the number of chunks in which the gradient norm is summed, the number of
    ranks unless this is one device in the place of several. `tensor` is what `tensor_parallel` returned, if each rank
    holds a part of each layer only; `pipeline` the same for a model cut into stages.

    On the wire per synchronized step: 2 Psi (p-1)/p elements per rank, as the naive form, and no more for many
    microbatches. (Exactly that where p divides every bucket; else the sum of `comm.wire_bytes` over the buckets.)
    """

    stage = 0  # of ZeRO: everything is on every rank

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        algorithm: str = "ring",
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        *,
        groups: Sequence[Sequence[Parameter]] | None = None,
        replicas: int | None = None,
        tensor: TensorParallel | None = None,
        pipeline: PipelineParallel | None = None,
    ) -> None:
        if algorithm not in ("ring", "ordered"):  # the two whose bits depend on the rank count and the chunks alone
            raise ValueError(f'algorithm "{algorithm}": expected ring or ordered')
        self.model, self.comm, self.algorithm = model, comm, algorithm
        self.tensor, self.pipeline = tensor, pipeline
        self.replicas = comm.size if replicas is None else replicas
        parameters = model.parameters() if groups is None else [p for group in groups for p in group]
        self.buffers = self._store(parameters)
        if groups is None:
            self.buckets = self.buffers.buckets(bucket_bytes, first_bucket_bytes)
        else:
            self.buckets = self.buffers.buckets_of(groups)
        self._syncing = True
        self._works: list[Work] = []
        self._waiting: list[set[Tensor]] = []  # for each bucket, the leaves whose gradient is not complete yet
        self._bucket_of: dict[Tensor, int] = {}
        self._remove_hooks: list[Callable[[], None]] = []
        for i, bucket in enumerate(self.buckets):
            for leaf in self._leaves(bucket):
                self._bucket_of[leaf] = i
                self._remove_hooks.append(leaf.register_post_accumulate_grad_hook(self._on_gradient))
        self._reset()

    def _store(self, parameters: Sequence[Parameter]) -> Any:
        """Where parameters and gradients live: FlatBuffers, or what a ZeRO stage has in their place."""
        return FlatBuffers(parameters)

    @property
    def optimized(self) -> list[Parameter]:
        """What this rank's optimizer updates: here every parameter that it has."""
        return self.buffers.members

    def owned(self) -> dict[Parameter, range]:
        """The elements of each parameter that are this rank's own: those in chunk `rank` of its bucket, in every stage.
        Together the ranks own each element once (what a checkpoint needs; here the others have them too).
        """
        own = {}
        for bucket in self.buckets:
            start, stop = bucket.chunk(self.comm.rank, self.comm.size)
            for p in bucket.parameters:
                own[p] = range(max(start, 0), max(0, min(stop, p.size)))
                start, stop = start - p.size, stop - p.size
        return {p: elements for p, elements in own.items() if elements}

    def optimized_elements(self) -> list[tuple[Parameter, range]]:
        """For each of `optimized`: which elements of which of the model's parameters it is."""
        return [(p, range(p.size)) for p in self.optimized]

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        self.model.zero_grad()

    @staticmethod
    def _leaves(bucket: Bucket) -> list[Tensor]:
        """What must be complete before the bucket may go: its parameters, and the leaves tied to them (the output head
        reads the token embedding's numbers but collects a gradient of its own; `buffers.complete` adds the two)."""
        return [leaf for parameter in bucket.parameters for leaf in (parameter, *parameter.ties)]

    def _reset(self) -> None:
        self._works = []
        self._started = 0  # buckets whose all-reduce is under way: always the first ones
        self._waiting = [set(self._leaves(bucket)) for bucket in self.buckets]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block accumulate locally and send nothing: for all microbatches of a step but the
        last.
        """
        previous, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = previous

    def _on_gradient(self, leaf: Tensor) -> None:
        if not self._syncing:
            return
        self._waiting[self._bucket_of[leaf]].discard(leaf)
        # Buckets start strictly in order, so that all ranks issue the same collectives in the same order.
        while self._started < len(self.buckets) and not self._waiting[self._started]:
            self._start(self.buckets[self._started])
            self._started += 1
        self.comm.progress()  # moves the buckets under way while backward goes on computing

    def _start(self, bucket: Bucket) -> None:
        self._complete(bucket)
        gradients = self.buffers.gradients[bucket.start : bucket.stop]
        self._works.append(self.comm.all_reduce(gradients, algorithm=self.algorithm, async_op=True))

    def _complete(self, bucket: Bucket) -> None:
        self.buffers.complete(bucket.parameters)
        if self.tensor is not None:
            self.tensor.sum_partial(bucket.parameters)

    def synchronize(self) -> None:
        """Start what backward has not started (parameters the loss did not use count as zero), then wait for all
        buckets. Once per `zero_grad`: what is summed already would be summed again (from ZeRO stage 2 on it is not).
        """
        for bucket in self.buckets[self._started :]:
            self._start(bucket)
        for work in self._works:
            work.wait()
        self._reset()

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """After `synchronize`: the 2-norm of the whole gradient, the same on every rank; clips as
        `nn.clip_grad_norm` does.

        Squares are summed chunk by chunk: those of rank 0's chunks (one in each bucket, bucket after bucket), of rank
        1's, ..., and then over the ranks in order. Here every rank has all chunks; in ZeRO each sums its own. The bits
        are the same.
        Parameters that tensor parallelism has split are summed over its ranks too, those that are whole are not.
        On the wire then: one float64 for each chunk over tp. Where a pipeline has cut the model: `everywhere`, over pp.
        """
        squares = self._squares()
        if self.pipeline is not None:
            squares = self.pipeline.everywhere(squares)
        whole, split = np.cumsum(squares, axis=1)[:, -1].T  # over buckets, from left to right (`sum` would pair)
        if self.tensor is not None:
            split = self.tensor.group.comm.all_reduce(split.copy(), algorithm="ordered")
        return clip_grad_norm(self.optimized, max_norm, norm=math.sqrt(self._total(whole + split)))

    def _squares(self) -> np.ndarray:
        """(chunks that this rank has, buckets, 2): the squares of the parameters that every tensor-parallel rank has,
        and of those that are split.
        """
        squares = np.zeros((self.replicas, len(self.buckets), 2))
        for replica in range(self.replicas):
            for i, bucket in enumerate(reversed(self.buckets)):
                gradients = self.buffers.gradients[bucket.start : bucket.stop]
                for p, start, stop in bucket.pieces(*bucket.chunk(replica, self.replicas)):
                    squares[replica, i, self._is_split(p)] += squared_norm([gradients[start:stop]])
        return squares

    def _total(self, squares: np.ndarray) -> float:
        """The sum over all ranks' chunks, in rank order."""
        total = 0.0
        for square in squares:
            total += square
        return float(total)

    def _is_split(self, parameter: Parameter) -> int:
        return int(self.tensor is not None and parameter in self.tensor.cuts)

    def refresh_parameters(self) -> None:
        """After the optimizer's step: make this rank's parameters what all ranks' optimizers made of them. Here they
        are already."""

    def whole(self, parameter: Parameter) -> Array:
        """All numbers of a parameter; every rank of the axis calls it, after `refresh_parameters`."""
        return parameter.data

    def whole_parameters(self) -> Iterator[tuple[Bucket, Array]]:
        """Each bucket with all its numbers, one at a time; every rank calls it. The arrays are not to be kept."""
        for bucket in self.buckets:
            yield bucket, self.buffers.parameters[bucket.start : bucket.stop]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Collective: the serial model's parameters by name as host arrays, on rank 0 of this axis and, in a pipeline,
        of that one (of tensor parallelism, on each rank); empty on the others.

        On the wire: what `whole_parameters` sends (nothing unless parameters are sharded), and where tensor parallelism
        has split them an all-gather over tp.
        """
        names = {p: name for name, p in self.model.named_parameters()}
        state = {}
        for bucket, numbers in self.whole_parameters():
            if self.comm.rank == 0:
                for p, place in bucket.views(numbers):
                    if self.tensor is not None:
                        state[names[p]] = self.tensor.whole(p, place)
                    else:
                        state[names[p]] = np.array(to_host(place), order="C")
        if self.pipeline is not None and self.comm.rank == 0:
            state = self.pipeline.collect(state, self.tensor)
        return {name: state[name] for name in names.values() if name in state}

    def detach(self) -> None:
        """Remove the hooks from the model; the flat buffers stay."""
        for remove in self._remove_hooks:
            remove()
        self._remove_hooks = []
