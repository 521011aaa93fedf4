"""Tensor, Function, and a backward pass without recursion.

A Function keeps forward and backward side by side. Calling `SomeFunction.apply(...)` computes the forward result and,
if any input needs a gradient, records a node: the function, and for each input the edge along which its gradient goes
on. Nodes are numbered as they are made, so every input of a node has a smaller number than the node itself; going
through the numbers from large to small is therefore a topological order, and backward is a plain loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minipar.autograd.modes import LazyGradient, backward_pass, close_use, deferral, grad_enabled, open_uses
from minipar.backend import Array, xp
from minipar.memory import hold, is_recording

_number = itertools.count()


class Function:
    """One differentiable operation; the instance made by `apply` is the node of the graph.

    Subclasses write `forward(self, *inputs) -> array` (Tensor arguments arrive as arrays; keep what backward needs on
    `self`) and `backward(self, grad) -> gradient or tuple of gradients`, one for each input, None where there is none.
    A gradient may be a LazyGradient. `needs[i]` says whether input i wants one. The array passed to backward may be
    shared: read it, never write it.
    """

    edges: tuple[Function | Tensor | None, ...]
    needs: tuple[bool, ...]
    number: int

    def forward(self, *inputs: Any) -> Array:
        raise TypeError(f"{type(self).__name__} does not define forward")

    def backward(self, grad: Array) -> Any:
        raise TypeError(f"{type(self).__name__} does not define backward")

    def at_backward(self, i: int, array: Array) -> Callable[[], Array]:
        """For `forward` to keep instead of `array`, its input i, when that may be a parameter: asks the leaf for its
        numbers when backward needs them.

        Between forward and backward a parameter may be freed and come back elsewhere (ZeRO stage 3, FSDP): a node that
        kept the array would keep its memory too.
        """
        edge = self.edges[i]
        return (lambda: edge.data) if isinstance(edge, Tensor) else (lambda: array)

    @classmethod
    def apply(cls, *inputs: Any) -> Tensor:
        """Compute forward; record a node unless gradients are off or no input needs one."""
        node = cls()
        recording = grad_enabled.get()
        node.needs = tuple(recording and isinstance(x, Tensor) and x.requires_grad for x in inputs)
        # An edge leads to the producer of an input, not to the input: its data may be freed as soon as nobody saved it.
        node.edges = tuple(
            (x if x.node is None else x.node) if need else None for x, need in zip(inputs, node.needs, strict=True)
        )
        output = Tensor(node.forward(*(x.data if isinstance(x, Tensor) else x for x in inputs)))
        if is_recording():
            hold("activations", output.data, *vars(node).values())
        if any(node.needs):
            node.number = next(_number)
            output.node = node
            output.requires_grad = True
        return output


class Tensor:
    """An array with a gradient.

    `grad` is None until a backward pass reaches the tensor. A leaf may own a `grad_buffer` (a view into flat storage):
    gradients are then written there, and `grad` is that buffer. Arithmetic is defined in `ops.py`.
    """

    __slots__ = ("__weakref__", "_hooks", "data", "grad", "grad_buffer", "node", "requires_grad")
    __array_ufunc__ = None  # `numpy_array * tensor` must reach Tensor.__rmul__, not loop over elements

    def __init__(self, data: Array, requires_grad: bool = False) -> None:
        # NumPy's reductions and 0-d arithmetic give scalars; CuPy's give 0-d arrays, as we do.
        self.data: Array = np.asarray(data) if isinstance(data, np.generic) else data
        self.requires_grad = requires_grad
        self.grad: Array | None = None
        self.grad_buffer: Array | None = None
        self.node: Function | None = None
        self._hooks: list[Callable[[Tensor], None]] = []

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
    def dtype(self) -> Any:
        return self.data.dtype

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}{', requires_grad=True' if self.requires_grad else ''})"

    def __len__(self) -> int:
        return len(self.data)

    def item(self) -> float:
        """The value of a tensor of one element, as a Python number."""
        return self.data.item()

    def detach(self) -> Tensor:
        """The same data outside the graph."""
        return Tensor(self.data)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call `hook(self)` in each backward pass through operations that use this leaf, once, when its gradient is
        complete (all its uses have been counted).

        Returns a function that removes the hook. PyTorch's name; there it fires after each accumulation.
        """
        if self.node is not None:
            raise ValueError("hooks are for leaves: this tensor was computed by " + type(self.node).__name__)
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook)

    def backward(self, gradient: Array | None = None) -> None:
        """Add d(self)/d(leaf), times `gradient` (default 1, for a tensor of one element), to `grad` of every leaf
        below.

        The graph is consumed: what forward saved is freed as the pass goes through it. Raises ValueError for a tensor
        without a graph, a missing or misshapen `gradient`, and for a second backward through the same graph.
        """
        if gradient is None:
            if self.size != 1:
                raise ValueError(f"backward() without a gradient needs one element, but the shape is {self.shape}")
            gradient = xp.ones_like(self.data)
        if gradient.shape != self.shape:
            raise ValueError(f"gradient of shape {gradient.shape} for a tensor of shape {self.shape}")
        if not self.requires_grad:
            raise ValueError("backward() on a tensor that does not require a gradient")
        if self.node is None:
            self._accumulate(gradient)
            return
        with backward_pass():
            _run_backward(self.node, gradient)

    def _accumulate(self, contribution: Array | LazyGradient) -> None:
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

    # Arithmetic: one line each, the operation itself is in ops.py.
    def __add__(self, other: Any) -> Tensor:
        return ops.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return ops.add(self, other)

    def __sub__(self, other: Any) -> Tensor:
        return ops.sub(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return ops.sub(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return ops.mul(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return ops.mul(self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return ops.div(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return ops.div(other, self)

    def __neg__(self) -> Tensor:
        return ops.mul(self, -1)

    def __pow__(self, exponent: float) -> Tensor:
        return ops.power(self, exponent)

    def __matmul__(self, other: Any) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return ops.matmul(other, self)

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index)

    def reshape(self, *shape: int) -> Tensor:
        return ops.reshape(self, shape)

    def transpose(self, *axes: int) -> Tensor:
        """Permute the dims (all of them reversed when none is named)."""
        return ops.transpose(self, axes or tuple(reversed(range(self.ndim))))

    def sum(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        return ops.sum(self, dim, keepdims)

    def mean(self, dim: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
        return ops.mean(self, dim, keepdims)

    def max(self, dim: int | None = None, keepdims: bool = False) -> Tensor:
        return ops.max(self, dim, keepdims)

    def exp(self) -> Tensor:
        return ops.exp(self)

    def log(self) -> Tensor:
        return ops.log(self)

    def tanh(self) -> Tensor:
        return ops.tanh(self)


def _reachable(root: Function) -> tuple[list[Function], dict[Tensor, int]]:
    """All nodes from `root` down, inputs before users, and how many edges lead to each leaf."""
    nodes, stack = {root}, [root]
    uses: dict[Tensor, int] = {}
    while stack:
        node = stack.pop()
        if not hasattr(node, "edges"):
            raise ValueError("backward() a second time through the same graph: its saved arrays are already freed")
        for edge in node.edges:
            if isinstance(edge, Tensor):
                uses[edge] = uses.get(edge, 0) + 1
            elif edge is not None and edge not in nodes:
                nodes.add(edge)
                stack.append(edge)
    return sorted(nodes, key=lambda node: node.number), uses


def _run_backward(root: Function, gradient: Array) -> None:
    """Send `gradient` down from `root`.

    `uses` counts the edges to each leaf that are still to come (modes.close_use runs the hooks at zero); `queue` takes
    the weight gradients when they are to wait (modes.defer_weight_gradients).
    """
    nodes, found = _reachable(root)
    # A backward inside a backward (recompute) adds its uses to the outer pass's count, which already holds the
    # checkpointed call's own use of each parameter: so a parameter is complete, and its hooks fire, only when every use
    # everywhere is done.
    outer = open_uses.get()
    uses: dict[Tensor, int] = {} if outer is None else outer
    for leaf, count in found.items():
        uses[leaf] = uses.get(leaf, 0) + count
    del found
    token = open_uses.set(uses)
    queue = deferral.get()
    gradients: dict[Function, Array] = {root: gradient}
    owned: set[Function] = (
        set()
    )  # nodes whose gradient array was made here by addition, so that more can be added in place
    try:
        while nodes:
            node = nodes.pop()
            grad = gradients.pop(node, None)
            results: Sequence[Any] = (None,) * len(node.edges)
            if grad is not None:
                returned = node.backward(grad)
                results = returned if isinstance(returned, tuple) else (returned,)
                if is_recording():
                    hold("activations", *results)
            edges = node.edges
            vars(node).clear()  # frees what forward saved
            # Leaves first: an input's gradient may be on its way from other ranks still (a LazyGradient that waits),
            # and the weight's is computed meanwhile.
            for edge, result in zip(edges, results, strict=True):
                if isinstance(edge, Tensor):
                    if isinstance(result, LazyGradient) and queue is not None:
                        queue.put(edge, result, uses)
                        continue
                    if result is not None:
                        edge._accumulate(result)
                    close_use(edge, uses)
            for edge, result in zip(edges, results, strict=True):
                if isinstance(edge, Function) and result is not None:
                    result = result.compute(None) if isinstance(result, LazyGradient) else result
                    if edge not in gradients:
                        gradients[edge] = result
                    elif edge in owned:
                        gradients[edge] += result
                    else:
                        gradients[edge] = gradients[edge] + result
                        owned.add(edge)
    finally:
        open_uses.reset(token)


from minipar.autograd import ops  # noqa: E402  (ops needs the classes above; Tensor's methods need ops only when called)
