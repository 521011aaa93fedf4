"""The guard of a strategy: it refuses calls out of order, and ranks whose parameters differ."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from minipar.autograd import Tensor, grad_enabled, mapping, queue_callback
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.comm.trace import unseen
from minipar.errors import UsageError
from minipar.nn.module import Module
from minipar.nn.optim_guards import check_gradients
from minipar.nn.parameter import Owner, Parameter, Updating
from minipar.parallel.guards import check_alike, check_parted, check_start, is_power_of_two, note_same_batch
from minipar.parallel.placement import placement_of

ADDED = "backward() after optimizer.step() would add to the gradients of the last step"
FORGOTTEN = f"{ADDED}: call optimizer.zero_grad() after each step"


class Held(Protocol):
    """Parameters of a bucket, and the ranks that hold them."""

    holders: Communicator

    def checksum(self) -> int:
        """Return a checksum of the parameters before training, the same on ranks that start alike."""


class DataParallel(Protocol):
    """The strategy that a Guard guards, as the guard sees it."""

    model: Module
    comm: Communicator
    accumulates_sums: bool  # the sums of several passes over the ranks may be added up in one step

    @property
    def buckets(self) -> Sequence[Held]:
        """The parameters, by bucket."""

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer must receive."""

    def after_step(self) -> None:
        """Make the updated values visible wherever they are used."""

    def replicas(self) -> list[tuple[Communicator, Sequence[Parameter]]]:
        """Return which ranks hold the same parameters, and these: they must never differ."""


