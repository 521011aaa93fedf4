"""Exercise 25 (chapters/more/grouped_queries): grouped queries, also on more ranks than groups.

A layer has a heads of q in G groups. Query head i reads head i G // a of k and of v. t ranks of tensor parallelism
share the layer: t divides a, and either t divides G or G divides t. In the second case several ranks need the same head
of k and v. Each of them has a *copy* of its columns. Backward gives each copy the gradient of this rank's queries
alone, and the copies must stay equal.

1. `own_heads`: the heads whose columns rank r has. Each rank has a / t heads of q, in order.
2. `gradients`: this rank's gradients, made those of one device.
3. `norm`: the norm of the gradient of the layer's three matrices, each element of the *model* counted once.

You need `comm.rank`, `comm.size` (t), `comm.all_reduce(array)`, which replaces the array by the sum over its ranks and
returns it, and `comm.new_group(ranks, "copies")`, the communicator of these ranks, of which this one is one. It sends
nothing. Every rank of `comm` must call it equally often.

Graded on 1 to 8 ranks against one device: heads, gradients and norm. The elements that all ranks send, with ==:
`gradients` 2 (t/G - 1) for each element of k and v that is copied, nothing if none is, and `norm` those of one value.
"""

import numpy as np

from minipar.comm import Communicator


def own_heads(a: int, G: int, t: int, r: int) -> tuple[range, range]:
    """Return the heads of q, and those of k and v, that rank r of t has."""
    raise NotImplementedError("your code")


def gradients(
    comm: Communicator, G: int, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of this rank's columns of the three matrices, over all queries of the model.

    dq, dk, dv: what this rank's queries contribute, (h, columns of this rank).
    """
    raise NotImplementedError("your code")


def norm(comm: Communicator, G: int, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> float:
    """Return the norm of the gradient of all three matrices, on every rank. dq, dk, dv: what `gradients` returned."""
    raise NotImplementedError("your code")
