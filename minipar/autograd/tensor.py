"""Tensor, and Function, which records the graph that a backward pass goes through.

Most operations of Tensor are rules on arrays (rules.py). An operation that does more is a Function:
it saves something cheaper than its inputs, computes a gradient later, or computes a whole block
again (recompute.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, Self

import numpy as np

import minipar.autograd.rules as rules
from minipar.autograd.backward import Node, node_numbers, run_backward, unbroadcast
from minipar.autograd.rules import Dims, Gradient, Gradients, LazyGradient
from minipar.backend import Array, on_device, setting, to_host, xp
from minipar.memory import hold

SHOWN = 8  # elements of a tensor whose values are printed; of a larger one the shape is
P = ParamSpec("P")

grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)
# Dropout sets these keys (nn/layers.py). A recomputed block draws with them again.
randomness: ContextVar[Any] = ContextVar("randomness", default=None)


def no_grad() -> AbstractContextManager[bool]:
    """Compute without recording a graph."""
    return setting(grad_enabled, False)


# A seam: each of these may return another node in the place of an operation's, which then runs on the same inputs.
node_wrappers: list[Callable[[Any, Sequence[Any]], Any]] = []


class Function(Node):
    """A differentiable operation. The instance that `apply` creates is the node of the graph.

    Subclasses write `forward(self, *inputs) -> array`, to which Tensor arguments arrive as arrays.
    It calls `save_for_backward(name=array)` with what backward needs. They also write
    `backward(self, grad, name)`, which gets what was saved, and returns the gradient or a tuple of
    gradients: one for each input, None where there is none. A gradient may be a LazyGradient
    (rules.py). `needs[i]` is True if input i needs one. Backward never changes its argument `grad`,
    which other nodes may hold, too. NB: torch.autograd.Function, where backward finds the arrays in
    ctx.saved_tensors.
    """

    forward: Callable[..., Array]

    @classmethod
    def apply(cls, *inputs: Any) -> Tensor:
        """Compute the operation, and record it in the graph."""
        return record(cls(), inputs)

    def save_for_backward(self, **saved: Any) -> None:
        """Keep these arrays for backward, which gets them under the same names."""
        self.saved = saved


def record(node: Function, inputs: Sequence[Any]) -> Tensor:
    """Run a node's forward. The result refers to the node if an input needs a gradient."""
    for wrap in node_wrappers:
        node = wrap(node, inputs)
    enabled = grad_enabled.get()
    node.needs = tuple([enabled and isinstance(x, Tensor) and x.requires_grad for x in inputs])
    sources: list[Any] = []
    for x, need in zip(inputs, node.needs, strict=True):
        if not need:
            sources.append(None)
        elif x.node is None:
            sources.append(x)  # a leaf
        else:
            sources.append(x.node)
    node.inputs = tuple(sources)
    arrays = [x.data if isinstance(x, Tensor) else on_device(x) for x in inputs]
    output = Tensor(node.forward(*arrays))
    hold("activations", output.data, *node.saved.values())
    if any(node.needs):
        node.number = next(node_numbers)
        output.node = node
        output.requires_grad = True
    return output


