"""Exercise 15 (chapter 11): the backward pass of ring attention.

Rank r holds queries q and keys and values kv (one array). Keys and values go around the ring to the right, as in
forward. `terms(q, kv, owner)` attends with this rank's queries to the keys and values of rank `owner`, and returns
their terms of the gradients: (of q, of kv). The gradient of q is the sum of this rank's terms; that of kv is the sum of
all ranks' terms, and belongs to the owner.

You need `comm.rank`, `comm.size`, `comm.isend(array, dest)` and `comm.irecv(array, source)`; both return a message to
`wait()` for. Wait for a send before you write into its array.

Graded on 1, 2, 3 and 5 ranks: the values, and the bytes: kv makes c - 1 hops and its gradient c; one rank sends
nothing.
"""

from collections.abc import Callable

import numpy as np

from minipar.comm import Communicator

Terms = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def ring_backward(comm: Communicator, q: np.ndarray, kv: np.ndarray, terms: Terms) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of this rank's q and of this rank's kv. `kv` itself must keep its values."""
    raise NotImplementedError("your code")
