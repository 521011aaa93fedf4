"""Exercise 2 (chapter 3): all-reduce = reduce-scatter + all-gather.

Write an all-gather, and with it an all-reduce. `comm.reduce_scatter(x, algorithm="ring")` of the library is given: it
returns chunk `comm.rank` of the sum of all ranks' flat arrays, cut as `chunk_bounds(n, p)` says. For your all-gather
you have `comm.isend` and `comm.irecv` only (exercise 1 describes them).

Graded on 1 to 8 ranks: the values; that every rank has the same bits; that x keeps its shape; where p divides n,
the bytes: n(p-1)/p elements for the all-gather and 2n(p-1)/p for the all-reduce.
"""

import numpy as np

from minipar.comm import Communicator, chunk_bounds


def all_gather(comm: Communicator, chunk: np.ndarray, n: int) -> np.ndarray:
    """Return the ranks' chunks in the order of the ranks, one new array: (n,). Chunk r has chunk_bounds(n, p)[r]."""
    raise NotImplementedError("your code")


def all_reduce(comm: Communicator, x: np.ndarray) -> np.ndarray:
    """Return the sum of all ranks' x, a new array of the shape of x."""
    raise NotImplementedError("your code")
