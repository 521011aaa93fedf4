"""Parameter and Module: names, traversal, loss, state_dict. The smallest part of torch.nn that a GPT needs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minipar.autograd import IGNORE_INDEX, Tensor
from minipar.autograd.backward import node_numbers
from minipar.backend import Array, from_host, to_host, xp
from minipar.nn.guards import array_of, check_state, listed, refuse_set


def placeholder(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a read-only NaN of this shape, in one element's memory: a parameter's data while it has no values here."""
    return xp.broadcast_to(xp.full((), np.nan, dtype=dtype), shape)


class Updating(Protocol):
    """An optimizer as an Owner sees it: its learning rate, and the number of steps that it has taken."""

    lr: float
    steps: int


class Owner:
    """A strategy that looks after parameters. Optimizers call it around each update; by default it does nothing."""

    sharded = False  # whether this rank holds only a shard of each parameter's gradient
    holds_values = True  # False if it holds only a shard of the values
    wrapper = ""  # the name of the data-parallel strategy that has wrapped the model, if it is one's

    def check(self, parameters: "Sequence[Parameter]") -> None:
        """Raise ValueError if an optimizer must not hold one of these parameters."""

    def before_step(self, optimizer: Updating, parameters: "Sequence[Parameter]") -> None:
        """Complete the gradients of an optimizer's parameters, or raise RuntimeError if they are not ready."""

    def after_step(self) -> None:
        """Make the updated values visible wherever they are used."""

    def forget_gradients(self) -> None:
        """Forget the gradients that the strategy itself keeps."""

    def watch_mean(self, loss: Tensor) -> Tensor:
        """Return the loss of `Module.loss`; its backward may refuse what it would train."""
        return loss

    def check_sum(self, group: Any) -> None:
        """Raise ValueError if an optimizer must not sum these gradients over this group."""


class Parameter(Tensor):
    """A leaf that is trained. `data` is its values, or a placeholder until `materialize` or `move_to` calls `make`.

    With such deferred values a model may exceed a rank's memory. NB: PyTorch puts them on its meta device.

    `ties` are leaves that read the same values but collect gradients of their own, as GPT-2's output head of `wte`. In
    a pipeline the two gradients arise on different ranks; so on one device too they stay apart until the step.
    """

    __slots__ = (
        "changed_at", "changed_values", "decays", "drawn_by", "make", "owners", "placement", "ties", "used_gradient"
    )  # fmt: skip

    def __init__(self, data: Array, make: Callable[[], Array] | None = None, deferred: bool = True) -> None:
        super().__init__(data, requires_grad=True)
        self.make = make  # computes deferred values; None when the values are here
        self.decays = self.ndim >= 2  # whether weight decay applies
        self.drawn_by: tuple[int, str] | None = None  # seed and name, if its initial values are random
        self.ties: list[Tensor] = []
        self.placement: Any = None  # a strategy's record of where the elements are
        self.owners: list[Owner] = []  # strategies, in the order in which they came; none in a serial model
        # What the last step did, so that a gradient that is used again, or a graph that is too old, is refused.
        self.used_gradient: Array | None = None
        self.changed_values: Array | None = None
        self.changed_at = -1
        if not deferred:
            self.materialize()

    def materialize(self) -> None:
        """Compute deferred values, in an array of their own."""
        if self.make is not None:
            self.data, self.make = self.make(), None

    def map_value(self, shape: tuple[int, ...], function: Callable[[Array], Array]) -> None:
        """Replace the value by `function(value)`, of this shape, such as a rank's slice. Deferred values stay so."""
        if (make := self.make) is None:
            self.data = function(self.data)
        else:
            self.data, self.make = placeholder(shape, self.dtype), lambda: function(make())

    def move_to(self, place: Array) -> None:
        """Move the values into `place`, such as a part of flat storage. Deferred values are computed there."""
        place[...] = self.data if self.make is None else self.make()
        self.data, self.make = place, None

    def tie(self) -> Tensor:
        """Return a new leaf with this parameter's values and a gradient of its own."""
        leaf = Tensor(self.data, requires_grad=True)
        self.ties.append(leaf)
        return leaf

    def fold_tied_gradients(self) -> None:
        """Add the ties' gradients to this one and clear them, so that a second call adds nothing."""
        for leaf in self.ties:
            if leaf.grad is not None and self.requires_grad:
                self.accumulate(leaf.grad)
            leaf.grad = None

    def note_update(self) -> None:
        """Note that an optimizer has used the gradient and changed the values."""
        self.used_gradient, self.changed_values = self.grad, self.data
        self.changed_at = next(node_numbers)

    def describe(self) -> str:
        """Say which elements of the model these are; "" in a serial model."""
        return "" if self.placement is None else self.placement.describe()

    def zero_grad(self) -> None:
        """Set the gradient to None; the next backward overwrites its buffer."""
        self.grad = self.used_gradient = None
        for leaf in self.ties:
            leaf.grad = None


def owners_of(parameters: Iterable[Parameter]) -> list[Owner]:
    """Return the distinct owners of the parameters, in the order of the parameters."""
    return list({id(owner): owner for p in parameters for owner in p.owners}.values())


