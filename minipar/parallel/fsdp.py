"""ZeRO stage 3: parameters, gradients and optimizer state are sharded. Methods have FSDP2's names.

A unit is a set of parameters, such as those of one block; each rank keeps one chunk of it. A
segment of the model, such as a block, gathers the units that it reads (`unshard`) before its
forward and frees them (`reshard`) after it. It gathers them again before its backward, if backward
reads them, and frees them after it. The last segment keeps its units in between, because its
backward follows at once. Backward reduce-scatters the gradient of a unit as soon as it is complete.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd import Tensor, grad_enabled, queue_callback
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.memory import allocate, hold
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter, placeholder
from minipar.parallel.buckets import BackwardHooks, Bucket
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.groups import Group, by_unit, groups_over, has_segments, place_groups, segments_of
from minipar.parallel.guards import check_freed, check_wrapping, checksum, refuse_late_state
from minipar.parallel.hybrid import (
    GradientComm,
    Pending,
    in_dtype,
    over_shards,
    replicas_of_shards,
    set_gradient_dtype,
)
from minipar.parallel.loss import global_mean_loss
from minipar.parallel.shards import Chunk, all_shards, allocate_gradient, at_backward
from minipar.parallel.state import gather_state
from minipar.parallel.step_guard import Guard


class Unit(Bucket):
    """Parameters that are gathered, freed and reduced together. NB: FSDP2's FSDPParamGroup.

    This rank keeps its `chunk` of them. While the unit is freed, the data of its parameters is NaN,
    so that code that reads a parameter at a wrong time computes NaN.
    """

    def __init__(self, group: Group, comm: GradientComm, replica: int, gradient_dtype: DTypeLike) -> None:
        super().__init__(group, comm, replica)
        self.gathering: tuple[Array, Pending] | None = None  # the whole array and its gather; None if freed
        self.dtype = self.parameters[0].dtype
        data = self.take_own_values()
        self.chunk = Chunk(self, data, allocate("gradients", data.size, gradient_dtype))

    def take_own_values(self) -> Array:
        """Return this rank's chunk of the values. The whole array is freed when this function returns."""
        whole = allocate("buffers", self.size, self.dtype)
        for p, view in self.views(whole):
            p.move_to(view)
        self.whole_checksum = checksum(whole)
        own = whole[self.own].copy()
        hold("parameters", own)
        self.reshard()
        return own

    def checksum(self) -> int:
        """Return the CRC-32 of the whole parameters, which was computed while the unit was made."""
        return self.whole_checksum

    def unshard(self) -> None:
        """Start to gather the parameters, unless that has started. On d ranks, sends (d-1)/d of their bytes."""
        if self.gathering is None:
            check_freed(self.parameters)
            self.gathering = self.gather()

    def gather(self) -> tuple[Array, Pending]:
        """Start an all-gather of the parameters; return the array that it fills, and the operation."""
        whole = allocate("buffers", self.size, self.dtype)
        return whole, self.comm.all_gather(self.chunk.data, out=whole, algorithm="pairwise", async_op=True)

    def wait_for_unshard(self) -> None:
        """Gather the parameters, wait until they have arrived, and make them views of the whole array."""
        self.unshard()
        assert self.gathering is not None
        whole, work = self.gathering
        work.wait()
        for p, view in self.views(whole):
            for leaf in (p, *p.ties):
                leaf.data = view

    def reshard(self) -> None:
        """Free the whole parameters. This rank's chunk stays."""
        self.gathering = None
        for leaf in self.leaves():
            leaf.data = placeholder(leaf.shape, self.dtype)


@dataclass(frozen=True)
class SegmentUnits:
    """A segment of the model, and the units that it and its neighbours need."""

    segment: Segment
    reads: Sequence[Unit]  # the segment reads the parameters of these
    next_in_forward: Sequence[Unit]  # the forward after this segment's reads these
    next_in_backward: Sequence[Unit]  # the backward after this segment's reads these
    completes: Sequence[Unit]  # this segment's backward gives these their last gradient


def units_of_segments(lists: Sequence[Sequence[Segment]], units: Sequence[Unit]) -> list[SegmentUnits]:
    """Return the units of each segment. Each list has segments that follow one another on this rank.

    A parameter that is in no unit is left out: the head of a pipeline's last rank may read the
    embedding, which is in a unit of the first rank.
    """
    unit_of: dict[Parameter, Unit] = {}
    for unit in units:
        unit_of.update(dict.fromkeys(unit.parameters, unit))
    found: list[SegmentUnits] = []
    seen: set[Unit] = set()
    for segments in lists:
        reads: list[list[Unit]] = []
        for segment in segments:
            of_parameters = [unit_of[p] for p in segment.parameters if p in unit_of]
            reads.append(list(dict.fromkeys(of_parameters)))  # without repetition
        for i, segment in enumerate(segments):
            before_it_reads = i > 0 and segments[i - 1].reads_in_backward
            each = SegmentUnits(
                segment=segment,
                reads=reads[i],
                next_in_forward=reads[i + 1] if i + 1 < len(segments) else [],
                next_in_backward=reads[i - 1] if before_it_reads else [],
                # Backward comes to the first segment that reads a unit last, and completes it there.
                completes=[unit for unit in reads[i] if unit not in seen],
            )
            found.append(each)
            seen.update(reads[i])
    return found


