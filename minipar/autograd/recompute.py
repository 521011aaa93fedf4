"""Recompute: a block that keeps only its inputs, and that backward runs again.

NB: activation checkpointing; torch.utils.checkpoint.checkpoint.
"""

from collections.abc import Callable, Sequence

from minipar.autograd.backward import node_numbers, reachable
from minipar.autograd.rules import Gradients
from minipar.autograd.tensor import Function, Tensor, grad_enabled, no_grad, randomness
from minipar.backend import Array, setting


class CheckpointFunction(Function):
    """The node of `checkpoint`."""

    def forward(self, function: Callable[..., Tensor], arity: int, *arrays: Array) -> Array:
        # Only the function's own inputs are kept. The parameters after them are inputs of this
        # node, too, so that they count as used here.
        inputs = arrays[:arity]
        self.save_for_backward(function=function, inputs=inputs)
        self.randomness = randomness.get()
        with no_grad():
            output = function(*[Tensor(array) for array in inputs])
        return output.data

    def backward(
        self, grad: Array, function: Callable[..., Tensor], inputs: Sequence[Array]
    ) -> Gradients:  # fmt: skip
        needs = self.needs[2:]  # the first two inputs are `function` and `arity`
        tensors = [Tensor(array, need) for array, need in zip(inputs, needs, strict=False)]
        start = next(node_numbers)
        # The function runs with gradients even in `no_grad`.
        with setting(randomness, self.randomness), setting(grad_enabled, True):
            output = function(*tensors)
        nodes = [] if output.node is None else reachable(output.node)[0]
        for node in nodes:
            if node.number < start:
                raise ValueError(
                    f"checkpoint: the function reads a result of {node.operation_name()} from outside, "
                    "which backward would go through twice: make it an input"
                )
        output.backward(grad)  # parameters receive their gradients in here
        gradients = [tensor.grad for tensor in tensors]
        no_gradients = [None] * (len(needs) - len(inputs))  # for the parameters
        return None, None, *gradients, *no_gradients


def checkpoint(
    function: Callable[..., Tensor], *inputs: Tensor, parameters: Sequence[Tensor] = ()
) -> Tensor:  # fmt: skip
    """Compute `function(*inputs)` and keep only `inputs`; backward runs the function again.

    The second run computes the same bits, with the same dropout masks. `parameters` are the leaves
    that `function` uses besides `inputs`. They are listed so that no gradient hook runs before this
    block's backward, and so that the result requires a gradient even if no input does. NB:
    recompute, or activation checkpointing (Chen et al. 2016).
    """
    return CheckpointFunction.apply(function, len(inputs), *inputs, *parameters)
