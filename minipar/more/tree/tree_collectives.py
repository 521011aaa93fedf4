"""The sums of tree_sums.py over the ranks. To import this file adds the algorithm "tree" to two of the collectives.

Seams of the core: `ALGORITHMS`.
"""

from itertools import chain

import numpy as np

from minipar.comm.algorithms import (
    ALGORITHMS,
    Combine,
    bounds_of,
    chunk_bounds,
    chunks,
    pairwise_all_gather,
    pairwise_all_to_all,
    scratch,
)
from minipar.comm.transport import Link, Steps


def tree_reduce_scatter(link: Link, x: np.ndarray, out: np.ndarray, combine: Combine) -> Steps:
    """Set out = chunk r of ((x_0 + x_1) + (x_2 + x_3)) + ..., a balanced tree, at the ring's cost."""
    p = link.size
    size = out.size
    received = scratch((p * size,), x.dtype)
    yield from pairwise_all_to_all(link, x, received, chunk_bounds(x.size, p), bounds_of([size] * p))
    rows = received.reshape(p, size)
    distance = 1
    while distance < p:
        for left in range(0, p - distance, 2 * distance):
            combine(rows[left], rows[left + distance], out=rows[left])
        distance *= 2
    out[...] = rows[0]


def tree_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = ((x_0 + x_1) + (x_2 + x_3)) + ...: the sums of recursive doubling, the ring's bytes."""
    own = chunks(x, link.size)[link.rank]
    reduce = tree_reduce_scatter(link, x, own, combine)
    gather = pairwise_all_gather(link, x)
    return chain(reduce, gather)


ALGORITHMS["all_reduce"]["tree"] = tree_all_reduce
ALGORITHMS["reduce_scatter"]["tree"] = tree_reduce_scatter
