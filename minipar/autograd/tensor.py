"""Tensor and its operations, and Function, which records the graph that a backward pass goes through.

An operation of Tensor is one method: its rule gives the result and, next to it, the gradient of each input. An
operation that does more is a Function: it saves something cheaper than its inputs, computes a gradient later, or
computes a whole block again (recompute.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec

import numpy as np

from minipar.autograd.backward import LazyGradient, Node, node_numbers, run_backward, unbroadcast
from minipar.autograd.guards import check_one_element, check_requires_grad, dim_order
from minipar.autograd.precision import cast_floats
from minipar.backend import Array, setting, xp
from minipar.memory import hold, is_recording

SHOWN = 8  # elements of a tensor whose values are printed; of a larger one the shape is
P = ParamSpec("P")
grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)
# The keys that random operations draw from. Dropout sets them (nn/layers.py); a recomputed block draws with them again.
randomness: ContextVar[Any] = ContextVar("randomness", default=None)


def no_grad() -> AbstractContextManager[Any]:
    """Compute without recording a graph."""
    return setting(grad_enabled, False)


class Function(Node):
    """A differentiable operation. The instance that `apply` creates is the node of the graph.

    Subclasses write `forward(self, *inputs) -> array` (Tensor arguments arrive as arrays; keep what backward needs on
    `self`) and `backward(self, grad) -> gradient or tuple of gradients`, one for each input, None where there is none.
    A gradient may be a LazyGradient. `needs[i]` is True if input i needs one. Never write `grad`: it may be shared.

    With inputs of 2 bytes (bfloat16, float16) both are called with float32 arrays. Rounded to 2 bytes are the result,
    what is kept for backward but values of rows (such as a log-sum-exp), and the gradients of the inputs, but those
    that are written into a buffer. Functions that only move values set `widens` to False.
    """

    needs: tuple[bool, ...]
    narrow: Any = None  # the dtype of inputs of 2 bytes
    widens = True

    def forward(self, *inputs: Any) -> Array:
        raise TypeError(f"{type(self).__name__} does not define forward")

    def at_backward(self, i: int, array: Array) -> Callable[[], Array]:
        """Return a getter of input i, for forward to keep instead of the array if the input may be a parameter.

        ZeRO stage 3 frees a parameter between forward and backward and gathers it again in another place.
        """
        edge = self.edges[i]
        return (lambda: edge.data) if isinstance(edge, Tensor) else (lambda: array)

    @classmethod
    def apply(cls, *inputs: Any) -> Tensor:
        """Compute forward, and record a node unless gradients are off or no input needs one."""
        node = cls()
        recording = grad_enabled.get()
        node.needs = tuple(recording and isinstance(x, Tensor) and x.requires_grad for x in inputs)
        # An edge leads to the producer of an input, not to the input: its data may be freed as soon as nobody saved it.
        node.edges = tuple(
            (x if x.node is None else x.node) if need else None for x, need in zip(inputs, node.needs, strict=True)
        )
        arrays = [x.data if isinstance(x, Tensor) else x for x in inputs]
        if cls.widens:
            node.narrow = next((x.dtype for x in inputs if isinstance(x, Tensor) and x.dtype.itemsize == 2), None)
        if node.narrow is not None:
            arrays = [cast_floats(array, "float32") for array in arrays]
        output = Tensor(node.forward(*arrays))
        if node.narrow is not None and output.ndim:
            output.data = output.data.astype(node.narrow)
        if node.narrow is not None:
            node.cast(node.narrow, output.size)
        if is_recording():
            hold("activations", output.data, *node.kept_values())
        if any(node.needs):
            node.number = next(node_numbers)
            output.node = node
            output.requires_grad = True
        return output

    def kept_values(self) -> list[Any]:
        """Return what forward keeps for backward."""
        return list(vars(self).values())

    def cast(self, dtype: Any, least: int = 0) -> None:
        """Convert what forward keeps, arrays of at least so many elements, between float32 and 2 bytes."""
        vars(self).update({name: cast_floats(value, dtype, least) for name, value in vars(self).items()})

    def propagate(self, grad: Array) -> Any:
        """Run `backward`, in float32 if the inputs have 2 bytes."""
        if self.narrow is None:
            return self.backward(grad)
        self.cast("float32")
        returned = self.backward(cast_floats(grad, "float32"))
        results = returned if isinstance(returned, tuple) else (returned,)
        return tuple(self._rounded(x, edge) for x, edge in zip(results, self.edges, strict=True))

    def _rounded(self, x: Any, edge: Any) -> Any:
        """Round an input's gradient to the dtype of `edge`, but for one that is written into a buffer."""
        if getattr(edge, "grad_buffer", None) is not None:
            return x
        return cast_floats(x, getattr(edge, "grad_dtype", self.narrow))


