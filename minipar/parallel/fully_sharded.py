"""ZeRO stage 3, the fully sharded data parallelism of PyTorch's FSDP, and `shard`, which chooses among the stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from minipar.autograd import grad_enabled
from minipar.backend import Array, xp
from minipar.comm import Communicator, Work
from minipar.memory import hold
from minipar.nn import GPT, Parameter, placeholder
from minipar.parallel.buffers import Bucket, FlatOrder, units
from minipar.parallel.data import DistributedDataParallel
from minipar.parallel.pipeline.split import PipelineParallel
from minipar.parallel.tensor.plan import TensorParallel
from minipar.parallel.zero import Place, ZeroStage1, ZeroStage2


class ZeroStage3(ZeroStage2):
    """Optimizer state, gradients and parameters sharded: the fully sharded data parallelism of PyTorch's FSDP.

    A unit's parameters are gathered just before its forward, freed after it, gathered again before its backward and
    freed for good. While one unit computes, the next one's parameters are on their way (`prefetch`). The head's
    backward follows its forward at once, and a lookup's backward does not read the table, so the unit that embedding
    and head share is gathered once for each of the two: every parameter travels twice.

    On the wire per forward and backward: 2 Psi (p-1)/p elements per rank to gather parameters, and as in stage 2 Psi
    (p-1)/p to reduce-scatter gradients once per step.
    """

    stage = 3

    def __init__(
        self,
        model: GPT,
        comm: Communicator,
        algorithm: str = "ring",
        *,
        tensor: TensorParallel | None = None,
        pipeline: PipelineParallel | None = None,
        prefetch: bool = True,
    ) -> None:
        self.prefetch = prefetch
        self._gathered: dict[Bucket, tuple[Array, Work]] = {}
        super().__init__(model, comm, algorithm, tensor=tensor, pipeline=pipeline)

    def _store(self, parameters: Sequence[Parameter]) -> Any:
        return FlatOrder(parameters)

    def _cut(self, bucket: Bucket, start: int, stop: int) -> tuple[Array, Array]:
        full, gradient = (xp.empty(size, dtype=self.buffers.dtype) for size in (bucket.size, stop - start))
        hold("buffers", full)
        for p, place in bucket.views(full):
            p.move_to(place)
        data = full[start:stop].copy()
        self._forget(bucket)
        hold("parameters", data)
        hold("gradients", gradient)
        return data, gradient

    def _forget(self, bucket: Bucket) -> None:
        for p in bucket.parameters:
            for leaf in (p, *p.ties):
                leaf.data = placeholder(p.shape, p.dtype)

    def _fetch(self, bucket: Bucket) -> None:
        """Start to gather, unless it has been started."""
        if bucket not in self._gathered:
            full = xp.empty(bucket.size, dtype=self.buffers.dtype)
            hold("buffers", full)
            chunk = self.chunks[bucket].data
            self._gathered[bucket] = full, self.comm.all_gather(chunk, out=full, algorithm="pairwise", async_op=True)

    def _gather(self, buckets: Sequence[Bucket], following: Sequence[Bucket]) -> None:
        """Wait for these parameters; start to gather those that are needed next."""
        for bucket in [*buckets, *following] if self.prefetch else buckets:
            self._fetch(bucket)
        for bucket in buckets:
            full, work = self._gathered[bucket]
            work.wait()
            for p, place in bucket.views(full):
                for leaf in (p, *p.ties):
                    leaf.data = place

    def _release(self, place: Place) -> None:
        for bucket in place.buckets:
            if self._gathered.pop(bucket, None) is not None:
                self._forget(bucket)

    def _before_forward(self, place: Place) -> None:
        turns = place.name == "head" and grad_enabled.get()  # its backward is what comes next
        self._gather(place.buckets, place.previous if turns else place.following)

    def _after_forward(self, place: Place) -> None:
        if place.name != "head" or not grad_enabled.get():
            self._release(place)

    def _before_backward(self, place: Place) -> None:
        if place.name != "embedding":
            self._gather(place.buckets, place.previous)
        super()._before_backward(place)

    def _after_backward(self, place: Place) -> None:
        self._release(place)

    def refresh_parameters(self) -> None:
        """Nothing travels: the next forward gathers. What is gathered still (a forward without a backward) is stale."""
        for bucket, (_, work) in self._gathered.items():
            work.wait()
            self._forget(bucket)
        self._gathered = {}

    def whole(self, parameter: Parameter) -> Array:
        """On the wire: the parameter's bucket, gathered once more."""
        (bucket,) = (bucket for bucket in self.buckets if parameter in bucket.parameters)
        full = xp.empty(bucket.size, dtype=self.buffers.dtype)  # given, because the chunks may differ by an element
        hold("buffers", full)
        self.comm.all_gather(self.chunks[bucket].data, out=full, algorithm="pairwise")
        return dict(bucket.views(full))[parameter]

    def whole_parameters(self) -> Iterator[tuple[Bucket, Array]]:
        """On the wire: Psi (p-1)/p elements per rank."""
        for bucket in self.buckets:
            full = xp.empty(bucket.size, dtype=self.buffers.dtype)
            hold("buffers", full)
            yield bucket, self.comm.all_gather(self.chunks[bucket].data, out=full, algorithm="pairwise")


def shard(
    model: GPT,
    comm: Communicator,
    stage: int,
    algorithm: str = "ring",
    replicas: int | None = None,
    tensor: TensorParallel | None = None,
    pipeline: PipelineParallel | None = None,
    groups: Sequence[Sequence[Parameter]] | None = None,
) -> DistributedDataParallel:
    """Data parallelism for `model` over `comm` at a ZeRO stage, 0 to 3, with the same buckets in each.

    `replicas`: the data-parallel ranks in whose place one device stands (stage 0 on one rank). `tensor`: what
    `tensor_parallel` returned, if layers are split; `pipeline` the same if the model is cut into stages, and `groups`
    the parameters of each bucket for one device in the place of a pipeline.
    """
    if stage == 0:
        groups = pipeline.groups if pipeline is not None else units(model) if groups is None else groups
        return DistributedDataParallel(
            model, comm, algorithm, groups=groups, replicas=replicas, tensor=tensor, pipeline=pipeline
        )
    kind = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}[stage]
    return kind(model, comm, algorithm, tensor=tensor, pipeline=pipeline)
