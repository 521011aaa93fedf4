"""The ground that the three ZeRO stages share: chunks, and full gradients that exist briefly.

A bucket is a unit of the model (`buckets.by_unit`) in every stage, and chunk r of each bucket belongs to rank r. So all
stages, and the all-reduce of plain data parallelism, add the same values in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minipar.autograd import Tensor, mapping
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.memory import hold
from minipar.nn.module import Module, Parameter, Part
from minipar.parallel.buckets import Bucket, Groups, by_unit, parts_of
from minipar.parallel.placement import ParameterShard, bucket_slice
from minipar.parallel.wrapper import Wrapper


class Chunk:
    """This rank's part of a bucket: the flat arrays `data` and `gradient`, and `shards`, a view for each parameter."""

    def __init__(self, bucket: Bucket, data: Array, gradient: Array, owner: Wrapper | None) -> None:
        self.data, self.gradient = data, gradient
        self.shards: list[Parameter] = []
        start = 0
        for p in bucket.parameters:
            elements = bucket_slice(p).own
            if elements:
                stop = start + len(elements)
                shard = ParameterShard(p, data[start:stop], elements)
                shard.grad_buffer, shard.owner = gradient[start:stop], owner
                self.shards.append(shard)
                start = stop


class ShardedDataParallel(Wrapper):
    """A model whose optimizer state is sharded over `comm`, one Chunk per bucket; the base class of the ZeRO stages.

    `groups` are the units, in the model's order, where they are not `by_unit(model)`. With `replicas` = q > 1 (hybrid
    sharding), s = d/q neighbouring ranks hold one replica of the shards. Gradients are reduce-scattered within it, then
    each rank all-reduces its chunk over the q ranks that hold the same one: another 2 (Psi/s)(q-1)/q elements per rank.
    All else is sent within the s ranks: read s for d in what the stages send. NB: PyTorch's HYBRID_SHARD.
    """

    sharded = True

    def __init__(
        self, model: Module, comm: Communicator, algorithm: str, groups: Groups | None = None, **options: Any
    ) -> None:
        super().__init__(model, comm, algorithm, by_unit(model) if groups is None else groups, **options)
        p = self.buckets[-1].parameters[0]
        self.chunks: dict[Bucket, Chunk] = {}  # in the model's order
        self._empty_shard = ParameterShard(p, xp.empty(0, dtype=p.dtype), range(0))
        self._empty_shard.owner = self

    def parameters(self) -> list[Parameter]:
        shards = [shard for chunk in self.chunks.values() for shard in chunk.shards]
        return shards or [self._empty_shard]  # more ranks than elements: the optimizer knows this wrapper all the same

    def _allocate(self, kind: str, size: int, dtype: Any) -> Array:
        """Make a flat array that counts as memory of this kind."""
        array = xp.empty(size, dtype=dtype)
        hold(kind, array)
        return array

    def _reduce_scatter(self, bucket: Bucket, full: Array, out: Array) -> Work:
        """Start to sum a full gradient over the ranks into a chunk: within a replica, then over the replicas."""
        full, out = full.astype(self.reduce_dtype, copy=False), self._wire(out)
        hold("buffers", full)
        work: Work = bucket.comm.reduce_scatter(full, out=out, algorithm=self.algorithm, async_op=True)
        if (replicas := self.replica_comm) is not None:
            start = partial(replicas.all_reduce, out, algorithm=self.algorithm, async_op=True)
            work.then(lambda: self._across.append(start()))  # in the order of the buckets, as those arrive
        return work

    def synchronize(self) -> None:
        super().synchronize()
        for shard in self.parameters():
            shard.grad = shard.grad_buffer

    def forget_gradients(self) -> None:
        super().forget_gradients()
        for p in (*self.parameters(), *self._bucket_of):
            p.grad = None


Runs = Sequence[Sequence[Part]]  # the lists of parts that follow one another on this rank (a pipeline's stages)


@dataclass(frozen=True)
class UnitPass:
    """A part of the model and what its forward and backward need."""

    part: Part
    buckets: Sequence[Bucket]  # that it reads
    previous: Sequence[Bucket]  # that backward needs next
    following: Sequence[Bucket]  # that forward needs next
    completes: Sequence[Bucket]  # whose gradient its backward is the last to add to


