"""The tokens that each rank of context parallelism has, and the keys that its queries see.

In the order "contiguous" rank r holds the r-th part of the sequence. Later tokens see more keys, so
the ranks of early tokens wait for those of late ones. In the ring, ranks then compute for about
c/(2c-1) of the time. In the order "zigzag" the sequence is cut into 2c chunks, rank r holds chunks
r and 2c-1-r, and every rank has the same work in every step:

    c = 2, T = 8          contiguous                  zigzag
    rank 0 holds          0 1 2 3                     0 1     6 7
    rank 1 holds          4 5 6 7                         2 3 4 5

Seams of the core: none.
"""

import numpy as np

from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, check_divides

# The methods of attention over the ranks, which context_parallel.py explains.
METHODS = ("ring", "all-gather", "ulysses")
ORDERS = ("zigzag", "contiguous")


def check_length(length: int, ranks: int, order: str) -> None:
    """Raise UsageError, with the arithmetic, if a sequence cannot be cut into equal parts."""
    if order == "zigzag":
        check_divides("seq-len/(2*cp)", length, 2 * ranks, "zigzag has equal chunks")
    else:
        check_divides("seq-len/cp", length, ranks, f"{order} has equal chunks")


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless the value of an argument is one of these."""
    if value not in choices:
        expected = ", ".join(choices)
        raise UsageError(f"context parallelism: {what} {value!r}: expected {expected}")


def visible(order: str, rank: int, source: int, tokens: int) -> list[tuple[slice, slice]]:
    """Return which of a rank's `tokens` queries see which keys of rank `source`.

    The list has one pair of slices, of the queries and of the keys, or none. Queries see the rank's
    own keys causally. They see all of the returned keys of another rank.
    """
    whole = slice(0, tokens)
    if rank == source:
        return [(whole, whole)]
    if order == "contiguous":
        if source < rank:
            return [(whole, whole)]
        return []
    # The rank has chunks (r, 2c-1-r), the source has chunks (s, 2c-1-s). If s < r, both chunks of
    # the rank see chunk s, and neither sees chunk 2c-1-s. If s > r, the rank's second chunk sees both
    # chunks of the source, and its first chunk sees neither.
    first_half = slice(0, tokens // 2)
    second_half = slice(tokens // 2, tokens)
    if source < rank:
        return [(whole, first_half)]
    return [(second_half, whole)]


class ContextParallel:
    """The ranks that share each sample's tokens, and the order in which tokens are dealt out."""

    def __init__(self, comm: Communicator, order: str = "zigzag") -> None:
        check_choice("order", order, ORDERS)
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        # One rank has all tokens in any order, and "contiguous" accepts every length.
        self.order = order if comm.size > 1 else "contiguous"

    def positions(self, length: int) -> np.ndarray:
        """Return the positions of each rank's tokens in a sequence: (c, T/c). Each row ascends."""
        check_length(length, self.size, self.order)
        everything = np.arange(length)
        if self.order == "contiguous":
            return everything.reshape(self.size, -1)
        # Rank r gets chunk r of the first c chunks, and chunk c-1-r of the last c.
        early, late = everything.reshape(2, self.size, -1)
        return np.concatenate([early, late[::-1]], axis=1)

    def part(self, x: Array, dim: int = 1) -> Array:
        """Return this rank's tokens of an array of whole sequences: (B, T) -> (B, T/c).

        The tokens are along `dim`.
        """
        own = self.positions(x.shape[dim])[self.rank]
        return x.take(own, axis=dim)

    def visible(self, source: int, tokens: int) -> list[tuple[slice, slice]]:
        """Return which of this rank's `tokens` queries see which keys of rank `source`, as `visible` does."""
        return visible(self.order, self.rank, source, tokens)

    def source(self, step: int) -> int:
        """Return the rank whose block this rank computes with in a step.

        In step 0 it is this rank, in step 1 its left neighbour, rank - 1, and so on around the ring.
        """
        return (self.rank - step) % self.size