class FullyShardedDataParallel:
    """A model of which each of d ranks keeps 1/d. Parameters are whole only while they are used.

    Use it as DistributedDataParallel. Each block of a GPT is a unit; a module that lists no
    `segments` is one unit. With `prefetch`, the next segment's units are gathered while a segment
    computes. The unit that embedding and head share is gathered once for each of them: the head's
    backward follows its forward, and the embedding's backward does not read the parameters.
    `segment_lists` are what this rank runs one after the other, such as a pipeline's stages; by
    default there is one list, the model's `segments`. Of Psi parameters, each rank sends
    2 Psi (d-1)/d elements per forward and backward to gather them, and Psi (d-1)/d per step to
    reduce-scatter gradients; data parallelism sends 2 Psi (d-1)/d. With `replicas` = q, d/q stands
    for d, and HybridComm sends some more (hybrid.py).
    """

    accumulates_sums = True  # tells the guard that a step may add up the sums of several backward passes

    def __init__(
        self, model: Module, comm: Communicator, algorithm: str = "ring", *,
        prefetch: bool = True, segment_lists: Sequence[Sequence[Segment]] | None = None,
        groups: Sequence[Group] | None = None, replicas: int = 1,
        before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
        gradient_dtype: DTypeLike | None = None, reduce_dtype: DTypeLike | None = None,
    ) -> None:  # fmt: skip
        check_wrapping(model, comm, algorithm, replicas)
        self.model = model
        self.comm = comm
        self.algorithm = algorithm
        self.before_reduce = before_reduce
        self.prefetch = prefetch
        self.shard_comm = over_shards(comm, replicas)  # the ranks that share one replica of the shards
        self.norm_comm = self.shard_comm  # each of them knows the squares of its own shards
        groups = groups_over(comm, by_unit(model)) if groups is None else groups
        place_groups(model, comm, groups, before_reduce, replicas)
        self.gradient_dtype = set_gradient_dtype(model, gradient_dtype)
        replica = comm.rank // self.shard_comm.size  # the number of this rank's replica of the shards
        units: list[Unit] = []
        for group in groups:  # the parameters of one unit at a time are whole
            ranks = self.shard_comm if group.comm is comm else group.comm  # experts have ranks of their own
            wire = in_dtype(ranks, reduce_dtype, self.gradient_dtype)
            units.append(Unit(group, wire, replica, self.gradient_dtype))
        self.buckets = units[::-1]  # in the order in which backward completes them
        self.chunks: dict[Bucket, Chunk] = {unit: unit.chunk for unit in units}  # in the model's order
        self.shards = all_shards(self.chunks)
        # Between passes the model's parameters have no values. The guard's hooks run before those
        # that send, so that it refuses first.
        self.guard = Guard(self, holds_values=False)
        self.hooks = BackwardHooks(self.buckets, self.reduce, comm.progress)
        self.works: list[Pending] = []  # the reduce-scatters under way
        self.is_inside = False  # True while `run_whole` runs a function of the model
        lists = [segments_of(model)] if segment_lists is None else segment_lists
        needs = units_of_segments(lists, units)
        if segment_lists is not None or has_segments(model):
            self.wrap_segments(needs)
        else:
            self.wrap_whole_model(needs[0])

    def wrap_segments(self, needs: Sequence[SegmentUnits]) -> None:
        """Gather and free around each segment's own `run`."""
        for each in needs:
            each.segment.run = partial(self.run, each, each.segment.run)

    def wrap_whole_model(self, needs: SegmentUnits) -> None:
        """Gather and free around whatever a script calls: the loss, the model, or a module inside it."""
        self.model.loss_sum = partial(self.run_whole, needs, self.model.loss_sum)  # type: ignore[method-assign]
        for _, module in self.model.named_modules():
            module.forward = partial(self.run_whole, needs, module.forward)  # type: ignore[method-assign]

    # ---- gathering and freeing: before and after a segment's forward and backward

    def run(self, needs: SegmentUnits, forward: Callable[[Any], Any], x: Any) -> Any:
        """Run a segment; gather and free its units before and after its forward and its backward."""
        backward_is_next = needs.segment.is_last and grad_enabled.get()
        self.pre_forward(needs, backward_is_next)
        # Backward comes to x after the segment.
        y = forward(at_backward(x, partial(self.post_backward, needs)))
        if not backward_is_next:
            self.post_forward(needs)
        return at_backward(y, partial(self.pre_backward, needs))  # backward comes to y before the segment

    def run_whole(
        self, needs: SegmentUnits, function: Callable[..., Any], *inputs: Any, **options: Any
    ) -> Any:
        """Run a function of a model that is one unit. Calls inside this call neither gather nor free."""
        if self.is_inside:
            return function(*inputs, **options)

        def forward(_: None) -> Any:
            return function(*inputs, **options)

        self.is_inside = True
        try:
            return self.run(needs, forward, None)
        finally:
            self.is_inside = False

    def pre_forward(self, needs: SegmentUnits, backward_is_next: bool) -> None:
        """Gather the units that the segment reads, and prefetch those of what runs next."""
        self.gather(needs.reads, needs.next_in_backward if backward_is_next else needs.next_in_forward)

    def post_forward(self, needs: SegmentUnits) -> None:
        """Free the units that the segment reads. Its backward gathers them again."""
        self.free(needs.reads)

    def pre_backward(self, needs: SegmentUnits) -> None:
        """Gather the segment's units, if its backward reads them; allocate the gradients that it completes."""
        if needs.segment.reads_in_backward:
            self.gather(needs.reads, needs.next_in_backward)
            # Backward does not come to an input without a gradient, such as tokens.
            queue_callback(partial(self.post_backward, needs))
        for unit in needs.completes:
            allocate_gradient(unit, self.works, self.hooks.enabled)

    def post_backward(self, needs: SegmentUnits) -> None:
        """Free the units that the segment reads. The next forward gathers them again."""
        self.free(needs.reads)

    def gather(self, units: Sequence[Unit], prefetched: Sequence[Unit]) -> None:
        """Gather `units` and wait for them. With `prefetch`, start to gather `prefetched` before that wait."""
        for unit in units:
            unit.unshard()
        if self.prefetch:
            for unit in prefetched:
                unit.unshard()
        for unit in units:
            unit.wait_for_unshard()

    def free(self, units: Sequence[Unit]) -> None:
        """Free those of `units` that are gathered."""
        for unit in units:
            if unit.gathering is not None:
                unit.reshard()

    # ---- gradients, and what a script calls (zero.py has most of these functions, too)

    def parameters(self) -> list[Parameter]:
        """Return this rank's shards, in the model's order."""
        return self.shards

    def __call__(self, *inputs: Array) -> Tensor:
        return self.model(*inputs)

    def loss(self, x: Array, y: Array) -> Tensor:
        """Return the mean loss over the targets of all ranks. All ranks call it. Backward ends in `after_backward`."""
        self.guard.before_loss(x, y)
        return global_mean_loss(self.model, self.comm, x, y, self.guard.before_backward, self.after_backward)

    def reduce(self, unit: Bucket) -> None:
        """Start to reduce-scatter the whole gradient of a unit, which is freed when it has been sent."""
        allocate_gradient(unit, self.works, self.hooks.enabled)  # if backward has not
        gradient = unit.complete()
        if self.before_reduce is not None:
            self.before_reduce(unit.parameters)
        out = self.chunks[unit].room_for_sum()
        self.works.append(
            unit.comm.reduce_scatter(gradient, out=out, algorithm=self.algorithm, async_op=True)
        )
        unit.drop_gradient()  # the message alone refers to it from here on

    def after_backward(self) -> None:
        """Finish the sums when backward ends, unless inside `no_sync` or another loss has finished them."""
        if self.hooks.enabled and self.hooks.has_gradients:
            self.synchronize()

    def synchronize(self) -> None:
        """Send the gradients that are left; wait until every shard has the sum over all ranks."""
        self.hooks.finish()
        for work in self.works:
            work.wait()
        self.works = []
        for chunk in self.chunks.values():
            chunk.accept_sums()
        self.guard.after_sum()

    def after_step(self) -> None:
        """Free the units that a forward without a backward has left: the optimizer has changed the chunks."""
        for unit in self.buckets:
            if unit.gathering is not None:  # its gather may still be under way
                unit.wait_for_unshard()
                unit.reshard()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward accumulate and send nothing: for all microbatches but the last."""
        return self.hooks.no_sync()

    def scaled_backward(self) -> AbstractContextManager[None]:
        """Allow backward of a loss that the caller divided by all ranks' targets; then call `synchronize`."""
        return self.guard.scaled_backward()

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step. The guard forgets those of the shards."""
        self.model.zero_grad()

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Return the whole gradient's 2-norm; scale a larger gradient down to `max_norm`. Sends a float64."""
        self.guard.before_norm()
        return clip_grad_norm(self.shards, max_norm, self.norm_comm)

    def replicas(self) -> list[tuple[Communicator, Sequence[Parameter]]]:
        """Return the ranks that hold the same shards, and these shards. Without `replicas` the list is empty."""
        return replicas_of_shards(self.shard_comm, self.shards)

    def gather_parameter(self, parameter: Parameter) -> Array:
        """Return the values of one parameter on every rank. All ranks call it. Gathers the parameter's unit."""
        (unit,) = (unit for unit in self.buckets if parameter in unit.parameters)
        whole, work = unit.gather()
        work.wait()
        return dict(unit.views(whole))[parameter]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Collect the whole model on rank 0, as `gather_state` does."""
        self.guard.before_state()
        return gather_state(self.model, self.shards, self.comm)

    load_state_dict = refuse_late_state  # the model's `load_state_dict` comes before the wrapper
