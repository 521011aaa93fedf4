"""Parameter: a leaf that is trained, and Owner: a strategy that looks after parameters."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd.backward import node_numbers
from minipar.autograd.tensor import Tensor, node_wrappers
from minipar.backend import Array, xp
from minipar.errors import UsageError


def placeholder(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return a read-only NaN of this shape, in one element's memory.

    It is a parameter's data while the values are not on this rank.
    """
    return xp.broadcast_to(xp.full((), np.nan, dtype=dtype), shape)


class Parameter(Tensor):
    """A leaf that is trained.

    `ties` are leaves that read the same values but collect gradients of their own, as GPT-2's
    output head of `wte`. In a pipeline the two gradients arise on different ranks; so on one device
    too they stay apart until the step.
    """

    def __init__(self, data: Array) -> None:
        super().__init__(data, requires_grad=True)
        if self.dtype.itemsize == 2 and not node_wrappers:
            remedy = "call minipar.more.precision.enable_two_bytes() first"
            raise UsageError(f"a parameter of {self.dtype} would be multiplied in {self.dtype}: {remedy}")
        self.decays = self.ndim >= 2  # whether weight decay applies
        self.drawn_by: tuple[int, str] | None = None  # seed and name, if values start random
        self.ties: list[Tensor] = []
        # What strategies set; a serial model has none of it.
        self.placement: Any = None  # the record of where the elements are
        self.owners: list[Owner] = []  # the strategies, in the order in which they came
        # What the last step did, so that a gradient that is used again, or a graph that is too old,
        # is refused.
        self.used_gradient: Array | None = None
        self.changed_values: Array | None = None
        self.changed_at: int | None = None

    def tie(self) -> Tensor:
        """Return a new leaf with this parameter's values and a gradient of its own."""
        leaf = Tensor(self.data, requires_grad=True)
        self.ties.append(leaf)
        return leaf

    def move_to(self, storage: Array) -> None:
        """Copy the values into `storage`, such as a range of flat storage, and keep them there."""
        storage[...] = self.data
        self.data = storage

    def fold_tied_gradients(self) -> None:
        """Add the ties' gradients to this one and clear them, so that a second call adds nothing."""
        for leaf in self.ties:
            if leaf.grad is not None and self.requires_grad:
                self.accumulate(leaf.grad)
            leaf.grad = None

    def note_update(self) -> None:
        """Note that an optimizer has used the gradient and changed the values."""
        self.used_gradient = self.grad
        self.changed_values = self.data
        self.changed_at = next(node_numbers)

    def describe(self) -> str:
        """Say which elements of the model these are; "" in a serial model."""
        return "" if self.placement is None else self.placement.describe()

    def zero_grad(self) -> None:
        """Set the gradient to None; the next backward overwrites its buffer."""
        self.grad = None
        self.used_gradient = None
        for leaf in self.ties:
            leaf.grad = None


class Owner:
    """A strategy that looks after parameters.

    Optimizers call it around each update; by default it does nothing.
    """

    holds_values = True  # False if it holds only a shard of the values

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if an optimizer must not hold one of these parameters."""

    def check_sum(self, parameters: Sequence[Parameter], group: Any, is_complete: bool) -> None:
        """Raise UsageError if data parallelism must not sum the gradients of these parameters over `group`.

        `is_complete` says whether it adds the terms that this strategy leaves on other ranks before.
        """

    def sum_gradients(self) -> Sequence[Parameter] | None:
        """Sum the gradients over data-parallel ranks, before their norm; return what holds the sums, if it does."""

    def before_mean_loss(self) -> None:
        """Raise RuntimeError if a script must not train on a rank's own mean, `Module.loss`."""

    def before_step(self, parameters: Sequence[Parameter]) -> None:
        """Complete the gradients of an optimizer's parameters. RuntimeError if they are not ready."""

    def after_step(self) -> None:
        """Make the updated values visible wherever they are used."""

    def forget_gradients(self) -> None:
        """Forget the gradients that the strategy itself keeps."""


def owners_of(parameters: Iterable[Parameter]) -> list[Owner]:
    """Return the distinct owners of the parameters, in the order of the parameters."""
    found: list[Owner] = []
    for parameter in parameters:
        for owner in parameter.owners:
            if owner not in found:
                found.append(owner)
    return found


def check_holds_values(parameters: Iterable[Parameter], remedy: str) -> None:
    """Raise ValueError if this rank holds only shards of these parameters."""
    if not all(owner.holds_values for owner in owners_of(parameters)):
        raise ValueError(f"this rank holds shards of the parameters: {remedy}")


def zero_grad(parameters: Sequence[Parameter]) -> None:
    """Forget the gradients of these parameters, and those that their owners keep."""
    for parameter in parameters:
        parameter.zero_grad()
    for owner in owners_of(parameters):
        owner.forget_gradients()


def check_names(parameters: Sequence[Parameter]) -> None:
    """Raise UsageError if two parameters are drawn by one name: their initial values would be the same."""
    seen: dict[tuple[int, str], Parameter] = {}
    for parameter in parameters:
        if parameter.drawn_by is None:
            continue
        first = seen.setdefault(parameter.drawn_by, parameter)
        if first is not parameter:
            seed, name = parameter.drawn_by
            two = f'two parameters are drawn by the name "{name}" and seed {seed}, and so start alike'
            raise UsageError(f"{two}: give each layer a name of its own")