class Guard(Owner):
    """The refusals of one data-parallel strategy: it follows the calls of a script, and refuses those out of order.

    The strategy says when a loss, a backward pass or a norm begins. Optimizers say when they step,
    because the guard is an owner of the parameters.
    """

    def __init__(self, strategy: DataParallel, holds_values: bool = True) -> None:
        self.strategy = strategy
        self.holds_values = holds_values
        self.wrapper = type(strategy).__name__
        held = strategy.model.parameters()
        given = strategy.parameters()
        self.given = set(given)
        self.sharded = not self.given <= set(held)
        self.leaves: list[Tensor] = []
        for p in held:
            self.leaves += [p, *p.ties]
        self.values = {p: p.data for p in held}  # as the strategy has left them
        self.state = "none"  # gradients are none, local (not summed over the ranks yet), summed, stepped
        self.is_scaled = False  # inside a backward pass of a loss that was divided by the global count
        self.losses = 0
        self.batch_is_compared = False
        self.step_is_compared = False  # the next loss need not compare what the steps have left
        self.optimizers: dict[
            Parameter, weakref.ref[Updating]
        ] = {}  # the last one that has updated each parameter
        self.updated: set[Parameter] = set()  # since gradients were summed, an optimizer has updated these
        for p in dict.fromkeys((*held, *given)):
            p.owners.append(self)
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(self.on_gradient)

    # ---- what the strategy says

    def before_loss(self, x: Array, y: Array) -> None:
        """Compare the ranks' parameters before the first loss, and before losses 2, 3, 5, 9, ... that follow a step.

        ValueError, on every rank, if they differ. Prints a note if two ranks train on the same
        first batch. Sends checksums as control data.
        """
        self.is_scaled = False  # a backward pass that failed has left it True
        self.check_model()
        if grad_enabled.get() and not self.batch_is_compared:
            self.batch_is_compared = True
            note_same_batch(self.strategy.comm, x, y)
        if self.losses == 0:
            for comm, buckets in by_ranks((bucket.holders, [bucket]) for bucket in self.strategy.buckets):
                check_start(comm, [bucket.checksum() for bucket in buckets])
        elif not self.step_is_compared:
            optimizers = self.living_optimizers()
            # Every rank sends, whether it has made a step or not.
            check_settings(self.strategy.comm, optimizers)
            if optimizers:
                self.step_is_compared = True
                self.check_divergence()
        self.losses += 1
        if is_power_of_two(self.losses):
            self.step_is_compared = False

    def before_backward(self) -> None:
        """Note that a backward pass of the strategy's loss begins; see `begin_pass`."""
        self.begin_pass()
        queue_callback(self.end_pass)

    def begin_pass(self) -> None:
        """Note that a pass with the global scale begins. RuntimeError if it would add to gradients that are used up."""
        if self.state == "stepped" and self.has_gradients():
            raise RuntimeError(FORGOTTEN)
        if self.state == "summed" and not self.strategy.accumulates_sums and self.has_gradients():
            why = "backward() would add to gradients that were summed over the ranks already, and sum them again"
            remedy = "run all microbatches of a step but the last inside `with wrapper.no_sync():`"
            raise RuntimeError(f"{why}: {remedy}, and call optimizer.zero_grad() before the next step")
        self.is_scaled = True

    def has_gradients(self) -> bool:
        """Return whether there are gradients to add to: a script may have set them to None by itself."""
        return any(p.grad is not None for p in (*self.leaves, *self.given))

    def end_pass(self) -> None:
        """Note that a pass has ended."""
        self.is_scaled = False

    @contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Allow backward of a loss that the caller divided by the global count of targets."""
        self.begin_pass()
        try:
            yield
        finally:
            self.end_pass()

    def after_sum(self) -> None:
        """Note that the gradients are summed over the ranks."""
        self.state = "summed"
        self.updated = set()

    def before_norm(self) -> None:
        """Raise RuntimeError if the gradients are not summed over the ranks, ValueError if other axes split them."""
        self.check_other_axes("parallel.grad_norm.clip_grad_norm")
        if self.state != "summed":
            remedy = "call it after the backward pass of the last microbatch, outside `no_sync`"
            raise RuntimeError(f"clip_grad_norm() before the gradients were summed over the ranks: {remedy}")

    def before_state(self) -> None:
        """Raise ValueError if other axes have placed the model, or if ranks' parameters have parted."""
        self.check_other_axes("parallel.state.gather_state")
        self.check_divergence()

    # ---- what backward and the optimizers say

    def on_gradient(self, leaf: Tensor) -> None:
        """Note that a gradient has arrived. RuntimeError in a pass that nobody has scaled."""
        if not self.is_scaled:
            ranks = self.strategy.comm.size
            raise RuntimeError(
                f"backward() of a loss that was not divided by the global count of targets: over {ranks} "
                f"ranks the gradients would add up to {ranks} times too much. Use wrapper.loss(x, y) instead "
                "of model.loss(x, y), or scale the loss and run backward inside `with wrapper.scaled_backward():`"
            )
        self.state = "local"

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if an optimizer holds parameters of the model that the strategy does not give it."""
        for p in parameters:
            if self in p.owners and p not in self.given:
                why = f"with {self.wrapper} each rank updates its own shards"
                remedy = "write AdamW(wrapper.parameters()) instead of AdamW(model.parameters())"
                raise ValueError(f"the optimizer holds {placement_of(p).name}, but {why}: {remedy}")

    def before_step(self, optimizer: Updating, parameters: Sequence[Parameter]) -> None:
        """Raise RuntimeError if the gradients are not summed yet, or if another optimizer updates a parameter."""
        if self.state == "local":
            remedy = "run the backward pass of the last microbatch outside `no_sync`"
            remedy += " (after scaled_backward: call wrapper.synchronize())"
            raise RuntimeError(f"optimizer.step() before the gradients were summed over the ranks: {remedy}")
        own = [p for p in parameters if p in self.given]
        for p in own:
            reference = self.optimizers.get(p)
            if reference is not None and reference() not in (None, optimizer):
                why = f"another optimizer has updated {p.describe()} already, and each would change it in every step"
                raise RuntimeError(f"optimizer.step(): {why}: make one optimizer of wrapper.parameters()")
        if not self.updated.isdisjoint(own):
            remedy = "call zero_grad() and backward() between two steps"
            raise RuntimeError(f"optimizer.step() twice with the gradients of one backward(): {remedy}")
        self.updated.update(own)
        self.optimizers |= {p: weakref.ref(optimizer) for p in own}

    def after_step(self) -> None:
        """Let the strategy share the updates; what the next backward adds to must be forgotten before."""
        self.strategy.after_step()
        self.state = "stepped"

    def check_sum(self, group: Communicator) -> None:
        """Raise ValueError: the strategy sums the gradients."""
        raise ValueError("a wrapper sums these gradients already: write AdamW(wrapper.parameters()) instead")

    def forget_gradients(self) -> None:
        """Forget what was summed; `zero_grad` of a model or an optimizer calls it."""
        self.state = "none"
        if self.sharded:  # the caller has forgotten the gradients of the shards, or of the whole parameters
            for p in (*self.leaves, *self.given):
                p.grad = None

    # ---- the model that was wrapped

    def check_model(self) -> None:
        """Raise UsageError if the model has other parameters than when it was wrapped, or other arrays of values.

        At stages 1 and 2 the arrays belong to the strategy: an update of other ones would be seen nowhere.
        """
        now = self.strategy.model.parameters()
        if set(now) != set(self.values):
            remedy = "build the whole model first, then wrap it and make its optimizer"
            raise UsageError(f"the model has other parameters than when it was wrapped: {remedy}")
        if self.sharded and self.holds_values:
            for p in now:
                if p.data is not self.values[p]:
                    problem = f"{placement_of(p).name}.data was replaced after the model was wrapped"
                    raise UsageError(f"{problem}: write p.data[...] = values")

    # ---- ranks that must hold the same

    def check_divergence(self) -> None:
        """Raise ValueError, on all ranks that hold them, if parameters are no longer the same. Sends checksums."""
        for comm, parameters in by_ranks(self.strategy.replicas()):
            check_parted(comm, [(p.describe(), p.data) for p in parameters])

    def living_optimizers(self) -> list[Updating]:
        """Return the optimizers that have updated parameters, each once, if they still exist."""
        living: dict[int, Updating] = {}
        for reference in self.optimizers.values():
            optimizer = reference()
            if optimizer is not None:
                living[id(optimizer)] = optimizer
        return list(living.values())

    def check_other_axes(self, function: str) -> None:
        """Raise ValueError if tensor or pipeline parallelism has placed the model too."""
        placements = [placement_of(p) for p in self.strategy.model.parameters()]
        if any(placement.tp.ranks > 1 or placement.pp > 0 for placement in placements):
            raise ValueError(
                f"tensor or pipeline parallelism has placed this model too: call minipar.{function}"
            )


def by_ranks(held: Iterable[tuple[Communicator, Sequence[Array]]]) -> list[tuple[Communicator, list[Array]]]:
    """Join what the same ranks hold."""
    joined: dict[Communicator, list[Array]] = {}
    for comm, items in held:
        joined.setdefault(comm, []).extend(items)
    return list(joined.items())


def check_settings(comm: Communicator, optimizers: Sequence[Updating]) -> None:
    """Raise ValueError, on every rank, if the ranks' optimizers have other learning rates or numbers of steps."""
    settings: list[tuple[str, Array]] = [
        ("the number of steps", np.array([each.steps for each in optimizers]))
    ]
    for optimizer in optimizers:
        settings.append(("the learning rate", np.array(float(optimizer.lr))))
    remedy = (
        "every rank must do the same in every step: give the optimizers of all ranks one lr, and one schedule"
    )
    check_alike(comm, settings, "the ranks' optimizers have parted", remedy)


