"""Parameter: a leaf that is trained, and Owner: a strategy that looks after parameters."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd.tensor import Tensor
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
    too they stay apart until gradients are summed over ranks, or else until the step.
    """

    def __init__(self, data: Array) -> None:
        super().__init__(data, requires_grad=True)
        self.decays = self.ndim >= 2  # whether weight decay applies
        self.drawn_by: tuple[int, str] | None = None  # seed and name, if values start random
        self.ties: list[Tensor] = []
        # What strategies set; a serial model has none of it.
        self.placement: Any = None  # the record of where the elements are
        self.owners: list[Owner] = []  # the strategies, in the order in which they came
        self.used_gradient: Array | None = None  # by the last step, so that it is not used again

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
    found: dict[Owner, None] = {}  # a dict keeps the order
    for parameter in parameters:
        found |= dict.fromkeys(parameter.owners)
    return list(found)


def zero_grad(parameters: Sequence[Parameter]) -> None:
    """Forget the gradients of these parameters, and those that their owners keep."""
    for parameter in parameters:
        parameter.zero_grad()
    for owner in owners_of(parameters):
        owner.forget_gradients()


def drawn_names(parameters: Sequence[Parameter]) -> list[str]:
    """Return what decides the initial values of each parameter that is drawn: its seed and name."""
    names = [p.drawn_by for p in parameters if p.drawn_by is not None]
    return [f'the name "{name}" and seed {seed}' for seed, name in names]


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError if two parameters are drawn by one name: their initial values would be the same."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two parameters are drawn by {name}, and so start alike: give each layer a name of its own"
            )
