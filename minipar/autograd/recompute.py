"""Recompute: a block that keeps only its inputs, and that backward runs again.

NB: activation checkpointing; torch.utils.checkpoint.checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any

from minipar.autograd.modes import grad_enabled, no_grad, randomness
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, setting


class _Checkpoint(Function):
    widens = False

    def forward(self, function: Callable[..., Tensor], arity: int, *arrays: Array) -> Array:
        # Only the function's own inputs are kept; parameters are listed as inputs so that they count as used here.
        inputs = arrays[:arity]
        self.save_for_backward(function=function, inputs=inputs)
        self.randomness = randomness.get()
        with no_grad():
            return function(*[Tensor(array) for array in inputs]).data

    def backward(self, grad: Array, function: Callable[..., Tensor], inputs: Sequence[Array]) -> Any:
        needs = self.needs[2 : 2 + len(inputs)]
        tensors = [Tensor(array, need) for array, need in zip(inputs, needs, strict=True)]
        with setting(randomness, self.randomness), setting(grad_enabled, True):  # even inside `no_grad`
            output = function(*tensors)
        output.backward(grad)  # parameters receive their gradients in here
        gradients = [tensor.grad for tensor in tensors]
        parameters = len(self.needs) - 2 - len(inputs)
        return (None, None, *gradients, *[None] * parameters)


def checkpoint(function: Callable[..., Tensor], *inputs: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
    """Compute `function(*inputs)` and keep only `inputs`; backward runs the function again (Chen et al. 2016).

    The second run computes the same bits, with the same dropout masks. NB: recompute, or activation checkpointing.
    `parameters` are the leaves that `function` uses besides `inputs`. They are listed so that no gradient hook runs
    before this block's backward, and so that the result requires a gradient even if no input does.
    """
    return _Checkpoint.apply(function, len(inputs), *inputs, *parameters)