def unit_passes(runs: Runs, buckets: Sequence[Bucket]) -> Iterator[UnitPass]:
    home = {p: bucket for bucket in buckets for p in bucket.parameters}
    seen: set[Bucket] = set()
    for run in runs:
        # A pipeline's head that borrows the embedding from another rank reads no bucket for it.
        reads = [list(dict.fromkeys(home[p] for p in part.parameters if p in home)) for part in run]
        for i, part in enumerate(run):
            previous = reads[i - 1] if i > 0 and run[i - 1].reads_in_backward else []
            following = reads[i + 1] if i + 1 < len(run) else []
            yield UnitPass(part, reads[i], previous, following, [b for b in reads[i] if b not in seen])
            seen.update(reads[i])


def on_backward(x: Any, call: Callable[[], None]) -> Any:
    """Return x as the result of an identity whose backward calls `call()`; what takes no gradient as it is."""

    def backward(grad: Array) -> Array:
        call()
        return grad

    return mapping(x, lambda array: array, backward) if isinstance(x, Tensor) and x.requires_grad else x


class ShardedGradients(ShardedDataParallel):
    """Gradients sharded too: a bucket's full gradient exists from backward's arrival until it is reduce-scattered.

    At most two exist at a time. Microbatches that accumulate under `no_sync` keep all of them, as in PyTorch's FSDP;
    `synchronize` after each microbatch keeps gradients sharded and sends them as many times.
    """

    def __init__(
        self, model: Module, comm: Communicator, algorithm: str = "ring", runs: Runs | None = None, **options: Any
    ) -> None:
        super().__init__(model, comm, algorithm, **options)
        self._full: dict[Bucket, Array] = {}  # the full gradients that exist
        self._late: list[tuple[Chunk, Array]] = []  # sums to be added to what a chunk holds already
        self._inside = False  # a function of a module that is one unit
        for unit in unit_passes([parts_of(model)] if runs is None else runs, self.buckets):
            if hasattr(model, "parts"):
                unit.part.run = partial(self._around, unit, unit.part.run)
                continue
            # A module that lists no parts is one unit. Every way in: `loss_sum`, or the forward of any module in it.
            for module, name in [(model, "loss_sum"), *((module, "forward") for _, module in model.named_modules())]:
                setattr(module, name, partial(self._around_whole, unit, getattr(module, name)))

    def _around_whole(self, unit: UnitPass, run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a function of the module; the outermost one that runs is a pass through the unit."""
        if self._inside:
            return run(*inputs, **options)
        self._inside = True
        try:
            return self._around(unit, lambda _: run(*inputs, **options), None)
        finally:
            self._inside = False

    def _around(self, unit: UnitPass, run: Callable[[Any], Any], x: Any) -> Any:
        """Run a part. Backward comes to its output first, so an identity there calls `_before_backward`."""
        return on_backward(run(x), partial(self._before_backward, unit))

    def _before_backward(self, unit: UnitPass) -> None:
        for bucket in unit.completes:
            self._prepare(bucket)

    def _prepare(self, bucket: Bucket) -> None:
        """Make the array in which backward writes the bucket's full gradient; what has arrived already moves in."""
        if bucket in self._full:
            return
        if self.syncing:
            for work in self._works[:-1]:  # one may still travel; the others' gradients are freed
                work.wait()
        full = self._full[bucket] = self._allocate(
            "buffers" if self.syncing else "gradients", bucket.size, self.gradient_dtype
        )
        for p, view in bucket.views(full):
            if p.grad is not None:
                view[...] = p.grad
                p.grad = view
            p.grad_buffer = view

    def _start(self, bucket: Bucket) -> None:
        self._prepare(bucket)
        super()._start(bucket)

    def _reduce(self, bucket: Bucket) -> Work:
        chunk = self.chunks[bucket]
        out = chunk.gradient
        if any(shard.grad is not None for shard in chunk.shards):  # the sum of an earlier microbatch
            out = self._allocate("buffers", out.size, out.dtype)
            self._late.append((chunk, out))
        for p in bucket.parameters:
            p.grad = p.grad_buffer = None  # the message alone holds the full gradient now, and frees it
        return self._reduce_scatter(bucket, self._full.pop(bucket), out)

    def synchronize(self) -> None:
        super().synchronize()
        for chunk, gradient in self._late:
            chunk.gradient += gradient
        self._late = []
