"""The contract of data parallelism: mistakes that would train silently and wrongly are errors.

A Contract is an owner of a strategy's parameters: backward's hooks and optimizers call it. It
refuses a backward of a loss that was not divided by the targets of all ranks, a step before
gradients are summed, gradients that are used twice, and an optimizer of the wrong parameters.
"""

from collections.abc import Callable, Sequence

from minipar.autograd.tensor import Tensor
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.parameter import Owner, Parameter, owners_of
from minipar.parallel.agreement import check_parameters_alike
from minipar.parallel.buckets import Bucket, Group
from minipar.parallel.placement import placement_of


class Contract(Owner):
    """The refusals of one strategy, which follow the calls of a script.

    `share_updates` follows an optimizer's step. With `holds_values` the parameters are whole between
    steps, and must never differ between the ranks.
    """

    remedy = "write AdamW(wrapper.parameters()) instead of AdamW(model.parameters())"

    def __init__(
        self, buckets: Sequence[Bucket], share_updates: Callable[[], None], holds_values: bool
    ) -> None:
        self.buckets = buckets
        self.share_updates = share_updates
        self.holds_values = holds_values
        # Gradients are none, local (not summed over the ranks yet), summed, or stepped.
        self.state = "none"
        # Whether a backward pass is running whose loss was divided by the targets of all ranks.
        self.in_scaled_pass = False
        self.losses = 0
        whole = {p for bucket in buckets for p in bucket.parameters}
        self.given = {p for bucket in buckets for p in bucket.updated}
        # ZeRO's shards, and parameters that stay whole, refer to one flat array.
        flat = self.given - whole
        if flat and holds_values:
            flat |= whole
        self.values = {p: p.data for p in flat}
        self.leaves = self.given.union(*[bucket.leaves() for bucket in buckets])
        for p in whole | self.given:
            p.owners.append(self)
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(self.on_gradient)

    # ---- calls from the strategy

    def before_loss(self) -> None:
        """Compare the ranks' parameters before losses 2, 4, 8, ... UsageError, on every rank, if they differ.

        Sends checksums, which are not counted.
        """
        self.in_scaled_pass = False  # a backward pass that failed has left it True
        self.losses += 1
        if self.holds_values and self.losses > 1 and self.losses.bit_count() == 1:
            for bucket in self.buckets:
                check_parameters_alike(
                    bucket.comm,
                    bucket.parameters,
                    "the ranks' parameters differ now",
                    "every rank must do the same in every step, such as clip gradients and set the learning rate",
                )

    def begin_pass(self) -> None:
        """Note that backward of a scaled loss begins. RuntimeError if it would add to gradients that are used up."""
        if any(leaf.grad is not None for leaf in self.leaves):
            if self.state == "stepped":
                raise RuntimeError(
                    "backward() after optimizer.step() would add to used gradients: call optimizer.zero_grad()"
                )
            self.begin_sum()
            if self.state == "none" and not self.in_scaled_pass:
                raise RuntimeError(
                    "backward() of wrapper.loss(x, y) plus a term that every rank would add (or after a "
                    "failure): divide the term by the ranks, and run backward inside "
                    "`wrapper.scaled_backward()`"
                )
        self.in_scaled_pass = True

    def begin_sum(self) -> None:
        """Raise RuntimeError if whole gradients were summed over the ranks, and would be summed again."""
        if self.state == "summed" and any(bucket.gradient is not None for bucket in self.buckets):
            raise RuntimeError(
                "gradients were summed over the ranks already, and would be summed again: run all microbatches "
                "of a step but the last inside `with wrapper.no_sync():`, and call synchronize() after "
                "scaled_backward alone"
            )

    # ---- calls from backward and from optimizers, as an owner of the parameters

    def on_gradient(self, leaf: Tensor) -> None:
        """Note that a gradient has arrived. RuntimeError in a pass that nobody has scaled."""
        if not self.in_scaled_pass:
            raise RuntimeError(
                "backward() of a loss that was not divided by the targets of all ranks: use "
                "wrapper.loss(x, y), or scale the loss and run backward inside `wrapper.scaled_backward()`"
            )
        self.state = "local"

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if an optimizer holds parameters of the model that the strategy does not give it."""
        for p in parameters:
            if self in p.owners and p not in self.given:
                raise ValueError(
                    f"the optimizer holds {placement_of(p).name}, but each rank updates its own shards: "
                    f"{self.remedy}"
                )

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError: the strategy sums these gradients already."""
        raise UsageError(
            "a wrapper or a ZeroOptimizer sums these gradients already: call step() of its optimizer "
            "alone, or make a new model"
        )

    def sum_gradients(self) -> Sequence[Parameter] | None:
        """Raise RuntimeError if the gradients are not summed over the ranks yet: only backward sums them."""
        if self.state == "local":
            raise RuntimeError(
                "gradients were not summed over the ranks: run the last backward outside `no_sync` "
                "(after scaled_backward: wrapper.synchronize())"
            )
        return None

    def before_step(self, parameters: Sequence[Parameter]) -> None:
        """Raise RuntimeError if gradients are used up, or not summed yet, UsageError if `p.data` was replaced."""
        if self.state == "stepped":
            raise RuntimeError(
                "optimizer.step() twice with the gradients of one backward(): call zero_grad() and "
                "backward() between two steps, and make one optimizer"
            )
        self.sum_gradients()
        for p, data in self.values.items():
            if p.data is not data:
                raise UsageError(
                    f"{placement_of(p).name}.data was replaced after wrapping, where no step sees it: "
                    "write p.data[...] = values"
                )

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
        frozen = [placement_of(p).name for p in parameters if not p.requires_grad]
        dtypes = sorted({str(p.dtype) for p in parameters})
        if frozen or len(dtypes) > 1:
            raise UsageError(
                f"a wrapper trains all parameters in one dtype (frozen: {frozen}, dtypes: {dtypes})"
            )
        check_parameters_alike(
            comm,
            parameters,
            f"the ranks of {comm.axis} hold different models",
            "draw values by name (mp.Linear(..., name=...)) or from one seed, and load the same on all ranks",
        )
