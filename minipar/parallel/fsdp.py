"""ZeRO stage 3: parameters, gradients and optimizer state sharded, as PyTorch's FSDP does.

Each rank keeps one chunk of every unit's parameters. A unit is gathered just before its forward, freed after it,
gathered again just before its backward and freed for good; its gradient is reduce-scattered and freed (sharding.py).
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minipar.autograd import grad_enabled, queue_callback
from minipar.backend import Array, to_host
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.memory import hold
from minipar.nn.module import Module, Parameter, placeholder
from minipar.parallel.buckets import Bucket
from minipar.parallel.sharding import Chunk, ShardedGradients, UnitPass, on_backward


class FullyShardedDataParallel(ShardedGradients):
    """A model of which each rank keeps 1/d: the parameters exist whole only while their unit computes.

    Use it as DistributedDataParallel. A GPT is gathered block by block; a module that lists no `parts` is one unit.
    While one unit computes, the next one's parameters are on their way (`prefetch`). The unit that embedding and head
    share is gathered once for each: the head's backward follows its forward, and a lookup's does not read the table.
    Sends per forward and backward 2 Psi (d-1)/d elements per rank to gather parameters, and Psi (d-1)/d once per step
    to reduce-scatter gradients: 3 Psi where data parallelism sends 2 Psi.
    """

    stage = 3
    holds_values = False

    def __init__(
        self, model: Module, comm: Communicator, algorithm: str = "ring", prefetch: bool = True, **options: Any
    ) -> None:
        super().__init__(model, comm, algorithm, **options)
        self.prefetch = prefetch
        self._checksums: dict[Bucket, int] = {}
        self._gathered: dict[Bucket, tuple[Array, Work]] = {}
        for bucket in reversed(self.buckets):  # one unit at a time exists whole
            self.chunks[bucket] = self._make_chunk(bucket)

    def _make_chunk(self, bucket: Bucket) -> Chunk:
        """Compute a unit's deferred values, and keep this rank's chunk of them."""
        full = self._allocate("buffers", bucket.size, self.dtype)
        for p, view in bucket.views(full):
            p.move_to(view)
        self._checksums[bucket] = zlib.crc32(to_host(full).view("uint8").data)
        start, stop = bucket.chunk
        data = full[start:stop].copy()
        self._free(bucket)
        hold("parameters", data)
        return Chunk(bucket, data, self._allocate("gradients", stop - start, self.gradient_dtype), self)

    def checksum(self, bucket: Bucket) -> int:
        """Return the CRC-32 of a bucket's whole parameters, taken while the wrapper was made."""
        return self._checksums[bucket]

    def _fetch(self, bucket: Bucket) -> None:
        """Start to gather a bucket's parameters, unless that has started."""
        if bucket not in self._gathered:
            full = self._allocate("buffers", bucket.size, self.dtype)
            chunk = self.chunks[bucket].data
            self._gathered[bucket] = full, bucket.comm.all_gather(chunk, out=full, algorithm="pairwise", async_op=True)

    def _gather(self, buckets: Sequence[Bucket], following: Sequence[Bucket]) -> None:
        """Wait for these buckets' parameters; start to gather those that are needed next."""
        for bucket in [*buckets, *following] if self.prefetch else buckets:
            self._fetch(bucket)
        for bucket in buckets:
            full, work = self._gathered[bucket]
            work.wait()
            for p, view in bucket.views(full):
                for leaf in (p, *p.ties):
                    leaf.data = view

    def _free(self, bucket: Bucket) -> None:
        """Leave a placeholder of NaN in the parameters, so that a use outside their unit shows."""
        for leaf in bucket.leaves():
            leaf.data = placeholder(leaf.shape, leaf.dtype)

    def _release(self, unit: UnitPass) -> None:
        for bucket in unit.buckets:
            if self._gathered.pop(bucket, None) is not None:
                self._free(bucket)

    def _around(self, unit: UnitPass, run: Callable[[Any], Any], x: Any) -> Any:
        """Gather a unit for its forward. Backward leaves it at its input, where an identity frees it for good."""
        backward_is_next = unit.part.is_last and grad_enabled.get()
        self._gather(unit.buckets, unit.previous if backward_is_next else unit.following)
        y = super()._around(unit, run, on_backward(x, partial(self._release, unit)))
        if not backward_is_next:
            self._release(unit)
        return y

    def _before_backward(self, unit: UnitPass) -> None:
        if unit.part.reads_in_backward:
            self._gather(unit.buckets, unit.previous)
            queue_callback(lambda: self._release(unit))  # at the latest, if the input takes no gradient
        super()._before_backward(unit)

    def after_step(self) -> None:
        """Send nothing: the next forward gathers. Free what a forward without a backward has left, which is stale."""
        for bucket, (_, work) in self._gathered.items():
            work.wait()
            self._free(bucket)
        self._gathered = {}

    def gather_parameter(self, parameter: Parameter) -> Array:
        """Gather one parameter, whole, on every rank; all ranks call it. Sends the bucket that holds it."""
        (bucket,) = (bucket for bucket in self.buckets if parameter in bucket.parameters)
        full = self._allocate("buffers", bucket.size, self.dtype)
        bucket.comm.all_gather(self.chunks[bucket].data, out=full, algorithm="pairwise")
        return dict(bucket.views(full))[parameter]
