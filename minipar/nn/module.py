"""Module: parameters by name, its loss and its state, and Segment, a piece of a model.

This is the smallest part of torch.nn that a GPT needs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar.autograd.checks import IGNORE_INDEX
from minipar.autograd.tensor import Tensor
from minipar.backend import Array, from_host, to_host, xp
from minipar.nn.parameter import Parameter, owners_of, zero_grad


def array_of(batch: Any) -> Array:
    """Return a batch as an array, on the host or on the device; a list or a tensor of torch is copied.

    An operation copies a host array to the device. TypeError for a Tensor.
    """
    return batch if isinstance(batch, xp.ndarray) else np.asarray(batch)


class Module:
    """A callable with parameters: its attributes that are Parameters or Modules, or lists, tuples, dicts of these.

    Lists, tuples and dicts may be nested. NB: a set has no order, so its members are not found.
    """

    # (strategy, world ranks) for each strategy that has split the module.
    split_over: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __repr__(self) -> str:
        """List the modules and the parameters' shapes as a tree."""
        lines = [type(self).__name__]
        for name, item in _items(vars(self)):
            text = repr(item)
            if isinstance(item, Parameter):
                text = str(item.shape)
            text = text.replace("\n", "\n  ")  # two more columns
            lines.append(f"  {name}: {text}")
        return "\n".join(lines)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def loss_sum(self, x: Array, y: Array) -> Tensor:
        """Return the loss of inputs x and targets y, summed over the targets.

        Each model defines its own.
        """
        raise NotImplementedError("define loss_sum(x, y), the loss summed over the targets, on the model")

    def target_count(self, y: Array) -> int:
        """Return the number of targets that `loss_sum` adds up.

        They are all elements of y, but for IGNORE_INDEX among integers.
        """
        if y.dtype.kind in "iu":
            return int((y != IGNORE_INDEX).sum())
        return int(y.size)

    def loss(self, x: Array, y: Array) -> Tensor:
        """Return the mean loss over the targets that count."""
        for owner in owners_of(self.parameters()):
            owner.before_mean_loss()
        y = array_of(y)
        return self.loss_sum(x, y) * (1 / max(1, self.target_count(y)))

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) pairs; names are joined by dots, as in `h.0.attn.c_attn.weight`."""
        for name, item in _items(vars(self)):
            if isinstance(item, Parameter):
                yield prefix + name, item
            else:
                yield from item.named_parameters(f"{prefix}{name}.")

    def named_modules(self, prefix: str = "") -> "Iterator[tuple[str, Module]]":
        """Yield (name, module) of this module, whose name is "", and of all inside it, as `h.0.attn`."""
        yield prefix.removesuffix("."), self
        for name, item in _items(vars(self)):
            if isinstance(item, Module):
                yield from item.named_modules(f"{prefix}{name}.")

    def set_submodule(self, name: str, module: "Module") -> None:
        """Replace the module of this name, such as `h.0.attn.c_attn`. NB: torch.nn.Module has the same."""
        holder, _, attribute = name.rpartition(".")
        holders = dict(self.named_modules())
        vars(holders[holder])[attribute] = module

    def parameters(self) -> list[Parameter]:
        """Return every parameter once, in the order of `named_parameters`."""
        return list(dict.fromkeys(parameter for _, parameter in self.named_parameters()))

    def zero_grad(self) -> None:
        """Forget all gradients, and those that the parameters' owners keep."""
        zero_grad(self.parameters())

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter as a host array.

        ValueError if the values are elsewhere (ZeRO stage 3). On a rank of a pipeline the parameters of
        other ranks are NaN: `gather_state` collects them.
        """
        if not all(owner.holds_values for owner in owners_of(self.parameters())):
            raise ValueError(
                "this rank holds shards of the parameters: call "
                "mp.gather_state(model, wrapper.parameters(), comm)"
            )
        return {name: to_host(p.data).copy() for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy `state` into the parameters.

        ValueError, and no change, for other names or shapes than the parameters'. What is missing has
        the shape None.
        """
        parameters = dict(self.named_parameters())
        expected = {name: parameter.shape for name, parameter in parameters.items()}
        found = {name: tuple(array.shape) for name, array in state.items()}
        for name in [*expected, *found]:
            shape = found.get(name)
            if shape != expected.get(name):
                raise ValueError(f"{name} has shape {shape}, expected {expected.get(name)}")
        for name, parameter in parameters.items():
            parameter.data[...] = from_host(array_of(state[name]))


def _items(values: Mapping[str, object]) -> Iterator[tuple[str, Parameter | Module]]:
    """Yield the parameters and modules among these values, and in lists, tuples and dicts among them."""
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Parameter | Module):
            yield name, value
        elif isinstance(value, dict):
            yield from _items({f"{name}.{key}": item for key, item in value.items()})


@dataclass
class Segment:
    """A piece of a model: the embedding, a block or the head.

    Pipelines cut between segments, and ZeRO stage 3 gathers segment by segment.
    """

    name: str
    run: Callable[[Any], Tensor]  # takes the output of the segment before
    parameters: list[Parameter]  # the segment reads these
    # False if backward needs no parameter's values, as for a lookup in the embedding.
    reads_in_backward: bool = True
    is_last: bool = False  # True for the head, whose backward follows its forward at once