class _Operation(Function):
    """The node of an `operation`. It keeps, for each input that needs a gradient, its function and its shape."""

    rule: Callable[..., Any]

    def forward(self, options: dict[str, Any], *inputs: Any) -> Array:
        output, *gradients = self.rule(*inputs, **options)
        gradients += [None] * (len(inputs) - len(gradients))
        self.gradients = [
            (gradient, x.shape) if need else None
            for gradient, x, need in zip(gradients, inputs, self.needs[1:], strict=True)
        ]
        return output

    def cells(self) -> list[Any]:
        """Return the variables that the gradients' functions keep."""
        closures = [entry[0].__closure__ or () for entry in self.gradients if entry]
        return list({id(cell): cell for cells in closures for cell in cells}.values())

    def kept_values(self) -> list[Any]:
        return [cell.cell_contents for cell in self.cells()]

    def cast(self, dtype: Any, least: int = 0) -> None:
        for cell in self.cells():
            cell.cell_contents = cast_floats(cell.cell_contents, dtype, least)

    def backward(self, grad: Array) -> Any:
        return (None, *(entry and unbroadcast(entry[0](grad), entry[1]) for entry in self.gradients))


def operation(rule: Callable[P, Any]) -> Callable[P, Tensor]:
    """Make an operation on tensors from a rule on arrays.

    The rule returns its result, then for each of its inputs, in order, the function from the gradient g of the result
    to that of the input. Broadcasting is undone afterwards. Inputs at the end that get no gradient (a dim, an index)
    have no function. Constants (Python numbers, arrays) may be given instead of tensors. A gradient may be lazy.
    """
    node: type[_Operation] = type(rule.__name__.strip("_").capitalize(), (_Operation,), {"rule": staticmethod(rule)})

    @functools.wraps(rule)
    def apply(*inputs: P.args, **options: P.kwargs) -> Tensor:
        return node.apply(options, *inputs)

    return apply


class _Mapping(Function):
    widens = False

    def forward(self, x: Array, function: Callable[[Array], Array], adjoint: Callable[[Array], Array]) -> Array:
        self.adjoint = adjoint
        return function(x)

    def backward(self, grad: Array) -> Any:
        return self.adjoint(grad), None, None


def mapping(x: Any, function: Callable[[Array], Array], adjoint: Callable[[Array], Array]) -> Tensor:
    """Apply `function`; backward applies `adjoint`. Strategies send activations with it, or act during backward."""
    return _Mapping.apply(x, function, adjoint)


