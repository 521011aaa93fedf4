"""Exercise 22 (chapter 2): recompute in segments.

Chapter 2 keeps the input of every block. A model of L equal blocks can keep less: cut it into *segments* of k blocks,
from the first on (the last may be shorter), and keep the inputs of segments only. Backward takes the last segment
first. It runs the segment's forward again, this time with what each block saves, and then the backward of its blocks.

A block has `forward(x)`, which returns its result and keeps nothing; `forward_and_save(x)`, which returns the result
and what the block saves for its backward; and `backward(saved, dy)`, which adds to the block's gradients and returns
the gradient of x. Let x and every result have n elements, and what a block saves s. With k = 1 all inputs are kept, and
with k = L everything is alive that the blocks save. The best k may lie between the two.

While the segment with number j (from 0) goes back, there are j + 1 inputs of segments, what its blocks have saved, and
the segment's result: (j + 1) n + (its blocks) s + n elements. The largest of these is the peak. (The last result of
forward is not needed: its gradient is given. Let no variable keep it, or leave the last segment's first forward out.)

Graded: the gradients, bit for bit; two forwards of each block at most; at the beginning of each block's backward, the
elements alive, at most the peak over all segments (not the sum for this segment); `best_segment` with ==.
"""

from typing import Any, Protocol

import numpy as np


class Block(Protocol):
    """A block of the model, as the grader has it."""

    def forward(self, x: np.ndarray) -> np.ndarray: ...
    def forward_and_save(self, x: np.ndarray) -> tuple[np.ndarray, Any]: ...
    def backward(self, saved: Any, dy: np.ndarray) -> np.ndarray: ...


def step(blocks: list[Block], x: np.ndarray, dy: np.ndarray, k: int) -> np.ndarray:
    """Run forward and backward in segments of k blocks. Return the gradient of x; dy is that of the last result."""
    raise NotImplementedError("your code")


def best_segment(L: int, n: int, s: int) -> int:
    """Return the k with the smallest peak, the smallest such k if there are several."""
    raise NotImplementedError("your code")