class ContextGuard(Owner):
    """The refusal of a forgotten wrapper under context parallelism.

    A gradient covers this rank's tokens alone. A script may sum the gradients in its own way, so
    what is compared is what the first step makes of the ranks' parameters.
    """

    def __init__(self, comm: Communicator, model: Module) -> None:
        self.comm = comm
        self.is_compared = False
        self.names = {p: name for name, p in model.named_parameters()}
        for p in self.names:
            p.owners.append(self)

    def before_step(self, optimizer: Updating, parameters: Sequence[Parameter]) -> None:
        """Note what the step updates, but no experts: the ranks may hold different ones."""
        own = [p for p in parameters if p in self.names]
        self.updated = [p for p in own if p.placement is None or p.placement.ep is None]

    def after_step(self) -> None:
        """Raise UsageError, on every rank, if the first step has made their parameters different."""
        if not self.is_compared:
            self.is_compared = True
            what = f"the gradients of {self.comm.axis}, each of a rank's own tokens, were not summed"
            remedy = "wrap the model over all ranks that hold other tokens, such as mesh.dp_cp"
            with unseen(self.comm):  # a first step sends what the others send
                check_alike(self.comm, [(self.names[p], p.data) for p in self.updated], what, remedy)


class SummingOptimizer(Protocol):
    """A ZeroOptimizer, as an OptimizerGuard sees it."""

    parameters: list[Parameter]
    shards: list[Parameter]
    comm: Communicator

    def sum_gradients(self) -> list[Parameter]:
        """Sum the gradients over the ranks, once in a step, and return this rank's shards."""


