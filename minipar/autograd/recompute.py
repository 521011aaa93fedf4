"""Recompute: a block that keeps only its inputs, and that backward runs again.

NB: activation checkpointing; torch.utils.checkpoint.checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any

from minipar.autograd.tensor import Function, Tensor, grad_enabled, no_grad, randomness
from minipar.backend import Array, setting


class _Checkpoint(Function):
    widens = False

    def forward(self, function: Callable[..., Tensor], arity: int, *arrays: Array) -> Array:
        # Only the function's own inputs are kept; parameters are listed as inputs so that they count as used here.
        self.function, self.inputs = function, arrays[:arity]
        self.randomness = randomness.get()
        with no_grad():
            return function(*(Tensor(array) for array in self.inputs)).data

    def backward(self, grad: Array) -> Any:
        arity, total = len(self.inputs), len(self.needs)
        inputs = [Tensor(x, need) for x, need in zip(self.inputs, self.needs[2 : 2 + arity], strict=True)]
        with setting(randomness, self.randomness), setting(grad_enabled, True):  # even inside `no_grad`
            output = self.function(*inputs)
        output.backward(grad)  # parameters receive their gradients in here
        return (None, None, *(x.grad for x in inputs), *(None,) * (total - 2 - arity))


def checkpoint(function: Callable[..., Tensor], *inputs: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
    """Compute `function(*inputs)` and keep only `inputs`; backward runs the function again (Chen et al. 2016).

    The second run computes the same bits, with the same dropout masks. NB: recompute, or activation checkpointing.
    `parameters` are the leaves that `function` uses besides `inputs`. They are listed so that no gradient hook runs
    before this block's backward, and so that the result requires a gradient even if no input does.
    """
    return _Checkpoint.apply(function, len(inputs), *inputs, *parameters)
