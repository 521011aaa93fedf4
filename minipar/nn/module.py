"""Parameter and Module: names, traversal, state_dict. The smallest part of torch.nn that a GPT needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from minipar.autograd import Tensor
from minipar.backend import Array, from_host, to_host


class Parameter(Tensor):
    """A leaf that is trained.

    `ties` are leaves that read the same numbers but collect a gradient of their own, as GPT-2's output head does with
    `wte`: in a pipeline the two gradients arise on different ranks, so they stay apart until the step on one device
    too, and the bits agree.
    """

    __slots__ = ("ties",)

    def __init__(self, data: Array) -> None:
        super().__init__(data, requires_grad=True)
        self.ties: list[Tensor] = []

    def tie(self) -> Tensor:
        """A new leaf with this parameter's numbers and a gradient of its own."""
        leaf = Tensor(self.data, requires_grad=True)
        self.ties.append(leaf)
        return leaf

    def fold_tied_gradients(self) -> None:
        """Add the ties' gradients to this one; they start afresh, so a second call adds nothing."""
        for leaf in self.ties:
            if leaf.grad is not None:
                self._accumulate(leaf.grad)
                leaf.grad = None

    def zero_grad(self) -> None:
        """Forget the gradient (it becomes None; the next backward overwrites its buffer)."""
        self.grad = None
        for leaf in self.ties:
            leaf.grad = None


class Module:
    """A callable with parameters, found by walking its attributes (Parameters, Modules, lists of Modules) in the order
    they were set.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} does not define forward")

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """(name, parameter) pairs, names joined by dots: `h.0.attn.c_attn.weight`."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value.named_parameters(f"{prefix}{name}.")
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield from item.named_parameters(f"{prefix}{name}.{i}.")

    def parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.zero_grad()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Every parameter as a host array that later training does not change."""
        return {name: np.array(to_host(p.data), order="C") for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy `state` into the parameters, in their dtype and place. Names and shapes must match exactly, else
        ValueError naming every difference, with nothing changed."""
        own = dict(self.named_parameters())
        problems = [f"missing {name}" for name in own if name not in state]
        problems += [f"unexpected {name}" for name in state if name not in own]
        problems += [
            f"{name} has shape {tuple(state[name].shape)}, expected {p.shape}"
            for name, p in own.items()
            if name in state and tuple(state[name].shape) != p.shape
        ]
        if problems:
            raise ValueError("; ".join(problems))
        for name, parameter in own.items():
            parameter.data[...] = from_host(np.ascontiguousarray(state[name], dtype=parameter.dtype))