class OptimizerGuard(Owner):
    """The refusals of a ZeroOptimizer: steps and backward passes out of order, and other optimizers."""

    def __init__(self, optimizer: SummingOptimizer) -> None:
        self.optimizer = optimizer
        self.state = "none"  # gradients are none or local, summed over the ranks, stepped
        self.step_is_compared = False
        self.updates = 0
        for p in optimizer.parameters:
            p.owners.append(self)
            for leaf in (p, *p.ties):
                leaf.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, leaf: Tensor) -> None:
        """Raise RuntimeError if backward has added to gradients that were used already."""
        if self.state == "stepped":
            raise RuntimeError(FORGOTTEN)
        if self.state == "summed":
            why = "backward() would add to gradients that were summed over the ranks already"
            raise RuntimeError(f"{why}: clip after the last backward of a step")

    def watch_mean(self, loss: Tensor) -> Tensor:
        """Return the loss. RuntimeError in a backward that would sum gradients of ranks' means."""
        ranks = self.optimizer.comm.size

        def backward(grad: Array) -> Array:
            if ranks > 1 and (grad == 1).all():
                why = f"ZeroOptimizer would add up the gradients of {ranks} ranks' means"
                remedy = "divide model.loss_sum(x, y) by the targets of all ranks"
                remedy += ", or model.loss(x, y) by the ranks if each has as many targets"
                raise RuntimeError(f"{why}: {remedy}")
            return grad

        return mapping(loss, lambda value: value, backward)

    def before_sum(self, inner: Updating) -> None:
        """Raise RuntimeError without gradients; after 1, 2, 4, ... steps ValueError if ranks have parted."""
        check_gradients(self.optimizer.parameters)
        if inner.steps > 0 and not self.step_is_compared:
            self.step_is_compared = True
            check_settings(self.optimizer.comm, [inner])

    def before_update(self) -> None:
        """Raise RuntimeError if the gradients are used up."""
        if self.state == "stepped":
            why = "optimizer.step() twice for one backward()"
            raise RuntimeError(f"{why}: call zero_grad() and backward() in between")

    def after_sum(self) -> None:
        """Note that the gradients are summed."""
        self.state = "summed"

    def after_update(self) -> None:
        """Note that the gradients are used up."""
        self.state = "stepped"
        self.updates += 1
        if is_power_of_two(self.updates):
            self.step_is_compared = False

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError: another optimizer would update the parameters a second time."""
        raise ValueError("a ZeroOptimizer updates these parameters already: call its step() alone")

    def check_sum(self, group: Communicator) -> None:
        """Raise ValueError: another ZeroOptimizer would sum the gradients a second time."""
        self.check_optimizer(self.optimizer.parameters)

    def forget_gradients(self) -> None:
        """Forget what was summed; `zero_grad` of a model calls it, too."""
        self.state = "none"
        for shard in self.optimizer.shards:
            shard.grad = None
