"""The backward pass: a loop over the nodes of the graph, its callbacks, and weight gradients that are put off.

Nodes are numbered as they are created, so every input of a node has a smaller number than the node itself. Visiting
the numbers from large to small is therefore a topological order, and backward is a plain loop without recursion.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from minipar.autograd.guards import check_unchanged
from minipar.backend import Array, setting
from minipar.memory import hold

node_numbers = itertools.count()  # Parameters draw from it, too: when an optimizer changed them, among the nodes
Leaf = Any  # a Tensor that nothing computed, such as a parameter: the end of an edge, where gradients are added up


@dataclass
class LazyGradient:
    """A gradient as a recipe: `compute(out)` writes it into `out` (or a new array when None) and returns it.

    Layers give their weight gradients this way: straight into flat storage, or later (`defer_weight_gradients`).
    """

    compute: Callable[[Array | None], Array]


class Node:
    """One operation in the graph. `edges` has, for each input, the node or leaf that its gradient goes to, or None."""

    edges: "tuple[Node | Leaf | None, ...]"
    number: int
    part_of: int | None = None  # the whole length of the result's last dim, where the result is one rank's part of it

    def backward(self, grad: Array) -> Any:
        """Return the gradients of the inputs, given the gradient of the output."""
        raise TypeError(f"{type(self).__name__} does not define backward")

    def propagate(self, grad: Array) -> Any:
        """Run `backward` in its precision."""
        return self.backward(grad)


def unbroadcast(grad: Array | LazyGradient, shape: tuple[int, ...]) -> Array | LazyGradient:
    """Sum `grad` over the dims that broadcasting `shape` added or stretched: the adjoint of broadcasting."""
    if isinstance(grad, LazyGradient) or grad.shape == shape:
        return grad
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return grad.sum(axis=stretched, keepdims=True) if stretched else grad


def run_backward(root: Node, gradient: Array) -> None:
    """Send `gradient` from `root` down to every leaf. Each node is visited once, when its gradient is complete."""
    nodes, counts = reachable(root)
    gradients: dict[Node, Array] = {root: gradient}  # of the nodes to come, each added up over its output's users
    deferred = _deferral.get()
    with _running_pass(counts) as uses:
        while nodes:
            node = nodes.pop()  # the largest number: all users of its output are done
            edges = list(zip(node.edges, _input_gradients(node, gradients.pop(node, None)), strict=True))
            vars(node).clear()  # frees what forward saved
            # Leaves first: while an input's gradient is still on its way from other ranks (a LazyGradient that waits),
            # the weight's gradient is computed.
            for edge, result in edges:
                if edge is None or isinstance(edge, Node):
                    continue
                if deferred is not None and isinstance(result, LazyGradient):
                    deferred.append((edge, result, uses))
                else:
                    _close_use(edge, result, uses)
            for edge, result in edges:
                if isinstance(edge, Node) and result is not None:
                    if isinstance(result, LazyGradient):
                        result = result.compute(None)
                    # Not in place: others may hold the same array.
                    gradients[edge] = gradients[edge] + result if edge in gradients else result
            del edges  # frees what the next node's backward does not need


def reachable(root: Node) -> tuple[list[Node], Counter[Leaf]]:
    """Return all nodes from `root` down, inputs before users, and the number of edges that lead to each leaf."""
    nodes, stack = {root}, [root]
    uses: Counter[Leaf] = Counter()
    while stack:
        node = stack.pop()
        if not hasattr(node, "edges"):
            raise ValueError("backward() a second time through the same graph: its saved arrays are already freed")
        for edge in node.edges:
            if isinstance(edge, Node):
                if edge not in nodes:
                    nodes.add(edge)
                    stack.append(edge)
            elif edge is not None:
                check_unchanged(edge, node.number)
                uses[edge] += 1
    return sorted(nodes, key=lambda node: node.number), uses


def _input_gradients(node: Node, grad: Array | None) -> Sequence[Any]:
    """Run the node's backward; None for each input if no gradient has reached the node."""
    returned = (None,) * len(node.edges) if grad is None else node.propagate(grad)
    results = returned if isinstance(returned, tuple) else (returned,)
    hold("activations", *results)
    return results


@dataclass
class _Pass:
    """A backward pass that is running, together with the passes inside it (recompute)."""

    uses: Counter[Leaf] = field(default_factory=Counter)  # the edges to each leaf that it has not gone through yet
    callbacks: list[Callable[[], None]] = field(default_factory=list)  # run at its end


_running: ContextVar[_Pass | None] = ContextVar("running_backward", default=None)


@contextmanager
def _running_pass(counts: Counter[Leaf]) -> Iterator[Counter[Leaf]]:
    """Add these uses of leaves to the pass that is running, or start one. Yields the uses that are still to come.

    A backward inside a backward (recompute) adds to the outer pass's count, which already holds the checkpointed call's
    own use of each parameter. So a parameter's hooks run only when every use everywhere is done.
    """
    outer = _running.get()
    current = _Pass() if outer is None else outer
    current.uses.update(counts)  # adds up
    with setting(_running, current):
        yield current.uses
    if outer is None:
        for callback in current.callbacks:
            callback()


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback()` once, when the outermost backward pass that is running now ends without an error.

    Callbacks run in the order in which they were queued. Under `defer_weight_gradients` they run at the end of the half
    that queued them: the backward pass itself, or `DeferredGradients.run()`. ValueError outside of a backward pass.
    NB: PyTorch's DistributedDataParallel calls torch.autograd.Variable._execution_engine.queue_callback.
    """
    if (current := _running.get()) is None:
        raise ValueError("queue_callback: no backward pass is running; call it from a gradient hook")
    current.callbacks.append(callback)


def _close_use(leaf: Leaf, gradient: Array | LazyGradient | None, uses: Counter[Leaf]) -> None:
    """Add the gradient of one use of `leaf`; after the last use its gradient is complete and its hooks run."""
    if gradient is not None:
        leaf.accumulate(gradient)
    uses[leaf] -= 1
    if uses[leaf] == 0:
        del uses[leaf]  # or a recomputed block's input would live, with its gradient, until the outer pass ends
        for hook in leaf.hooks:
            hook(leaf)


class DeferredGradients(deque[tuple[Leaf, LazyGradient, Counter[Leaf]]]):
    """The weight gradients that backward passes have put off, each with the uses that its pass still counts."""

    def run(self) -> None:
        """Compute and accumulate every gradient in the order of the passes; hooks run as parameters become complete."""
        with _running_pass(Counter()):
            while self:
                leaf, gradient, uses = self.popleft()  # its saved activations are freed when it is done
                _close_use(leaf, gradient, uses)


_deferral: ContextVar[DeferredGradients | None] = ContextVar("deferral", default=None)


def defer_weight_gradients() -> AbstractContextManager[DeferredGradients]:
    """Compute only input gradients (kind `I`) in backward passes inside the block, and put off weight gradients (`W`).

    The `run()` of the queue that this yields computes them, in pipeline bubbles (Zero Bubble, arXiv 2401.10241, 2.1).
    """
    return setting(_deferral, DeferredGradients())
