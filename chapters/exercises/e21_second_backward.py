"""Exercise 21 (chapter 1): a second backward.

A training step may run backward several times, and several losses may share a part of their graph. Write `backward`
with PyTorch's rules:

- The gradients of *leaves* add up over all passes. A tensor that was computed starts each pass from 0, and sends only
  what it has received in this pass.
- A pass frees what it has used: it calls `free()` of every computed tensor that it visits, unless it was called with
  retain_graph=True.
- A pass that would reach a freed tensor raises a ValueError, and no gradient has changed then.

Each tensor has `inputs`, the tensors that it was computed from; `rules`, a function from its gradient to that of each
input; `number`, which is larger than those of its inputs; `grad`, 0.0 at first; and `freed`.

Graded with whole values and ==: the gradients of the leaves after one pass and after several, of graphs with shared
parts and of one with 5000 operations; what is freed; what is refused, and that a refusal changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

Rules = tuple[Callable[[float], float], ...]


class Small:
    """A value, the tensors that it was computed from, and a rule from its gradient to that of each of them."""

    numbers = itertools.count()

    def __init__(self, data: float, inputs: tuple[Small, ...] = (), rules: Rules = ()) -> None:
        self.data, self.inputs, self.rules = data, inputs, rules
        self.number = next(self.numbers)
        self.grad = 0.0
        self.freed = False

    def __add__(self, other: Small) -> Small:
        return Small(self.data + other.data, (self, other), (lambda g: g, lambda g: g))

    def __mul__(self, other: Small) -> Small:
        return Small(self.data * other.data, (self, other), (lambda g: g * other.data, lambda g: g * self.data))

    def free(self) -> None:
        """Throw the rules away, and with them what they keep. `inputs` stay."""
        self.rules, self.freed = (), True


def backward(root: Small, gradient: float, retain_graph: bool = False) -> None:
    """Add to the gradient of each leaf below `root` what this pass sends to it."""
    raise NotImplementedError("your code")