class Tensor:
    """An array with a gradient, `grad`, which is None until a backward pass reaches the tensor.

    Operations, each with its gradient (docs/operations.md is a table of them, and of functions such as `concatenate`):

        x + y, x - y, x * y, x / y, -x, x ** 2, x @ y, x[index]
        exp, log, tanh, relu, softmax, sum, mean, max, reshape, transpose, swapaxes

    y is a tensor, an array or a Python number; shapes broadcast as NumPy's.
    A leaf may have a `grad_buffer`, a view into flat storage: gradients are written there, and `grad` is that buffer.
    """

    __slots__ = ("__weakref__", "data", "grad", "grad_buffer", "grad_dtype", "hooks", "node", "requires_grad")
    __array_ufunc__ = None  # `numpy_array * tensor` must reach Tensor.__rmul__, not loop over elements

    def __init__(self, data: Array, requires_grad: bool = False) -> None:
        # NumPy's reductions and 0-d arithmetic give scalars; CuPy's give 0-d arrays, as we do.
        self.data: Array = np.asarray(data) if isinstance(data, np.generic) else data
        self.requires_grad = requires_grad
        self.grad: Array | None = None
        self.grad_buffer: Array | None = None
        self.grad_dtype = self.data.dtype  # of a gradient without a buffer
        self.node: Function | None = None
        self.hooks: list[Callable[[Any], None]] = []

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    size = property(lambda self: self.data.size)
    dtype = property(lambda self: self.data.dtype)

    def __repr__(self) -> str:
        values = str(self.data.tolist()) if self.size <= SHOWN else f"shape {self.shape}"
        return f"{type(self).__name__}({values}, {self.dtype}{', requires_grad=True' if self.requires_grad else ''})"

    def item(self) -> float:
        """Return the value of a tensor of one element as a Python number. ValueError for more elements, or none."""
        check_one_element(self.shape, self.size)
        return self.data.item()

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        """Format the value of a tensor without dims, as in f"{loss:.3f}"; NB: as PyTorch does."""
        if self.ndim == 0:
            return format(self.item(), spec)
        return super().__format__(spec)

    def detach(self) -> Tensor:
        """Return a tensor of the same data outside of the graph."""
        return Tensor(self.data)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Callable[[], None]:
        """Call `hook(self)` once in each backward pass, when all uses of this leaf are added up. Returns its remover.

        NB: PyTorch has the same name; there the hook runs after each accumulation.
        """
        if self.node is not None:
            raise ValueError("hooks are for leaves: this tensor was computed by " + type(self.node).__name__)
        self.hooks.append(hook)
        return lambda: self.hooks.remove(hook)

    def backward(self, gradient: Array | None = None) -> None:
        """Add d(self)/d(leaf), times `gradient` (default 1, for one element), to `grad` of every leaf below.

        The graph is consumed: what forward saved is freed as the pass goes through it. ValueError for a tensor without
        a graph, a missing or misshapen `gradient`, and a second backward through the same graph.
        """
        if gradient is None:
            if self.size != 1:
                raise ValueError(f"backward() without a gradient needs one element, but the shape is {self.shape}")
            gradient = xp.ones_like(self.data)
        if gradient.shape != self.shape:
            raise ValueError(f"gradient of shape {gradient.shape} for a tensor of shape {self.shape}")
        check_requires_grad(self.requires_grad)
        if self.node is None:
            self.accumulate(gradient)
        else:
            run_backward(self.node, gradient)

    def accumulate(self, contribution: Array | LazyGradient) -> None:
        """Add a contribution to `grad`; the first one is written into `grad_buffer`, if there is one."""
        lazy = isinstance(contribution, LazyGradient)
        if self.grad is not None:
            self.grad += contribution.compute(None) if lazy else contribution
        elif lazy:
            self.grad = contribution.compute(self.grad_buffer)
        elif self.grad_buffer is not None:
            self.grad_buffer[...] = contribution
            self.grad = self.grad_buffer
        else:
            self.grad = xp.array(contribution)  # a copy: other edges may hold the same array
        hold("buffers", self.grad)  # flat gradient storage has been named already; this is a gradient outside it

    @operation
    def __add__(a: Any, b: Any) -> Any:
        return a + b, lambda g: g, lambda g: g

    @operation
    def __sub__(a: Any, b: Any) -> Any:
        return a - b, lambda g: g, lambda g: -g

    @operation
    def __mul__(a: Any, b: Any) -> Any:
        return a * b, lambda g: g * b, lambda g: g * a

    @operation
    def __truediv__(a: Any, b: Any) -> Any:
        return a / b, lambda g: g / b, lambda g: -g * a / (b * b)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Tensor:
        return Tensor.__sub__(other, self)

    def __rtruediv__(self, other: Any) -> Tensor:
        return Tensor.__truediv__(other, self)

    def __neg__(self) -> Tensor:
        return self * -1

    @operation
    def __pow__(x: Array, exponent: float) -> Any:
        """Raise to a constant power. NB: x * x is far faster than x**3 on float32 (75 times where we measured)."""
        return x**exponent, lambda g: g * (exponent * x ** (exponent - 1))

    @operation
    def exp(x: Array) -> Any:
        """Raise e to the power of each element."""
        y = xp.exp(x)
        return y, lambda g: g * y

    @operation
    def log(x: Array) -> Any:
        """Take the natural logarithm of each element."""
        return xp.log(x), lambda g: g / x

    @operation
    def tanh(x: Array) -> Any:
        """Take the hyperbolic tangent of each element."""
        y = xp.tanh(x)
        return y, lambda g: g * (1 - y * y)

    @operation
    def relu(x: Array) -> Any:
        """Replace negative elements by 0. The gradient at 0 is 0, as PyTorch's."""
        positive = x > 0
        return xp.maximum(x, 0), lambda g: g * positive

    @operation
    def softmax(x: Array, dim: int = -1) -> Any:
        """Divide e^x by its sum over a dim: positive values that add up to 1."""
        y = xp.exp(x - x.max(axis=dim, keepdims=True))
        y /= y.sum(axis=dim, keepdims=True)
        return y, lambda g: y * (g - (g * y).sum(axis=dim, keepdims=True))

    @operation
    def __matmul__(a: Array, b: Array) -> Any:
        """Multiply matrices, (..., n, k) @ (..., k, m) -> (..., n, m); the leading dims broadcast."""
        if a.ndim < 2 or b.ndim < 2:
            raise ValueError(f"matmul needs matrices, but the shapes are {a.shape} and {b.shape}")
        return xp.matmul(a, b), lambda g: xp.matmul(g, b.swapaxes(-1, -2)), lambda g: xp.matmul(a.swapaxes(-1, -2), g)

    def __rmatmul__(self, other: Array) -> Tensor:
        return Tensor.__matmul__(other, self)

    @operation
    def reshape(x: Array, *shape: int) -> Any:
        """Give the elements, in row-major order, another shape; one size may be -1, which is what is left."""
        before = x.shape
        return x.reshape(shape), lambda g: g.reshape(before)

    @operation
    def transpose(x: Array, *dims: int) -> Any:
        """Swap two dims, as PyTorch does. Permute all dims if all of three or more are named; reverse them if none is.

        ValueError for other dims. NB: NumPy's transpose(0, 1) leaves a matrix as it is, and PyTorch's swaps its dims.
        """
        order = dim_order(x.shape, dims)
        inverse = sorted(range(x.ndim), key=lambda i: order[i])
        return x.transpose(order), lambda g: g.transpose(inverse)

    @operation
    def swapaxes(x: Array, dim: int, other: int) -> Any:
        """Swap two dims."""
        return x.swapaxes(dim, other), lambda g: g.swapaxes(dim, other)

    @operation
    def __getitem__(x: Array, index: Any) -> Any:
        """Index as NumPy does: slices, integers, arrays of integers or booleans. Repeated elements add gradients up."""
        shape = x.shape

        def gradient(g: Array) -> Array:
            full = xp.zeros(shape, dtype=g.dtype)
            xp.add.at(full, index, g)
            return full

        return x[index], gradient

    @operation
    def sum(x: Array, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
        """Add up the elements over a dim, over several, or over all."""
        shape, kept = x.shape, x.sum(axis=dim, keepdims=True).shape
        return x.sum(axis=dim, keepdims=keepdims), lambda g: xp.broadcast_to(g.reshape(kept), shape)

    def mean(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        """Return the mean over a dim, over several, or over all."""
        total = self.sum(dim, keepdims)
        return total * (total.size / self.size)

    @operation
    def max(x: Array, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
        """Return the largest element over a dim, over several, or over all.

        Elements that are equally large share the gradient evenly, as in torch.amax. (torch.max(dim) gives it to one.)
        """
        top = x.max(axis=dim, keepdims=True)
        is_top = x == top
        share = (is_top / is_top.sum(axis=dim, keepdims=True)).astype(x.dtype)
        shape = top.shape
        return x.max(axis=dim, keepdims=keepdims), lambda g: g.reshape(shape) * share