def zero_grad(parameters: Sequence[Parameter]) -> None:
    """Forget the gradients of these parameters, and those that their owners keep."""
    for parameter in parameters:
        parameter.zero_grad()
    for owner in owners_of(parameters):
        owner.forget_gradients()


class Module:
    """A callable with parameters: its attributes that are Parameters or Modules, or lists, tuples, dicts of these.

    Lists, tuples and dicts may be nested. A set has no order, and is refused.
    """

    split_over: tuple[tuple[str, tuple[int, ...]], ...] = ()  # the strategies that have split it, and their ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} does not define forward")

    def loss_sum(self, x: Any, y: Any) -> Tensor:
        """Return the loss of inputs x and targets y, summed over the targets. Each model defines its own."""
        why = "does not define loss_sum(x, y): minipar divides the sum over all ranks by the global count of targets"
        raise TypeError(f"{type(self).__name__} {why}, so a model defines the summed loss")

    def target_count(self, y: Any) -> int:
        """Return the number of targets that `loss_sum` adds up: all elements of y but IGNORE_INDEX among integers."""
        return int((y != IGNORE_INDEX).sum()) if y.dtype.kind in "iu" else y.size

    def loss(self, x: Any, y: Any) -> Tensor:
        """Return the mean loss over the targets that count."""
        y = array_of("targets", y)
        mean = self.loss_sum(x, y) * (1 / max(1, self.target_count(y)))
        for owner in owners_of(self.parameters()):
            mean = owner.watch_mean(mean)
        return mean

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) pairs; names are joined by dots, as in `h.0.attn.c_attn.weight`."""
        for name, item in self._items():
            if isinstance(item, Parameter):
                yield prefix + name, item
            else:
                yield from item.named_parameters(f"{prefix}{name}.")

    def named_modules(self, prefix: str = "") -> "Iterator[tuple[str, Module]]":
        """Yield (name, module) of this module, whose name is "", and of all modules inside it, as `h.0.attn`."""
        yield prefix.removesuffix("."), self
        for name, item in self._items():
            if isinstance(item, Module):
                yield from item.named_modules(f"{prefix}{name}.")

    def set_submodule(self, name: str, module: "Module") -> None:
        """Replace the module of this name, such as `h.0.attn.c_attn`. NB: torch.nn.Module has the same."""
        holder, _, attribute = name.rpartition(".")
        holders = dict(self.named_modules())
        vars(holders[holder])[attribute] = module

    def _items(self) -> "Iterator[tuple[str, Parameter | Module]]":
        """Yield the parameters and modules among the attributes, and in lists, tuples and dicts among them."""
        for name, value in vars(self).items():
            yield from _items_of(name, value)

    def parameters(self) -> list[Parameter]:
        """Return every parameter once, in the order of `named_parameters`."""
        return list(dict.fromkeys(parameter for _, parameter in self.named_parameters()))

    def zero_grad(self) -> None:
        """Forget all gradients, and those that the parameters' owners keep."""
        zero_grad(self.parameters())

    def materialize(self) -> None:
        """Compute the values of all parameters that are still deferred."""
        for parameter in self.parameters():
            parameter.materialize()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter as a host array. ValueError if the values are elsewhere (ZeRO stage 3)."""
        if not all(owner.holds_values for owner in owners_of(self.parameters())):
            raise ValueError("this rank holds shards of the parameters: all ranks call the wrapper's state_dict()")
        return {name: np.array(to_host(p.data), order="C") for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy `state` into the parameters. ValueError, and no change, for other names or shapes (`check_shapes`)."""
        if not all(owner.holds_values for owner in owners_of(self.parameters())):
            raise ValueError("this rank holds shards of the parameters: load the state before wrapping the model")
        check_state(state, len(self.parameters()))
        self.check_shapes({name: tuple(array.shape) for name, array in state.items()})
        for name, parameter in self.named_parameters():
            parameter.data[...] = from_host(np.ascontiguousarray(state[name], dtype=parameter.dtype))

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError if these names or shapes are not the parameters'; it shows shapes and the first names."""
        own = {name: parameter.shape for name, parameter in self.named_parameters()}
        wrong = [name for name in own if name in shapes and shapes[name] != own[name]]
        problems = [f"{name} has shape {shapes[name]}, expected {own[name]}" for name in wrong]
        problems += listed("unexpected", [name for name in shapes if name not in own])
        problems += listed("missing", [name for name in own if name not in shapes])
        if problems:
            raise ValueError("; ".join(problems))


def _items_of(name: str, value: Any) -> Iterator[tuple[str, Parameter | Module]]:
    """Yield what a value is or holds: a parameter, a module, or those in lists, tuples and dicts, also nested ones."""
    if isinstance(value, Parameter | Module):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _items_of(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _items_of(f"{name}.{i}", item)
    elif isinstance(value, set | frozenset) and any(isinstance(item, Parameter | Module) for item in value):
        refuse_set(name)


@dataclass
class Part:
    """A piece of a model (embedding, block or head): pipelines cut between parts, ZeRO stage 3 gathers part by part."""

    name: str
    run: Callable[[Any], Tensor]  # takes the output of the part before
    parameters: list[Parameter]  # the part reads these
    reads_in_backward: bool = True  # False if backward needs no parameter's values, as for a lookup in the embedding
    is_last: bool = False  # True for the head, whose backward follows its forward at once
