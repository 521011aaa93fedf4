"""Pipeline stages: runs of a model's parts (embedding, blocks, head), cut by cost, and what a rank does for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minipar.autograd import DeferredGradients, Tensor, defer_weight_gradients
from minipar.backend import Array
from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.module import Part


def part_costs(model: GPT, length: int) -> list[float]:
    """Relative cost of each part for sequences of `length`: operations per token as in `GPTConfig.forward_flops`."""
    return shape_costs(model.config, length)


def shape_costs(config: GPTConfig, length: int) -> list[float]:
    """`part_costs` of a model of this shape, which need not be there."""
    h = config.n_embd
    block = 24 * h * h + 4 * length * h
    return [0.0, *[float(block)] * config.n_layer, 2.0 * h * config.vocab_size]


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """How many consecutive parts each stage gets so that the largest sum of costs is as small as it can be.

    Every stage has at least one block; the embedding goes with the first, the head with the last. UsageError if there
    are fewer blocks than stages.
    """
    blocks = len(costs) - 2
    if blocks < stages:
        raise UsageError(f"layers {blocks} are fewer than the pipeline's {stages} stages: each has at least one")
    load = [*costs[1:-1]]
    load[0] += costs[0]
    load[-1] += costs[-1]
    # best[s][n]: the smallest largest load of the first n blocks on s stages, and where the last stage begins.
    best: list[list[tuple[float, int]]] = [[(float("inf"), 0)] * (blocks + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for s in range(1, stages + 1):
        for n in range(s, blocks + 1):
            best[s][n] = min((max(best[s - 1][k][0], sum(load[k:n])), k) for k in range(s - 1, n))
    counts: list[int] = []
    n = blocks
    for s in range(stages, 0, -1):
        k = best[s][n][1]
        counts.insert(0, n - k)
        n = k
    counts[0] += 1
    counts[-1] += 1
    return counts


def cut(model: GPT, counts: Sequence[int]) -> list[list[Part]]:
    """The model's parts in runs of these lengths."""
    if sum(counts) != len(model.parts) or min(counts) < 1:
        raise UsageError(f"stages of {list(counts)} parts do not cut the model's {len(model.parts)} parts")
    stages, start = [], 0
    for count in counts:
        stages.append(model.parts[start : start + count])
        start += count
    return stages


class PipelineStage:
    """A stage on the rank that holds it: forward, and backward whole or in halves, of any microbatch."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._saved: dict[int, tuple[Any, Tensor]] = {}
        self._deferred: dict[int, DeferredGradients] = {}

    @property
    def alive(self) -> int:
        """Microbatches whose forward is done and whose backward is not."""
        return len(self._saved)

    def forward(self, microbatch: int, x: Any, finish: Callable[[Tensor], Tensor] | None = None) -> Array:
        """Run the stage's parts and return the result's array.

        x is the batch on the first stage, and elsewhere a Tensor (B, T, h) whose gradient `backward` returns. `finish`
        computes the loss from the last stage's result.
        """
        y = x
        for part in self.parts:
            y = part.run(y)
        if finish is not None:
            y = finish(y)
        self._saved[microbatch] = x, y
        return y.data

    def backward(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the whole backward; return the gradient of the stage's input, None on the first stage."""
        x, y = self._saved.pop(microbatch)
        y.backward(gradient)
        return x.grad if isinstance(x, Tensor) else None

    def backward_input(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the half of backward that the previous stage waits for; leave weight gradients for `backward_weight`."""
        with defer_weight_gradients() as self._deferred[microbatch]:
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` has left."""
        self._deferred.pop(microbatch).run()