class Operation(Function):
    """The node of an `operation`: its rule, and the gradients of the inputs that need one."""

    def __init__(self, rule: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__()
        if "axis" in options:
            options["dim"] = options.pop("axis")  # NumPy's name of a dim
        self.rule = rule
        self.options = options
        # By input: the function, the names of what it gets besides g, and the input's shape.
        self.gradients: dict[int, tuple[Callable[..., Any], list[str], tuple[int, ...]]] = {}

    def operation_name(self) -> str:
        return self.rule.__name__.strip("_").capitalize()

    def forward(self, *inputs: Any) -> Array:
        output, *gradients = self.rule(*inputs, **self.options)
        if any(self.needs[len(gradients) :]):
            raise ValueError(
                f"{self.operation_name()} has no gradient for its last input: give a constant"
            )
        for i, gradient in enumerate(gradients):
            if not self.needs[i]:
                continue
            if not isinstance(gradient, Gradient):
                gradient = Gradient(gradient)
            self.gradients[i] = gradient.function, list(gradient.saved), inputs[i].shape
            self.saved.update(gradient.saved)
        return output

    def backward(self, grad: Array, **saved: Any) -> Gradients:
        results: list[Array | None] = [None] * len(self.needs)
        for i, (function, names, shape) in self.gradients.items():
            arrays = {name: saved[name] for name in names}
            results[i] = unbroadcast(function(grad, **arrays), shape)
        return tuple(results)


def operation(rule: Callable[P, Any]) -> Callable[P, Tensor]:
    """Make an operation on tensors from a rule on arrays.

    The rule returns its result, then for each of its inputs, in order, the gradient: a function
    from the gradient g of the result to that of the input, or a `Gradient`, which names the arrays
    that the function gets besides g. Broadcasting is undone afterwards. Inputs at the end that get
    no gradient (a dim, an index) have no function. Constants (Python numbers, arrays) may be given
    instead of tensors. Inputs are given by position; keyword arguments go to the rule as they are.
    Within a rule, one name is one array. A gradient may be lazy.
    """

    @functools.wraps(rule)
    def apply(*inputs: P.args, **options: P.kwargs) -> Tensor:
        return record(Operation(rule, options), inputs)

    return apply


class Tensor:
    """An array, and the node that computed it; a leaf's gradient is added up in `grad`.

    Operations, each with its gradient (docs/operations.md is a table of them, and of functions such
    as `concatenate`):

        x + y, x - y, x * y, x / y, -x, x ** 2, x @ y, x[index]
        exp, log, sqrt, abs, tanh, sigmoid, relu, softmax, log_softmax, sum, mean, max
        reshape, transpose, T, swapaxes, split

    y is a tensor, an array or a Python number; shapes broadcast as NumPy's. `axis` is another name
    of `dim`. A tensor of one element compares, rounds and prints as its value. `grad` is None before
    the first gradient. A leaf may have a `grad_buffer`, a view into flat storage: gradients are
    written there, and `grad` is that buffer.
    """

    __array_ufunc__ = None  # `array * tensor` must reach __rmul__, not loop over elements

    def __init__(self, data: Array, requires_grad: bool = False) -> None:
        # NumPy's reductions and 0-d arithmetic give scalars; CuPy's give 0-d arrays, as we do.
        self.data: Array = on_device(np.asarray(data) if isinstance(data, np.generic) else data)
        self.requires_grad = requires_grad
        self.grad: Array | None = None
        self.grad_buffer: Array | None = None
        self.grad_dtype = self.data.dtype  # a gradient without a buffer has this dtype
        self.node: Function | None = None
        self.hooks: list[Callable[[Any], None]] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    def __repr__(self) -> str:
        values = str(self.data.tolist()) if self.size <= SHOWN else f"shape {self.shape}"
        needs = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({values}, {self.dtype}{needs})"

    def item(self) -> float:
        """Return the value of a tensor of one element. ValueError for more elements, or none."""
        return to_host(self.data).item()

    def __float__(self) -> float:
        return float(self.item())

    def __lt__(self, other: Any) -> bool:
        return self.item() < float(other)

    def __le__(self, other: Any) -> bool:
        return self.item() <= float(other)

    def __gt__(self, other: Any) -> bool:
        return self.item() > float(other)

    def __ge__(self, other: Any) -> bool:
        return self.item() >= float(other)

    def __round__(self, digits: int | None = None) -> float:
        return round(self.item(), digits)

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        """Raise TypeError: NumPy's functions know no graph."""
        raise TypeError("a NumPy function of a Tensor: give it the array, `.data`; gradients end there")

    def __format__(self, spec: str) -> str:
        """Format the value of a tensor without dims, as in f"{loss:.3f}"; NB: as PyTorch does."""
        if self.ndim == 0:
            return format(self.item(), spec)
        return super().__format__(spec)

    def check_whole(self) -> None:
        """Do nothing: the last dim is whole. A subclass of which it is a part raises an error."""

    def detach(self) -> Tensor:
        """Return a tensor of the same data outside of the graph."""
        return Tensor(self.data)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Self], None]) -> Callable[[], None]:
        """Call `hook(self)` once in each backward pass, when all uses of this leaf are added up.

        Returns its remover. NB: PyTorch has the same name; there the hook runs after each
        accumulation.
        """
        if self.node is not None:
            raise ValueError(f"hooks are for leaves: this is the result of {self.node.operation_name()}")
        self.hooks.append(hook)
        return functools.partial(self.hooks.remove, hook)

    def backward(self, gradient: Array | None = None) -> None:
        """Add d(self)/d(leaf), times `gradient`, to `grad` of every leaf below.

        `gradient` is 1 if it is not given, for one element. The graph is consumed: what forward
        saved is freed as the pass goes through it. ValueError for a tensor without a graph, a
        missing or misshapen `gradient`, and a second backward through the same graph.
        """
        if gradient is None and self.size == 1:
            gradient = xp.ones_like(self.data)
        gradient = on_device(gradient)
        if gradient is None or gradient.shape != self.shape:
            raise ValueError(
                f"backward() of a tensor of shape {self.shape} needs a gradient of that shape"
            )
        if not self.requires_grad:
            causes = "it was computed under no_grad, from arrays (.data), or by a PipelineModule, which runs it"
            raise ValueError(f"backward() of a tensor that does not require a gradient: {causes}")
        if self.node is None:
            self.accumulate(gradient)
        else:
            run_backward(self.node, gradient)

    def accumulate(self, contribution: Array | LazyGradient) -> None:
        """Add a gradient to `grad`; the first is written into `grad_buffer`, if there is one."""
        lazy = isinstance(contribution, LazyGradient)
        if self.grad is not None:
            self.grad += contribution.compute(None) if lazy else contribution
        elif lazy:
            self.grad = contribution.compute(self.grad_buffer)
        elif self.grad_buffer is not None:
            self.grad_buffer[...] = contribution
            self.grad = self.grad_buffer
        else:
            self.grad = xp.array(contribution)  # a copy: other nodes may hold the same array
        # Flat gradient storage has been named already; this may be a gradient outside it.
        hold("buffers", self.grad)

    # Operations. The rule of each is in rules.py.

    __add__ = __radd__ = operation(rules.add)
    __sub__ = operation(rules.sub)
    __mul__ = __rmul__ = operation(rules.mul)
    __truediv__ = operation(rules.truediv)
    __matmul__ = operation(rules.matmul)
    __pow__ = operation(rules.pow)
    __getitem__ = operation(rules.getitem)

    exp = operation(rules.exp)
    log = operation(rules.log)
    sqrt = operation(rules.sqrt)
    abs = __abs__ = operation(rules.abs)
    tanh = operation(rules.tanh)
    sigmoid = operation(rules.sigmoid)
    relu = operation(rules.relu)
    softmax = operation(rules.softmax)
    log_softmax = operation(rules.log_softmax)
    sum = operation(rules.sum)
    max = operation(rules.max)
    reshape = operation(rules.reshape)
    transpose = swapaxes = operation(rules.transpose)

    @property
    def T(self) -> Tensor:
        """The tensor with all dims reversed."""
        return self.transpose()

    def mean(self, dim: Dims = None, keepdims: bool = False, axis: Dims = None) -> Tensor:
        """Return the mean over a dim, over several, or over all."""
        total = self.sum(dim if axis is None else axis, keepdims)
        return total * (total.size / self.size)

    def split(self, size: int, dim: int = 0) -> list[Tensor]:
        """Cut into parts of this size along a dim; the last may be smaller. NB: torch.Tensor.split."""
        before = (slice(None),) * (dim % self.ndim)
        starts = range(0, self.shape[dim], size)
        return [self[(*before, slice(start, start + size))] for start in starts]

    def __neg__(self) -> Tensor:
        return self * -1

    def __rsub__(self, other: Array) -> Tensor:
        return Tensor.__sub__(other, self)

    def __rtruediv__(self, other: Array) -> Tensor:
        return Tensor.__truediv__(other, self)

    def __rmatmul__(self, other: Array) -> Tensor:
        return Tensor.__matmul__(other, self)


relu = Tensor.relu  # functions, as in torch.nn.functional
softmax = Tensor.softmax
where = operation(rules.where)

ArrayFunction = Callable[[Array], Array]


class Mapping(Function):
    """The node of `mapping`."""

    def forward(self, x: Array, function: ArrayFunction, adjoint: ArrayFunction) -> Array:
        self.adjoint = adjoint
        return function(x)

    def backward(self, grad: Array) -> tuple[Array, None, None]:
        return self.adjoint(grad), None, None


def mapping(x: Tensor | Array, function: ArrayFunction, adjoint: ArrayFunction) -> Tensor:
    """Apply `function`; backward applies `adjoint`: strategies send there, or start an action."""
    return Mapping.apply(x, function, adjoint)
