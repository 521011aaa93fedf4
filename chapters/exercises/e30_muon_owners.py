"""Exercise 30 (chapters/more/muon.py): Muon, whose matrices have owners.

Every rank has all matrices, and the gradients of its own samples' mean loss. Matrix i belongs to rank `owner[i]`, and a
rank may own several or none. A step

1. gives each owner the *mean over the ranks* of its matrices' gradients,
2. lets each owner update its matrices, `muon_step` below, with the running means that it alone keeps,
3. gives all ranks the new matrices.

You need, of `comm`:
    comm.rank, comm.size
    comm.all_to_all(x, out=array, counts=(sends, receives))
        sends the first sends[0] elements of the flat array x to rank 0, the next sends[1] to rank 1, and so on, and
        sets `array` to the receives[0] elements of rank 0, the receives[1] of rank 1, and so on
    comm.broadcast(array, root)         copies the array of rank `root` to all ranks, in place

Graded on 1 to 5 ranks, in three steps: the matrices, which are those of one device to 1e-12; running means on a rank,
those of the matrices that it owns, to 1e-12; elements that all ranks send together, with ==: those of one all-reduce
of everything, 2 (d - 1) times all elements.
"""

from collections.abc import Sequence

import numpy as np

from minipar.comm import Communicator


def orthogonalize(matrix: np.ndarray) -> np.ndarray:
    """Return nearly U V^T of the matrix U S V^T."""
    x = matrix / max(np.linalg.norm(matrix), 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x


def muon_step(matrix: np.ndarray, gradient: np.ndarray, mean: np.ndarray) -> None:
    """Update a matrix and the running mean of its gradient in place. All three have the matrix's shape."""
    if not matrix.shape == gradient.shape == mean.shape:
        raise ValueError(f"muon_step: shapes {matrix.shape}, {gradient.shape} and {mean.shape} must be equal")
    mean += 0.05 * (gradient - mean)
    matrix -= 0.1 * orthogonalize(0.05 * gradient + 0.95 * mean)


class MuonOwners:
    """Muon, whose matrices are each updated by one rank."""

    def __init__(self, comm: Communicator, matrices: Sequence[np.ndarray], owner: Sequence[int]) -> None:
        """Keep the matrices, and make `self.means`: {i: running mean, zeros at first} of the matrices i owned here."""
        raise NotImplementedError("your code")

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        """Update all matrices in place. gradients[i] is this rank's gradient of matrix i."""
        raise NotImplementedError("your code")
