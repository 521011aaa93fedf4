"""How gradients are computed: recorded or not, now or later.

The modes are context variables, not globals: ranks that are threads of one process must not switch each other's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from minipar.backend import Array

if TYPE_CHECKING:
    from minipar.autograd.tensor import Tensor

grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)
deferral: ContextVar[DeferredGradients | None] = ContextVar("deferral", default=None)
# What random operations draw from (nn.dropout puts its keys here); a recomputed block draws the same again.
randomness: ContextVar[Any] = ContextVar("randomness", default=None)
# Told of the floating-point operations of each matrix product as it is done: how a cost model knows the time.
meter: ContextVar[Callable[[int], None] | None] = ContextVar("meter", default=None)
# How many uses of each leaf the running backward pass (with the passes inside it) has still to count.
open_uses: ContextVar[dict[Tensor, int] | None] = ContextVar("open_uses", default=None)
# The callbacks to run when the outermost backward pass that is running ends; None outside of a backward pass.
callbacks: ContextVar[list[Callable[[], None]] | None] = ContextVar("callbacks", default=None)


class LazyGradient:
    """A gradient as a recipe: `compute(out)` writes it into `out` (or a new array when None) and returns it.

    Matrix products give their weight gradient this way, for two reasons: the product can be written straight into the
    flat gradient buffer, and it can be run later (`defer_weight_gradients`), which is all that a zero-bubble pipeline
    asks for.
    """

    def __init__(self, compute: Callable[[Array | None], Array]) -> None:
        self.compute = compute


class DeferredGradients:
    """Weight gradients that a backward pass put off; `run()` computes them in the order of that pass."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Tensor, LazyGradient, dict[Tensor, int]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, leaf: Tensor, gradient: LazyGradient, uses: dict[Tensor, int]) -> None:
        self._queue.append((leaf, gradient, uses))

    def run(self) -> None:
        """Compute and accumulate every waiting gradient; hooks fire as parameters become complete.

        This is the second half of a backward pass, so a hook may call `queue_callback` here too.
        """
        with backward_pass():
            while self._queue:
                leaf, gradient, uses = self._queue.popleft()  # each one's saved activations are freed when it is done
                leaf._accumulate(gradient)
                close_use(leaf, uses)


@contextmanager
def backward_pass() -> Iterator[None]:
    """Run what `queue_callback` collects inside the block, in order, when the outermost block ends without an error."""
    if callbacks.get() is not None:  # a backward pass inside a backward pass: recompute
        yield
        return
    queued: list[Callable[[], None]] = []
    token = callbacks.set(queued)
    try:
        yield
    finally:
        callbacks.reset(token)
    for callback in queued:
        callback()


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback()` once, when the outermost backward pass that is running now ends without an error.

    Callbacks run in the order in which they were queued. A gradient hook uses this to do something once per backward
    pass, such as waiting for all gradients that are being sent. Under `defer_weight_gradients` a callback runs at the
    end of the half that queued it: the backward pass itself, or `DeferredGradients.run()`. Raises ValueError outside
    of a backward pass.
    NB: PyTorch's DistributedDataParallel calls torch.autograd.Variable._execution_engine.queue_callback for this.
    """
    queued = callbacks.get()
    if queued is None:
        raise ValueError("queue_callback: no backward pass is running; call it from a gradient hook")
    queued.append(callback)


@contextmanager
def metering(count: Callable[[int], None]) -> Iterator[None]:
    """Matrix products inside the block, forward and backward, call `count` with their floating-point operations."""
    token = meter.set(count)
    try:
        yield
    finally:
        meter.reset(token)


def spend(*sizes: int) -> None:
    """A product of matrices (n, k) and (k, m), or a stack of them, is done: 2 n k m operations."""
    count = meter.get()
    if count is not None:
        count(2 * math.prod(sizes))


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without recording a graph."""
    token = grad_enabled.set(False)
    try:
        yield
    finally:
        grad_enabled.reset(token)


@contextmanager
def enable_grad() -> Iterator[None]:
    """Record a graph even inside `no_grad` (recompute needs it)."""
    token = grad_enabled.set(True)
    try:
        yield
    finally:
        grad_enabled.reset(token)


@contextmanager
def defer_weight_gradients() -> Iterator[DeferredGradients]:
    """Backward passes inside the block leave out weight gradients (kind `W`) and compute input gradients only (kind
    `I`).

    The yielded queue's `run()` computes them. Zero Bubble (arXiv 2401.10241, section 2.1) fills pipeline bubbles this
    way.
    """
    queue = DeferredGradients()
    token = deferral.set(queue)
    try:
        yield queue
    finally:
        deferral.reset(token)


def close_use(leaf: Tensor, uses: dict[Tensor, int]) -> None:
    """One use of `leaf` is counted; after the last one its gradient is complete and its hooks run."""
    uses[leaf] -= 1
    if uses[leaf] == 0:
        del uses[leaf]  # or a recomputed block's input would live, with its gradient, until the outer pass ends
        for hook in leaf._hooks:
            hook(leaf)
