"""Exercise 16 (chapter 11): tokens, targets, positions and the mean loss under context parallelism.

A sample has T + 1 tokens: T inputs, and each one's target is the token after it. The T inputs are cut into 2c chunks,
and rank r holds the chunks r and 2c - 1 - r, in this order (zig-zag). Cut inputs, targets and positions. If 2c does not
divide T, raise a ValueError whose message names T and 2c.

Then each rank has the *sum* of its tokens' losses, the gradient of this sum, and the number of tokens that count
(padding does not). Return the mean loss over the tokens of all ranks and its gradient, the same on every rank.

You need `comm.all_reduce(array)`: it replaces the array by the sum over the ranks, and returns it.

Graded on 1, 2, 3 and 4 ranks.
"""

import numpy as np

from minipar.comm import Communicator


def own_part(tokens: np.ndarray, r: int, c: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rank r's inputs, targets and positions in the sample, (T/c,) each. tokens: (T + 1,)."""
    raise NotImplementedError("your code")


def mean_over_ranks(comm: Communicator, loss_sum: float, gradient: np.ndarray, count: int) -> tuple[float, np.ndarray]:
    """Return the mean loss and its gradient, (n,). gradient: (n,), of loss_sum; count: tokens that count, here."""
    raise NotImplementedError("your code")
