"""Parameter: a leaf that is trained, and Owner: a strategy that looks after parameters."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd import Tensor
from minipar.autograd.backward import node_numbers
from minipar.autograd.tensor import node_wrappers
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

    __slots__ = (
        "changed_at", "changed_values", "decays", "drawn_by", "owners", "placement", "ties",
        "used_gradient",
    )  # fmt: skip

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


class Updating(Protocol):
    """An optimizer as an Owner sees it: its learning rate, and the number of its steps."""

    lr: float
    steps: int


class Owner:
    """A strategy that looks after parameters.

    Optimizers call it around each update; by default it does nothing.
    """

    sharded = False  # whether this rank holds only a shard of each parameter's gradient
    holds_values = True  # False if it holds only a shard of the values
    wrapper = ""  # the name of the data-parallel strategy that has wrapped the model, if it is one's

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if an optimizer must not hold one of these parameters."""

    def before_step(self, optimizer: Updating, parameters: Sequence[Parameter]) -> None:
        """Complete the gradients of an optimizer's parameters.

        Raises RuntimeError if they are not ready.
        """

    def after_step(self) -> None:
        """Make the updated values visible wherever they are used."""

    def forget_gradients(self) -> None:
        """Forget the gradients that the strategy itself keeps."""

    def watch_mean(self, loss: Tensor) -> Tensor:
        """Return the loss of `Module.loss`; its backward may refuse what it would train."""
        return loss

    def check_sum(self, group: Any) -> None:
        """Raise ValueError if an optimizer must not sum these gradients over this group."""


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
