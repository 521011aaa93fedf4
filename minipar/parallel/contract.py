"""The contract of data parallelism: mistakes that would train silently and wrongly are errors.

A Contract is an owner of a strategy's parameters: backward's hooks and optimizers call it. It
refuses a backward of a loss that was not divided by the targets of all ranks, a step before
gradients are summed, gradients that are used twice, and an optimizer of the wrong parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from minipar.autograd.tensor import Tensor
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.module import Module
from minipar.nn.parameter import Owner, Parameter, owners_of
from minipar.parallel.agreement import check_alike
from minipar.parallel.buckets import Bucket, Group
from minipar.parallel.placement import placement_of

DIFFER = "every rank must do the same in every step, such as clip gradients and set the learning rate"
DIFFERENT = (
    "draw values by name (mp.Linear(..., name=...)) or from one seed, and load the same on all ranks"
)


class Contract(Owner):
    """The refusals of one strategy, which follow the calls of a script.

    `given` is what this rank's optimizer must receive, `share_updates` what follows its step. The
    parameters of the buckets `compared` must never differ between the ranks. `accumulates_sums` says
    whether a step may add up the sums of several passes.
    """

    def __init__(
        self,
        model: Module,
        given: Sequence[Parameter],
        compared: Sequence[Bucket],
        share_updates: Callable[[], None],
        accumulates_sums: bool,
    ) -> None:
        self.given = set(given)
        self.compared = compared
        self.share_updates = share_updates
        self.accumulates_sums = accumulates_sums
        self.holds_values = bool(compared)  # a model's `state_dict` asks for it
        whole = set(model.parameters())
        in_place = self.given - whole  # shards
        if in_place and compared:
            in_place |= whole
        # The arrays in which the strategy has left the values that an optimizer changes.
        self.values = {p: p.data for p in in_place}
        # Gradients are none, local (not summed over the ranks yet), summed, or stepped.
        self.state = "none"
        # Whether a backward pass is running whose loss was divided by the targets of all ranks.
        self.in_scaled_pass = False
        self.losses = 0
        self.leaves: list[Tensor] = []
        for p in whole | self.given:
            p.owners.append(self)
            self.leaves += [p, *p.ties]
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(self.on_gradient)

    # ---- calls from the strategy

    def before_loss(self) -> None:
        """Compare the ranks' parameters before losses 2, 4, 8, ... UsageError, on every rank, if they differ.

        Sends checksums, which are not counted.
        """
        self.in_scaled_pass = False  # a backward pass that failed has left it True
        self.losses += 1
        if self.losses > 1 and self.losses.bit_count() == 1:
            for bucket in self.compared:
                values = named_values(bucket.parameters)
                check_alike(bucket.comm, values, "the ranks' parameters differ now", DIFFER)

    def begin_pass(self) -> None:
        """Note that backward of a scaled loss begins. RuntimeError if it would add to gradients that are used up."""
        if any(leaf.grad is not None for leaf in self.leaves):
            if self.state == "stepped":
                why = "backward() after optimizer.step() would add to used gradients"
                raise RuntimeError(f"{why}: call optimizer.zero_grad()")
            if self.state == "summed" and not self.accumulates_sums:
                why = "backward() would add to gradients that were summed over the ranks, and sum them again"
                remedy = "run all microbatches of a step but the last inside `with wrapper.no_sync():`"
                raise RuntimeError(f"{why}: {remedy}")
            if self.state == "none" and not self.in_scaled_pass:
                why = "backward() of wrapper.loss(x, y) plus a term that every rank would add (or after a failure)"
                remedy = (
                    "divide the term by the ranks, and run backward inside `wrapper.scaled_backward()`"
                )
                raise RuntimeError(f"{why}: {remedy}")
        self.in_scaled_pass = True

    def end_pass(self) -> None:
        """Note that backward of a scaled loss has ended."""
        self.in_scaled_pass = False

    @contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Allow backward of a loss that the caller divided by the targets of all ranks."""
        self.begin_pass()
        try:
            yield
        finally:
            self.end_pass()

    def after_sum(self) -> None:
        """Note that the gradients are summed over the ranks."""
        self.state = "summed"

    # ---- calls from backward and from optimizers, as an owner of the parameters

    def on_gradient(self, leaf: Tensor) -> None:
        """Note that a gradient has arrived. RuntimeError in a pass that nobody has scaled."""
        if not self.in_scaled_pass:
            why = "backward() of a loss that was not divided by the targets of all ranks"
            remedy = "use wrapper.loss(x, y), or scale the loss and run backward inside `wrapper.scaled_backward()`"
            raise RuntimeError(f"{why}: {remedy}")
        self.state = "local"

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if an optimizer holds parameters of the model that the strategy does not give it."""
        wrong = [p for p in parameters if self in p.owners and p not in self.given]
        if wrong:
            why = (
                f"the optimizer holds {placement_of(wrong[0]).name}, but each rank updates its own shards"
            )
            raise ValueError(
                f"{why}: write AdamW(wrapper.parameters()) instead of AdamW(model.parameters())"
            )

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError: the strategy sums these gradients already."""
        raise UsageError("the model has a wrapper already: use that one, or make a new model")

    def sum_gradients(self) -> None:
        """Raise RuntimeError if the gradients are not summed over the ranks yet: only backward sums them."""
        if self.state == "local":
            why = "gradients were not summed over the ranks"
            remedy = (
                "run the last backward outside `no_sync` (after scaled_backward: wrapper.synchronize())"
            )
            raise RuntimeError(f"{why}: {remedy}")

    def before_step(self, parameters: Sequence[Parameter]) -> None:
        """Raise RuntimeError if gradients are not summed yet, or used up, UsageError if `p.data` was replaced."""
        self.sum_gradients()
        if self.state == "stepped":
            remedy = "call zero_grad() and backward() between two steps, and make one optimizer"
            raise RuntimeError(f"optimizer.step() twice with the gradients of one backward(): {remedy}")
        for p, data in self.values.items():
            if p.data is not data:
                what = f"{placement_of(p).name}.data was replaced after wrapping"
                raise UsageError(f"{what}, where no step sees it: write p.data[...] = values")

    def after_step(self) -> None:
        """Let the strategy share the updates."""
        self.share_updates()
        self.state = "stepped"

    def forget_gradients(self) -> None:
        """Forget what was summed; `zero_grad` of a model or an optimizer calls it."""
        self.state = "none"
        # The caller has forgotten the gradients of the shards, or those of the whole parameters.
        for leaf in self.leaves:
            leaf.grad = None


def check_groups(groups: Sequence[Group], is_complete: bool) -> None:
    """Raise UsageError if data parallelism must not sum the gradients of these groups. All ranks call it.

    It must not if the ranks of a group hold different values, if an owner of the parameters sums
    these gradients otherwise, and for frozen parameters and several dtypes, which one flat array
    cannot hold. `is_complete` says whether terms of other axes, such as a
    LayerNorm's under sequence parallelism, are added before the sum.
    """
    for parameters, comm in groups:
        for owner in owners_of(parameters):
            owner.check_sum(parameters, comm, is_complete)
        names = [placement_of(p).name for p in parameters if not p.requires_grad]
        dtypes = {str(p.dtype) for p in parameters}
        if names or len(dtypes) > 1:
            given = f"frozen: {names}, dtypes: {sorted(dtypes)}"
            raise UsageError(f"a wrapper trains all parameters in one dtype ({given})")
        what = f"the ranks of {comm.axis} hold different models"
        check_alike(comm, named_values(parameters), what, DIFFERENT)


def named_values(parameters: Sequence[Parameter]) -> list[tuple[str, Array]]:
    """Return the parameters' values with their names."""
    return [(placement_of(p).name, p.data) for p in parameters]
