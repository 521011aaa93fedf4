"""Exercise 3 (chapter 3): recursive doubling, for any number of ranks.

Let q be the largest power of two that is at most p. In round k = 0, 1, 2, ... rank r < q exchanges its whole running
sum with rank r XOR 2^k (`comm.rank ^ distance`), and adds. After lg q rounds all q ranks have the sum. The p - q
ranks that are left over need a way to have their values counted, and to get the result: find one that costs them one
message each.

You have `comm.isend` and `comm.irecv` only (exercise 1 describes them).

Graded on 1 to 8 ranks: the values; that every rank has the same bits; that x is as before; that no rank sends more
than lg q + 1 messages of n elements.
"""

import numpy as np

from minipar.comm import Communicator


def all_reduce(comm: Communicator, x: np.ndarray) -> np.ndarray:
    """Return the sum of all ranks' x, a new array. x: (n,)."""
    raise NotImplementedError("your code")
