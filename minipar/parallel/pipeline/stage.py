"""Pipeline stages: consecutive parts of a model (embedding, blocks, head), cut by cost, and run by one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minipar.autograd import DeferredGradients, Tensor, defer_weight_gradients
from minipar.backend import Array
from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.module import Part


def part_costs(model: GPT, length: int) -> list[float]:
    """Return each part's relative cost for sequences of `length`: operations per token as in `forward_flops`."""
    return shape_costs(model.config, length)


def shape_costs(config: GPTConfig, length: int) -> list[float]:
    """Return the `part_costs` of a model of this shape without making one."""
    h = config.n_embd
    block = 24 * h * h + 4 * length * h
    return [0.0, *[float(block)] * config.n_layer, 2.0 * h * config.vocab_size]


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of parts of each stage such that the largest stage's cost is as small as possible.

    Every stage has at least one block. The embedding belongs to the first stage and the head to the last. UsageError if
    there are fewer blocks than stages.
    """
    blocks = len(costs) - 2
    if blocks < stages:
        raise UsageError(f"layers {blocks} are fewer than the pipeline's {stages} stages: each has at least one")
    load = [*costs[1:-1]]
    load[0] += costs[0]
    load[-1] += costs[-1]
    # best[s][n]: (the largest stage's load, the last stage's first block) of the best cut of n blocks into s stages.
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
    """Cut the model's parts into stages of these lengths. UsageError if they do not add up to the model."""
    if sum(counts) != len(model.parts) or min(counts) < 1:
        raise UsageError(f"stages of {list(counts)} parts do not cut the model's {len(model.parts)} parts")
    stages, start = [], 0
    for count in counts:
        stages.append(model.parts[start : start + count])
        start += count
    return stages


class PipelineStage:
    """A stage on the rank that holds it, with the activations of the microbatches whose backward is still to come."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._saved: dict[int, tuple[Any, Tensor]] = {}
        self._deferred: dict[int, DeferredGradients] = {}

    @property
    def alive(self) -> int:
        """The number of microbatches whose forward is done and whose backward is not."""
        return len(self._saved)

    def forward(self, microbatch: int, x: Any, finish: Callable[[Tensor], Tensor] | None = None) -> Array:
        """Run the stage's parts and return the result's array.

        x is the tokens on the first stage, and on the others a Tensor (B, T, h) whose gradient `backward` returns.
        `finish` computes the loss from the last stage's result.
        """
        y = x
        for part in self.parts:
            y = part.run(y)
        if finish is not None:
            y = finish(y)
        self._saved[microbatch] = x, y
        return y.data

    def backward(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the whole backward and return the gradient of the stage's input, None on the first stage."""
        x, y = self._saved.pop(microbatch)
        y.backward(gradient)
        return x.grad if isinstance(x, Tensor) else None

    def backward_input(self, microbatch: int, gradient: Array) -> Array | None:
        """Run the half of backward that the previous stage waits for, and defer the weight gradients."""
        with defer_weight_gradients() as self._deferred[microbatch]:
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` has deferred."""
        self._deferred.pop(microbatch).run()
