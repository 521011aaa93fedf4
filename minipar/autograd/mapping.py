"""A function of an array and its adjoint as one node: where strategies send, or start an action."""

from collections.abc import Callable

from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array

ArrayFunction = Callable[[Array], Array]


class Mapping(Function):
    """The node of `mapping`."""

    def forward(self, x: Array, function: ArrayFunction, adjoint: ArrayFunction) -> Array:
        self.save_for_backward(adjoint=adjoint)
        return function(x)

    def backward(self, grad: Array, adjoint: ArrayFunction) -> tuple[Array, None, None]:
        return adjoint(grad), None, None


def mapping(x: Tensor | Array, function: ArrayFunction, adjoint: ArrayFunction) -> Tensor:
    """Apply `function`; backward applies `adjoint`."""
    return Mapping.apply(x, function, adjoint)
