"""Exercise 8 (chapter 6): an MLP over t ranks, a column-parallel and a row-parallel layer.

One device computes y = relu(x @ A + b) @ D + e. Rank r has some columns of A and of b, and the matching rows of D. x
and e are the same on every rank, and so must be y. In backward every rank is given the same gradient of y.

You need `comm.all_reduce(array)`: it replaces the array by the sum over the ranks, and returns it.

Graded on 1, 2 and 4 ranks: y and all gradients against one device; the bytes: one all-reduce of N x h elements in
forward and one in backward.
"""

from typing import Any

import numpy as np

from minipar.comm import Communicator


def forward(
    comm: Communicator, x: np.ndarray, A: np.ndarray, b: np.ndarray, D: np.ndarray, e: np.ndarray
) -> tuple[np.ndarray, Any]:
    """Return y, (N, h), and whatever backward needs. x: (N, h), A: (h, 4h/t), b: (4h/t,), D: (4h/t, h), e: (h,)."""
    raise NotImplementedError("your code")


def backward(comm: Communicator, dy: np.ndarray, saved: Any) -> dict[str, np.ndarray]:
    """Return the gradients of "x", "A", "b", "D", "e". That of x is the whole one; A, b, D are this rank's parts."""
    raise NotImplementedError("your code")
