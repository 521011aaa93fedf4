"""Recompute (activation checkpointing): keep a block's input, forget what is inside, compute it again for backward.

Chen et al. 2016, arXiv 1604.06174. The second forward does the same arithmetic on the same numbers, with the same
dropout masks, so gradients are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minipar.autograd.modes import enable_grad, no_grad, randomness
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array


class _Checkpoint(Function):
    def forward(self, function: Callable[..., Tensor], arity: int, *arrays: Array) -> Array:
        # Only the function's own inputs are kept; parameters are listed as inputs so that they count as used here.
        self.function, self.inputs = function, arrays[:arity]
        self.randomness = randomness.get()
        with no_grad():
            return function(*(Tensor(array) for array in self.inputs)).data

    def backward(self, grad: Array) -> Any:
        arity, total = len(self.inputs), len(self.needs)
        inputs = [Tensor(x, need) for x, need in zip(self.inputs, self.needs[2 : 2 + arity], strict=True)]
        token = randomness.set(self.randomness)
        try:
            with enable_grad():
                output = self.function(*inputs)
        finally:
            randomness.reset(token)
        output.backward(grad)  # parameters receive their gradients in here
        return (None, None, *(x.grad for x in inputs), *(None,) * (total - 2 - arity))


def checkpoint(function: Callable[..., Tensor], *inputs: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
    """`function(*inputs)`, keeping only `inputs` until backward runs it again.

    `parameters` are the leaves that `function` uses besides `inputs`. Listing them lets gradient hooks know that the
    parameter is not complete before this block's backward, and makes the result require a gradient even when no input
    does.
    """
    return _Checkpoint.apply(function, len(inputs), *inputs, *parameters)
