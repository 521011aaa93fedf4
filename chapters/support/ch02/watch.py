"""Watch a GPT's training step: the slope of its loss (sections 2.2, 2.9), and the memory it holds (2.8).

Also one GPT with a planted mistake: a backward that forgets the skip paths.
"""

import math
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from minipar.autograd import Function, Tensor
from minipar.autograd.backward import reachable
from minipar.autograd.fused import flop_counter
from minipar.backend import Array
from minipar.nn import GPT, Module

Moment = tuple[str, int, int]  # where, bytes held there, the most held since the moment before


def check_slope(model: Module, x: Array, y: Array, tolerance: float = 1e-7, step: float = 1e-4) -> float:
    """Check that <gradient, u> is the slope of the loss along a random unit vector u over all parameters (float64).

    Returns the relative error; AssertionError beyond `tolerance`. The parameters' gradients are left complete, with
    those of ties added.
    """
    random = np.random.Generator(np.random.Philox(3))
    parameters = model.parameters()
    model.zero_grad()
    model.loss(x, y).backward()
    along = [random.standard_normal(p.shape) for p in parameters]
    length = math.sqrt(sum(float((u * u).sum()) for u in along))
    by_backward = 0.0
    for p, u in zip(parameters, along, strict=True):
        p.fold_tied_gradients()
        u /= length
        by_backward += float((p.grad * u).sum())
    start, losses = [p.data.copy() for p in parameters], []
    for sign in (1, -1):
        for p, u, p0 in zip(parameters, along, start, strict=True):
            p.data[...] = p0 + sign * step * u
        losses.append(model.loss(x, y).item())
    for p, p0 in zip(parameters, start, strict=True):
        p.data[...] = p0
    by_forward = (losses[0] - losses[1]) / (2 * step)
    error = abs(by_forward - by_backward) / max(abs(by_forward), 0.01)
    assert error <= tolerance, (
        f"slope by backward {by_backward:.12g}, by differences {by_forward:.12g}: relative error {error:.1e}"
    )
    return error


def check_matrices_differ(model: Module) -> None:
    """Check that no two matrices of the model hold the same values. AssertionError with both names."""
    seen: dict[bytes, str] = {}
    for name, value in model.state_dict().items():
        if value.ndim == 2:
            twin = seen.setdefault(value.tobytes(), name)
            assert twin == name, f"{name} holds the same values as {twin}"


class ForgottenResidual(GPT):
    """A GPT whose skip paths carry the values but not the gradient."""

    def run_block(self, block, x):  # type: ignore[no-untyped-def]
        x = x.detach() + block.attn(block.ln_1(x))
        return x.detach() + block.mlp(block.ln_2(x))


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """The memory that a forward and a backward held, and the operations that they computed."""

    kept: int  # bytes of the floating-point arrays that the graph keeps after forward, parameters aside
    held: int  # bytes that tracemalloc sees then
    operations: int  # operations of the matrix products, forward and backward
    moments: list[Moment]  # after each block in forward and in backward

    @property
    def peak(self) -> int:
        """The most bytes held at any time."""
        return max(peak for _, _, peak in self.moments)


def watch_step(model: GPT, x: Array, y: Array) -> Step:
    """Run forward and backward, and record memory as each block's output, and later its gradient, passes."""
    for leaf in (*model.parameters(), model.head_weight):
        leaf.grad_buffer = np.empty_like(leaf.data)  # gradients have their place before the measurement starts
    moments: list[Moment] = []
    counts: list[int] = []
    blocks = [segment for segment in model.segments if segment.name.startswith("h.")]
    runs = [segment.run for segment in blocks]
    for segment, run in zip(blocks, runs, strict=True):
        segment.run = lambda x, run=run, name=segment.name: _Probe.apply(run(x), moments, name)
    tracemalloc.start()
    _note(moments, "start")
    with flop_counter(counts.append):
        loss = model.loss(x, y)
        _note(moments, "loss")
        kept, held = saved_bytes(loss, model.parameters()), moments[-1][1]
        tracemalloc.reset_peak()
        loss.backward()
    _note(moments, "end")
    tracemalloc.stop()
    for segment, run in zip(blocks, runs, strict=True):
        segment.run = run
    return Step(kept, held, sum(counts), [("start", 0, 0), *moments[1:]])


class _Probe(Function):
    """The identity; notes held and peak memory in `moments` when forward and backward pass."""

    def forward(self, x: Array, moments: list[Moment], name: str) -> Array:
        self.moments, self.name = moments, name
        _note(moments, f"forward {name}")
        return x

    def backward(self, grad: Array) -> tuple[Array, None, None]:
        _note(self.moments, f"backward {self.name}")
        return grad, None, None


def _note(moments: list[Moment], name: str) -> None:
    """Append the memory that is held now, and its peak since the last call, relative to the first moment."""
    held, peak = tracemalloc.get_traced_memory()
    moments.append((name, held - moments[0][1], peak - moments[0][1]) if moments else (name, held, peak))
    tracemalloc.reset_peak()


def saved_bytes(loss: Tensor, parameters: Iterable[Tensor]) -> int:
    """Count the bytes of the floating-point arrays that the graph below `loss` keeps, each storage once.

    Parameters, single values and integers (tokens, targets) do not count.
    """

    def storage(array: Array) -> Array:
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array

    weights = {id(storage(p.data)) for p in parameters}
    kept = {}
    for node in reachable(loss.node)[0]:
        for value in node.saved.values():
            for array in value if isinstance(value, tuple) else (value,):
                if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size > 1:
                    kept[id(storage(array))] = storage(array).nbytes
    return sum(size for key, size in kept.items() if key not in weights)
