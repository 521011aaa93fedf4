"""The tokens that each rank of context parallelism has, and the keys that its queries see.

In the order "contiguous" rank r holds the r-th part of the sequence. Later tokens see more keys, so
the ranks of early tokens wait for those of late ones. In the ring, ranks then compute for about
c/(2c-1) of the time. In the order "zigzag" the sequence is cut into 2c chunks, rank r holds chunks
r and 2c-1-r, and every rank has the same work in every step:

    c = 2, T = 8          contiguous                  zigzag
    rank 0 holds          0 1 2 3                     0 1     6 7
    rank 1 holds          4 5 6 7                         2 3 4 5

Where samples hold several documents (`packed`), a token sees those of its own document alone, and
zigzag over the whole sample is not even. The order "documents" is zigzag in each document.
"""

from typing import TypeAlias

import numpy as np

from minipar.autograd import documents_of, packed_ids
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, check_divides

ORDERS = ("zigzag", "contiguous")
ALL_ORDERS = (*ORDERS, "documents")

# What some queries see: slices of samples, of the queries' rows, and of the keys' columns.
Seen: TypeAlias = tuple[slice, slice, slice]


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


def visible_in_documents(
    position_ids: np.ndarray, queries: np.ndarray, keys: np.ndarray, is_own: bool
) -> list[tuple[slice, slice]]:
    """Return the same as `visible` for one sample (T,) of several documents.

    `queries` and `keys` are the positions of both ranks' tokens in the sample, ascending.
    """
    starts = queries - position_ids[queries]  # where each query's document begins
    ends_before = np.diff(starts) > 0
    if not is_own:
        # Rows of consecutive positions see the same keys of another rank.
        ends_before |= np.diff(queries) > 1
    cuts = [0, *(np.flatnonzero(ends_before) + 1).tolist(), len(queries)]
    seen = []
    for first, end in zip(cuts[:-1], cuts[1:], strict=True):
        rows = slice(first, end)
        if is_own:
            seen.append((rows, rows))
            continue
        start, stop = np.searchsorted(keys, [starts[first], queries[first]]).tolist()
        if start < stop:
            seen.append((rows, slice(start, stop)))
    return seen


def deal_documents(position_ids: np.ndarray, ranks: int) -> np.ndarray:
    """Return the positions of each rank's tokens in samples of several documents: (c, B, T/c).

    Each document is cut into 2c equal chunks, of which rank r gets chunks r and 2c-1-r. The first
    tokens of a document, as many as do not divide, see few others. They are dealt out one by one,
    to ranks 0 to c-1 and back again, and on in the sample's next document.
    """
    samples, length = position_ids.shape
    owner = np.empty((samples, length), dtype=int)
    dealt = [0] * samples
    for sample, tokens in documents_of(position_ids):
        i = sample.start
        count = tokens.stop - tokens.start
        size, rest = divmod(count, 2 * ranks)
        singles = (dealt[i] + np.arange(rest)) % (2 * ranks)
        chunks = np.arange(2 * ranks).repeat(size)
        places = np.concatenate([singles, chunks])
        owner[i, tokens] = np.minimum(places, 2 * ranks - 1 - places)
        dealt[i] += rest
    by_owner = np.argsort(owner, axis=1, kind="stable")  # ascending for each rank
    return by_owner.reshape(samples, ranks, -1).swapaxes(0, 1)


class ContextParallel:
    """The ranks that share each sample's tokens, and the order in which tokens are dealt out."""

    def __init__(self, comm: Communicator, order: str = "zigzag") -> None:
        check_choice("order", order, ALL_ORDERS)
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        # One rank has all tokens in any order, and "contiguous" accepts every length.
        self.order = order if comm.size > 1 else "contiguous"

    def positions(self, length: int) -> np.ndarray:
        """Return the positions of each rank's tokens in a sequence: (c, T/c). Each row ascends.

        In the order "documents" they are other ones in each sample: (c, B, T/c). UsageError outside
        of `packed`.
        """
        check_length(length, self.size, self.order)
        if self.order == "documents":
            ids = self.position_ids(length)
            assert ids is not None, "it raises UsageError"
            return deal_documents(ids, self.size)
        everything = np.arange(length)
        if self.order == "contiguous":
            return everything.reshape(self.size, -1)
        # Rank r gets chunk r of the first c chunks, and chunk c-1-r of the last c.
        early, late = everything.reshape(2, self.size, -1)
        return np.concatenate([early, late[::-1]], axis=1)

    def part(self, x: Array, dim: int = 1) -> Array:
        """Return this rank's tokens of an array of whole sequences: (B, T) -> (B, T/c).

        The tokens are along `dim`. In the order "documents" x is (B, T, ...), inside of `packed`.
        """
        own = self.positions(x.shape[dim])[self.rank]
        if self.order == "documents":
            sample = np.arange(len(own))[:, None]
            return x[sample, own]
        return x.take(own, axis=dim)

    def visible(self, source: int, samples: int, tokens: int) -> list[Seen]:
        """Return which of this rank's `tokens` queries see which keys of rank `source`, as `visible` does."""
        ids = self.position_ids(self.size * tokens, samples)
        if ids is None:
            every = slice(0, samples)
            return [(every, *pair) for pair in visible(self.order, self.rank, source, tokens)]
        positions = self.positions(self.size * tokens)
        shape = (samples, tokens)
        queries = np.broadcast_to(positions[self.rank], shape)
        keys = np.broadcast_to(positions[source], shape)
        seen: list[Seen] = []
        for i in range(samples):
            pairs = visible_in_documents(ids[i], queries[i], keys[i], source == self.rank)
            seen += [(slice(i, i + 1), *pair) for pair in pairs]
        return seen

    def position_ids(self, length: int, samples: int | None = None) -> np.ndarray | None:
        """Return the ids of `packed`, None outside of it. UsageError if the order asks for them there."""
        ids = packed_ids(length, samples)
        if ids is None and self.order == "documents":
            raise UsageError(
                "the order 'documents' of tokens is for work inside `with packed(position_ids):`"
            )
        return ids

    def source(self, step: int) -> int:
        """Return the rank whose block this rank computes with in a step.

        In step 0 it is this rank, in step 1 its left neighbour, rank - 1, and so on around the ring.
        """
        return (self.rank - step) % self.size
