"""Exercise 6 (chapter 5): a step of ZeRO stage 1.

Every rank has all parameters, one flat array, and the gradient of its own samples' mean loss. The optimizer state
(Adam's two means) is divided: rank r has that of chunk r, `chunk_bounds(n, d)[r]`. A step sums the gradients over the
ranks so that each rank gets its chunk alone, averages them, updates the rank's chunk of the parameters, and gathers
the parameters.

You need:
    chunk_bounds(n, d)[r]               (start, stop) of chunk r
    comm.reduce_scatter(x)              returns chunk `comm.rank` of the sum of all ranks' x
    comm.all_gather(chunk, out=array)   sets `array` to the ranks' chunks in order; `chunk` may be a part of it
    AdamState(n), adam_step             below

Graded on 1 to 5 ranks, in three steps: parameters equal to one device's; elements of optimizer state on a rank; bytes
sent, those of one all-reduce: 2n(d-1)/d elements.
"""

from __future__ import annotations

import numpy as np

from minipar.comm import Communicator, chunk_bounds


class AdamState:
    """The two means for n elements, and the number of steps."""

    def __init__(self, n: int) -> None:
        self.mean, self.square, self.steps = np.zeros(n), np.zeros(n), 0


def adam_step(values: np.ndarray, gradient: np.ndarray, state: AdamState, lr: float = 0.1, eps: float = 0.1) -> None:
    """Change `values` in place: a step of Adam. All arrays have n elements."""
    if not values.size == gradient.size == state.mean.size:
        sizes = f"{values.size} values, {gradient.size} gradients, a state of {state.mean.size}"
        raise ValueError(f"adam_step: {sizes}: all three must have the elements of chunk r, and no more")
    state.steps += 1
    state.mean += 0.1 * (gradient - state.mean)
    state.square += 0.01 * (gradient * gradient - state.square)
    root = np.sqrt(state.square / (1 - 0.99**state.steps))
    values -= lr * state.mean / (1 - 0.9**state.steps) / (root + eps)


class ZeroOne:
    """Adam, whose state is divided over the ranks."""

    def __init__(self, comm: Communicator, parameters: np.ndarray) -> None:
        """Keep a reference to the parameters, (n,), and make `self.state`, the AdamState of this rank's chunk."""
        raise NotImplementedError("your code")

    def step(self, gradient: np.ndarray) -> None:
        """Update all parameters in place with the mean of the ranks' gradients, (n,)."""
        raise NotImplementedError("your code")
