"""Exercise 17 (chapter 12): rows travel to their experts, and the results travel back.

There are E experts, a multiple of the ranks P: rank j holds the experts jE/P to (j+1)E/P - 1. This rank has `rows`,
and row i must go to expert `experts[i]`. Send each row to the rank of its expert, run the experts there, and send the
results back. Return result i for row i.

`run(rows, counts)` runs this rank's E/P experts. The rows of all ranks must be sorted by expert, those of an expert in
the order of their source ranks and then in their order there. counts[e] of them are for the e-th expert of this rank.
The results come in the same order, as wide as the rows. Call it once, even if no row came.

You need `comm.all_to_all(x)`, which sends the j-th of P equal chunks of x to rank j, and `comm.all_to_all(x,
counts=(sends, receives))` for chunks of sends[j] *elements* (not rows). Both return the chunks that arrive, one after
another, as a flat array.

Graded on 1, 2, 3 and 4 ranks, also with ranks without rows and experts without rows: the results bit for bit, the order
of the rows, and the bytes: one integer for each expert of other ranks, and only rows that leave.
"""

from collections.abc import Callable

import numpy as np

from minipar.comm import Communicator

Run = Callable[[np.ndarray, np.ndarray], np.ndarray]


def run_over_ranks(comm: Communicator, rows: np.ndarray, experts: np.ndarray, count: int, run: Run) -> np.ndarray:
    """Return the result of each row, (M, h). rows: (M, h); experts: (M,) integers; count: E, of all ranks."""
    raise NotImplementedError("your code")
