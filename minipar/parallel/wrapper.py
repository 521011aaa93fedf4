"""The functions that a script calls of a wrapped model: the same at every ZeRO stage, in PyTorch's terms."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import call
from typing import Any

from minipar.autograd.tensor import Tensor
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.nn.module import Module, Segment, array_of
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import BackwardHooks, Bucket, Group, by_unit
from minipar.parallel.contract import Contract, check_groups
from minipar.parallel.loss import global_mean_loss
from minipar.parallel.placement import attach_placements, number_units


class DataParallel:
    """A model over the ranks of `comm`, each of which has other samples. Its subclasses are the strategies.

    Each of `groups` (parameters, ranks that hold them), or each unit of the model, becomes a bucket,
    which travels in one message. `before_reduce(parameters)` is called before each sum: tensor
    parallelism adds there, in place, the gradients' terms of its other ranks. `segment_lists` are
    what this rank runs one after the other, such as a pipeline's stages; by default there is one
    list, the model's `segments`. A strategy says what a bucket is (`make_bucket`), how its
    gradients are summed (`reduce`), and what follows the sums and the optimizer's step.
    """

    # Makes the bucket of a group, with the memory that it keeps between steps.
    make_bucket: Callable[[Sequence[Parameter], Communicator], Any]
    # Starts the sum of a bucket's gradients, and returns at once, so that backward goes on.
    reduce: Callable[[Any], None]
    holds_values = True  # False if parameters are freed between passes

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        algorithm: str = "ring",
        *,
        groups: Sequence[Group] | None = None,
        segment_lists: Sequence[Sequence[Segment]] | None = None,
        before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
    ) -> None:
        if groups is None:
            groups = [(unit, comm) for unit in by_unit(model)]
        attach_placements(model)
        number_units([parameters for parameters, _ in groups])
        check_groups(groups, is_complete=before_reduce is not None)
        self.model = model
        self.comm = comm
        self.algorithm = algorithm
        self.before_reduce = before_reduce
        self.works: list[Work] = []  # the sums under way
        buckets = [self.make_bucket(parameters, ranks) for parameters, ranks in groups]
        self.buckets = buckets[::-1]  # backward completes the last parameters first
        # The contract registers its hooks first, so that it can raise an error before a bucket is sent.
        self.contract = Contract(buckets, self.after_step, self.holds_values)
        self.hooks = BackwardHooks(self.buckets, self.prepare, self.reduce)
        # The whole model as one segment: its `run` is given a function to call, the forward or the loss.
        self.whole = Segment("model", call, model.parameters(), is_last=True)
        if segment_lists is None:
            segment_lists = [getattr(model, "segments", [self.whole])]
        for segments in segment_lists:
            self.wrap_segments(segments)

    # ---- what each strategy defines

    def wrap_segments(self, segments: Sequence[Segment]) -> None:
        """Replace the `run` of these segments, to act before and after their forward and backward."""

    def after_sums(self) -> None:
        """Make the sums, which have arrived, the gradients of `parameters()`."""

    def after_step(self) -> None:
        """Make the updated values visible to the model of every rank."""

    def gather_parameter(self, parameter: Parameter) -> Array:
        """Return all values of a parameter on every rank. All ranks call it."""
        return parameter.data

    # ---- what a script calls

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer must receive, in the model's order: parameters, or its shards of them."""
        return [p for bucket in reversed(self.buckets) for p in bucket.updated]

    def __call__(self, *inputs: Array) -> Any:
        return self.whole.run(partial(self.model, *inputs))

    def loss(self, x: Array, y: Array) -> Tensor:
        """Return the mean loss over the targets of all ranks. All ranks call it; see loss.py."""
        self.contract.before_loss()
        y = array_of(y)
        return global_mean_loss(
            self.loss_sum(x, y),
            self.model.target_count(y),
            self.comm,
            self.contract.begin_pass,
            self.after_backward,
        )

    def loss_sum(self, x: Array, y: Array) -> Tensor:
        """Return this rank's loss, summed over its targets, for a script that scales it: see `scaled_backward`."""
        return self.whole.run(partial(self.model.loss_sum, x, y))

    def after_backward(self) -> None:
        """Finish the sums, unless inside `no_sync`.

        Several losses in one pass queue this several times; only the first call finds local gradients.
        """
        self.contract.in_scaled_pass = False
        if self.hooks.enabled and self.contract.state == "local":
            self.synchronize()

    def prepare(self) -> None:
        """Allocate the whole gradient of the bucket that backward completes next, unless there is one.

        There is one if the strategy keeps it between steps. Else wait first for all but the last of the sums
        under way, which frees the whole gradients of those. Under `no_sync` allocate the whole gradients
        of all buckets, which stay until the last microbatch.
        """
        if not self.hooks.enabled:
            for bucket in self.buckets:
                bucket.allocate_gradient("gradients")
        elif self.hooks.unsent and self.hooks.unsent[0].gradient is None:
            for work in self.works[:-1]:
                work.wait()
            self.hooks.unsent[0].allocate_gradient("buffers")

    def synchronize(self) -> None:
        """Send the remaining buckets; wait until all gradients are sums over all ranks.

        Backward of `loss` ends with this, outside `no_sync`.
        """
        self.contract.begin_sum()
        self.hooks.finish()
        for work in self.works:
            work.wait()
        self.works.clear()
        self.after_sums()
        self.contract.state = "summed"

    def complete(self, bucket: Bucket) -> Array:
        """Return the whole gradient of a bucket, with all terms that this rank adds before the sum."""
        gradient = bucket.complete()
        if self.before_reduce is not None:
            self.before_reduce(bucket.parameters)
        return gradient

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate and send nothing: for all microbatches but the last."""
        previous = self.hooks.enabled
        self.hooks.enabled = False
        try:
            yield
        finally:
            self.hooks.enabled = previous

    @contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Allow backward of a loss that the caller has scaled; call `synchronize` afterwards."""
        self.contract.begin_pass()
        try:
            yield
        finally:
            self.contract.in_scaled_pass = False

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        self.model.zero_grad()
