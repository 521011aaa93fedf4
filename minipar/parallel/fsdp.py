"""ZeRO stage 3: parameters, gradients and optimizer state are sharded. Methods have FSDP2's names.

A unit is a set of parameters, such as those of one block; each rank keeps one chunk of it. A
segment of the model, such as a block, gathers the units that it reads (`unshard`) before its
forward and frees them (`reshard`) after it. It gathers them again before its backward, if backward
reads them, and frees them after it. The last segment keeps its units in between, because its
backward follows at once. Backward reduce-scatters the gradient of a unit as soon as it is complete.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minipar.autograd.backward import queue_callback
from minipar.autograd.tensor import Tensor, grad_enabled, mapping
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.memory import allocate, hold
from minipar.nn.module import Segment
from minipar.nn.parameter import Parameter, placeholder
from minipar.parallel.buckets import Bucket
from minipar.parallel.chunks import Chunk
from minipar.parallel.wrapper import DataParallel


class Unit(Bucket):
    """Parameters that are gathered, freed and reduced together. NB: This is FSDP2's FSDPParamGroup.

    This rank keeps its `chunk` of them. While the unit is freed, the data of its parameters is NaN,
    so that code that reads a parameter at a wrong time computes NaN.
    """

    def __init__(self, parameters: Sequence[Parameter], comm: Communicator) -> None:
        super().__init__(parameters, comm)
        self.gathering: Work | None = None  # the gather of the whole array, and its result; None if freed
        data = self.flatten_values("buffers")[self.own].copy()
        hold("parameters", data)
        self.reshard()
        self.chunk = Chunk(self, data, allocate("gradients", data.size, self.gradient_dtype))
        self.updated = self.chunk.shards

    def unshard(self) -> None:
        """Start to gather the parameters, unless that has started. On d ranks, sends (d-1)/d of their bytes."""
        if self.gathering is None:
            whole = allocate("buffers", self.size, self.chunk.data.dtype)
            self.gathering = self.chunk.start_gather(whole)

    def wait_for_unshard(self) -> None:
        """Wait until the parameters have arrived, and make them views of the whole array."""
        assert self.gathering is not None
        whole = self.gathering.wait()
        for p, view in self.views(whole):
            for leaf in (p, *p.ties):
                leaf.data = view

    def reshard(self) -> None:
        """Free the whole parameters. This rank's chunk stays."""
        if self.gathering is not None:
            self.gathering.wait()  # a prefetch may still be under way
            self.gathering = None
        for leaf in self.leaves():
            leaf.data = placeholder(leaf.shape, leaf.dtype)


def at_backward(x: Any, call: Callable[[], None]) -> Any:
    """Return x through an identity at which backward calls `call()`."""
    if not (isinstance(x, Tensor) and x.requires_grad):
        return x  # such as tokens: backward does not come here

    def backward(grad: Array) -> Array:
        call()
        return grad

    return mapping(x, lambda array: array, backward)


class FullyShardedDataParallel(DataParallel):
    """A model of which each of d ranks keeps 1/d. Parameters are whole only while they are used.

    It is used like DistributedDataParallel. Each block of a GPT is a unit; a module that lists no
    `segments` is one unit, gathered by `wrapper.loss(x, y)` and `wrapper(x)`. With
    `prefetch`, the next segment's units are gathered while a segment computes. The unit that
    embedding and head share is gathered once for each of them: the head's backward follows its
    forward, and the embedding's backward does not read the parameters. Of Psi parameters, each rank
    sends 2 Psi (d-1)/d elements per forward and backward to gather them, and Psi (d-1)/d per step to
    reduce-scatter gradients; data parallelism sends 2 Psi (d-1)/d.
    """

    make_bucket = Unit
    holds_values = False
    prefetch = True  # False: a unit's gather starts when a segment needs it

    # ---- gathering and freeing: before and after a segment's forward and backward

    def wrap_segments(self, segments: Sequence[Segment]) -> None:
        reads = [self.units_of(segment) for segment in segments]
        for i, segment in enumerate(segments):
            following = reads[i + 1] if i + 1 < len(segments) else []
            preceding = reads[i - 1] if i > 0 and segments[i - 1].reads_in_backward else []
            segment.run = partial(self.run, segment, segment.run, reads[i], following, preceding)

    def units_of(self, segment: Segment) -> list[Unit]:
        """Return the units that a segment reads, in the model's order.

        A parameter that is in no unit is left out: the head of a pipeline's last rank may read the
        embedding, which is in a unit of the first rank.
        """
        return [u for u in reversed(self.buckets) if set(u.parameters) & set(segment.parameters)]

    def run(
        self,
        segment: Segment,
        forward: Callable[[Any], Any],
        units: Sequence[Unit],
        following: Sequence[Unit],
        preceding: Sequence[Unit],
        x: Any,
    ) -> Any:
        """Run a segment; gather and free its `units` before and after its forward and its backward.

        `following` are those of the segment that runs next in forward, and `preceding` those that the
        next segment in backward reads there.
        """
        backward_is_next = segment.is_last and grad_enabled.get()
        self.gather(units, preceding if backward_is_next else following)
        # Backward comes to x after the segment.
        y = forward(at_backward(x, partial(self.free, units)))
        if not backward_is_next:
            self.free(units)
        # Backward comes to y before the segment.
        return at_backward(y, partial(self.pre_backward, segment, units, preceding))

    def pre_backward(self, segment: Segment, units: Sequence[Unit], preceding: Sequence[Unit]) -> None:
        """Gather the segment's units, if its backward reads them."""
        if segment.reads_in_backward:
            self.gather(units, preceding)
            # Backward does not come to an input that needs no gradient, such as that of a model without segments.
            queue_callback(partial(self.free, units))

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
        """Free the whole parameters of `units`."""
        for unit in units:
            unit.reshard()

    def gather_parameter(self, parameter: Parameter) -> Array:
        """Return all values of a parameter on every rank. All ranks call it. Gathers the parameter's unit."""
        unit = next(unit for unit in self.buckets if parameter in unit.parameters)
        self.gather([unit], [])
        values = parameter.data.copy()
        unit.reshard()
        return values

    # ---- gradients, as in stage 2, written out again so that this file can be read alone

    def reduce(self, unit: Unit) -> None:
        """Start to reduce-scatter the whole gradient of a unit, which is freed when it has been sent."""
        gradient = self.complete(unit)
        self.works.append(unit.chunk.start_sum(gradient, self.algorithm))
        unit.free_gradient()  # the message alone refers to it from here on

    def after_sums(self) -> None:
        for unit in self.buckets:
            unit.chunk.accept_sum()

    def after_step(self) -> None:
        """Free the units that a forward without a backward has left: the optimizer has changed the chunks."""
        self.free(self.buckets)
