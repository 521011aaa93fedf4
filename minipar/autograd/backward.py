"""The backward pass: a loop over the nodes of the graph, its callbacks, and weight gradients that are put off.

Nodes are numbered as they are created, so every input of a node has a smaller number than the node
itself. Visiting the numbers from large to small is therefore a topological order, and backward is a
plain loop without recursion.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from minipar.autograd.rules import Gradients, LazyGradient
from minipar.backend import Array, setting
from minipar.memory import hold

node_numbers = itertools.count()


# A Tensor (which imports this file) that nothing computed, such as a parameter: gradients are added
# up in it.
Leaf = Any


class Node:
    """A node of the graph: an operation that has run (tensor.Function), and where its inputs come from.

    For each input that needs a gradient, `inputs` has the node that computed the input, or the
    input itself if it is a leaf; None for the others. The array of a computed input is not kept: it
    is freed unless a node has saved it.
    """

    backward: Callable[..., Gradients | Array]
    number: int

    def __init__(self) -> None:
        self.inputs: tuple[Node | Leaf | None, ...] = ()
        self.needs: tuple[bool, ...] = ()  # whether each input needs a gradient
        self.saved: dict[str, Any] = {}  # what backward gets besides the gradient, by name
        self.freed = False

    def operation_name(self) -> str:
        """Return the operation's name, for errors and for lists of the graph."""
        return type(self).__name__

    def free(self) -> None:
        """Drop what forward saved. Backward goes through a node once."""
        self.saved = {}
        self.inputs = ()
        self.freed = True


def unbroadcast(grad: Array | LazyGradient, shape: tuple[int, ...]) -> Array | LazyGradient:
    """Sum `grad` over the dims that broadcasting `shape` added or stretched: the adjoint of broadcasting."""
    if isinstance(grad, LazyGradient) or grad.shape == shape:
        return grad
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1)
    return grad.sum(axis=stretched, keepdims=True)


def run_backward(root: Node, gradient: Array) -> None:
    """Send `gradient` from `root` down to every leaf. Each node is visited once, when its gradient is complete."""
    nodes, uses = reachable(root)
    gradients = {root: gradient}  # the sums so far, by node that is still to come
    put_off = _deferral.get()
    with running_pass(uses) as current:
        while nodes:
            node = nodes.pop()  # the largest number: all users of its output are done
            inputs = node.inputs
            results = input_gradients(node, gradients.pop(node, None))
            node.free()
            for x, result in zip(inputs, results, strict=True):
                if isinstance(x, Node):
                    add_gradient(gradients, x, result)
                elif x is not None and put_off is not None and isinstance(result, LazyGradient):
                    put_off.append((x, result, current))
                elif x is not None:
                    current.close_use(x, result)
            del results  # frees what the next node's backward does not need


def reachable(root: Node) -> tuple[list[Node], Counter[Leaf]]:
    """Return all nodes from `root` down, inputs before users, and the number of edges that lead to each leaf."""
    nodes = {root}
    stack = [root]
    uses: Counter[Leaf] = Counter()
    while stack:
        node = stack.pop()
        if node.freed:
            raise ValueError(
                "backward() a second time through the same graph: its saved arrays are already freed"
            )
        for x in node.inputs:
            if isinstance(x, Node):
                if x not in nodes:
                    nodes.add(x)
                    stack.append(x)
            elif x is not None:
                uses[x] += 1
    return sorted(nodes, key=lambda node: node.number), uses


def input_gradients(node: Node, grad: Array | None) -> Gradients:
    """Run the node's backward. Return a gradient or None for each input; all None if none has reached the node."""
    if grad is None:
        return (None,) * len(node.inputs)
    results = node.backward(grad, **node.saved)
    if not isinstance(results, tuple):  # a function of one input may return its gradient alone
        results = (results,)
    hold("activations", *results)
    return results


def add_gradient(gradients: dict[Node, Array], node: Node, result: Array | LazyGradient | None) -> None:
    """Add what one user of a node's output contributes to the gradient of that output."""
    if isinstance(result, LazyGradient):
        result = result.compute(None)
    if node in gradients and result is not None:
        result = gradients[node] + result  # not in place: others may hold it
    if result is not None:
        gradients[node] = result


class BackwardPass:
    """A backward pass that is running, together with the passes inside it (recompute)."""

    def __init__(self) -> None:
        self.uses: Counter[Leaf] = Counter()  # the edges to each leaf that are still to come
        self.callbacks: list[Callable[[], None]] = []  # run at its end

    def close_use(self, leaf: Leaf, gradient: Array | LazyGradient | None) -> None:
        """Add the gradient of one use of `leaf`; after the last use its gradient is complete and its hooks run."""
        if gradient is not None:
            leaf.accumulate(gradient)
        self.uses[leaf] -= 1
        if self.uses[leaf] == 0:
            # Otherwise a recomputed block's input would live, with its gradient, until the pass ends.
            del self.uses[leaf]
            for hook in leaf.hooks:
                hook(leaf)


_running: ContextVar[BackwardPass | None] = ContextVar("running_backward", default=None)


@contextmanager
def running_pass(uses: Counter[Leaf]) -> Iterator[BackwardPass]:
    """Add these uses of leaves to the pass that is running, or start one.

    A backward inside a backward (recompute) adds to the outer pass's count, which already holds the
    checkpointed call's own use of each parameter. So a parameter's hooks run only when every use
    everywhere is done.
    """
    outer = _running.get()
    current = BackwardPass() if outer is None else outer
    current.uses.update(uses)  # adds up
    with setting(_running, current):
        yield current
    if outer is None:
        for callback in current.callbacks:
            callback()


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback()` once, when the outermost backward pass that is running now ends without an error.

    Callbacks run in the order in which they were queued. Under `defer_weight_gradients` they run at
    the end of the half that queued them: the backward pass itself, or `DeferredGradients.run()`.
    ValueError outside of a backward pass. NB: PyTorch's DistributedDataParallel calls
    torch.autograd.Variable._execution_engine.queue_callback.
    """
    current = _running.get()
    if current is None:
        raise ValueError("queue_callback: no backward pass is running; call it from a gradient hook")
    current.callbacks.append(callback)


class DeferredGradients(deque[tuple[Leaf, LazyGradient, BackwardPass]]):
    """The weight gradients that backward passes have put off, each with its pass, which counts the leaf's uses."""

    def run(self) -> None:
        """Compute and accumulate every gradient in the order of the passes; hooks run as parameters become complete."""
        with running_pass(Counter()):
            while self:
                # The saved activations of the gradient are freed when it is done.
                leaf, gradient, its_pass = self.popleft()
                its_pass.close_use(leaf, gradient)


_deferral: ContextVar[DeferredGradients | None] = ContextVar("deferral", default=None)


def defer_weight_gradients() -> AbstractContextManager[DeferredGradients]:
    """Compute only input gradients (kind `I`) in backward passes inside the block, and put off weight gradients (`W`).

    The `run()` of the queue that this yields computes them, in pipeline bubbles (Zero Bubble, arXiv
    2401.10241, 2.1).
    """
    return setting(_deferral, DeferredGradients())
