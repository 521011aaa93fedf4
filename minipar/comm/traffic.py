"""Traffic: the messages and bytes that a rank sends, counted, and the closed forms that the tests compare with ==."""

from __future__ import annotations

from minipar.comm.gathers import chunk_bounds, fold, place_bounds


class Traffic:
    """The account of one rank, shared by all communicators split from its world.

    Not counted are `algorithm="mpi"`, because the library does not say what it sends, and the 8-byte clock headers.
    `all_gather_bytes`, and whatever is built on it, is counted as operation "control".
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def counter(self, op: str, axis: str) -> list[int]:
        """Return the mutable [messages, bytes] of one operation on one axis."""
        key = (op, axis)
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = [0, 0]
        return count

    def messages(self, op: str | None = None, axis: str | None = None) -> int:
        """Return the number of messages sent. None means every operation or every axis."""
        return self._total(0, op, axis)

    def bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """Return the number of bytes sent. None means every operation or every axis."""
        return self._total(1, op, axis)

    def _total(self, which: int, op: str | None, axis: str | None) -> int:
        return sum(count[which] for (o, a), count in self._counts.items() if op in (None, o) and axis in (None, a))

    def reset(self) -> None:
        """Start again from zero. (A collective under way finishes on the old account.)"""
        self._counts = {}

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return {axis: {op: {"messages": m, "bytes": b}}}, ready for JSON."""
        table: dict[str, dict[str, dict[str, int]]] = {}
        for (op, axis), (messages, nbytes) in self._counts.items():
            table.setdefault(axis, {})[op] = {"messages": messages, "bytes": nbytes}
        return table


# Closed forms. n elements over p ranks. c_r is the number of elements in chunk r (`chunk_bounds`). Ranks are modulo p.
# In an algorithm that needs a power of two, q is the largest one not above p, and the first 2(p - q) ranks form pairs
# of a folded rank and a rank with a place (`gathers.fold`). m_i is the number of elements of place i.


def wire_bytes(op: str, algorithm: str, n: int, itemsize: int, p: int, rank: int, root: int = 0) -> int:
    """Return the bytes that `rank` sends. ValueError for "auto" and "mpi", which have no closed form.

    n is the number of elements of the whole array: of x for all_reduce, reduce_scatter and all_to_all, of out for
    all_gather.

    all_reduce      ring                 2n - c_r - c_{r+1}          (= 2n(p-1)/p for equal chunks)
                    ordered              n - c_r + (p-1) c_r         (the same for equal chunks)
                    recursive_doubling   n lg q for a place; + n to return a folded pair's result; n for a resting rank
                    recursive_halving    (n - m_i) + (the doubling below), fold as above
    reduce_scatter  ring, ordered        n - c_r
                    recursive_halving    n - m_i; + c_{r-1} to a folded neighbour; n for a resting rank
    all_gather      ring                 n - c_{r+1}
                    pairwise             (p-1) c_r
                    recursive_doubling   sum over d = 1, 2, 4, .. < q of the elements in the aligned block of d places
                                         around i; + n to a folded neighbour; c_r for a resting rank
    all_to_all      pairwise             n - c_r
    broadcast       binomial             n per child in the tree
    barrier         dissemination        0
    """
    sizes = [stop - start for start, stop in chunk_bounds(n, p)]
    own, right = sizes[rank], sizes[(rank + 1) % p]
    match op, algorithm:
        case "all_reduce", "ring":
            elements = 2 * n - own - right
        case "all_reduce", "ordered":
            elements = n - own + (p - 1) * own
        case "reduce_scatter", "ring" | "ordered":
            elements = n - own
        case "all_gather", "ring":
            elements = n - right
        case "all_gather", "pairwise":
            elements = (p - 1) * own
        case "all_to_all", "pairwise":
            elements = n - own
        case "broadcast", "binomial":
            elements = n * _children(p, (rank - root) % p)
        case "barrier", "dissemination":
            elements = 0
        case _:
            elements = _folded_elements(op, algorithm, n, p, rank)
    return elements * itemsize


def _folded_elements(op: str, algorithm: str, n: int, p: int, rank: int) -> int:
    """Return the elements that `rank` sends in an algorithm that needs a power of two."""
    chunks = [stop - start for start, stop in chunk_bounds(n, p)]
    places = [stop - start for start, stop in place_bounds(n, p)]
    q, extras, place = fold(p, rank)
    rests, returns = place < 0, 0 <= place < extras
    blocks = [slice(place & -d, (place & -d) + d) for d in _powers(q)]
    match op, algorithm:
        case "all_reduce", "recursive_doubling":
            return n if rests else n * len(blocks) + n * returns
        case "all_reduce", "recursive_halving":
            return n if rests else n - places[place] + sum(sum(places[block]) for block in blocks) + n * returns
        case "reduce_scatter", "recursive_halving":
            return n if rests else n - places[place] + (chunks[rank - 1] if returns else 0)
        case "all_gather", "recursive_doubling":
            return chunks[rank] if rests else sum(sum(places[block]) for block in blocks) + n * returns
    raise _no_closed_form(op, algorithm)


def messages(op: str, algorithm: str, p: int, rank: int, root: int = 0) -> int:
    """Return the messages that `rank` sends. Empty ones count, so the array's size does not matter.

    ring, ordered   p-1 (all_reduce: 2(p-1))           pairwise        p-1
    recursive       lg q (all_reduce by halving: 2 lg q); + 1 to a folded neighbour; 1 for a resting rank
    binomial        the children in the tree           dissemination   ceil(lg p)
    """
    q, extras, place = fold(p, rank)
    rounds = len(_powers(q))
    match op, algorithm:
        case "all_reduce", "ring" | "ordered":
            return 2 * (p - 1)
        case ("reduce_scatter", "ring" | "ordered") | ("all_gather", "ring" | "pairwise") | ("all_to_all", "pairwise"):
            return p - 1
        case "broadcast", "binomial":
            return _children(p, (rank - root) % p)
        case "barrier", "dissemination":
            return (p - 1).bit_length()
        case "all_reduce", "recursive_halving":
            rounds *= 2
        case ("all_reduce" | "all_gather", "recursive_doubling") | ("reduce_scatter", "recursive_halving"):
            pass
        case _:
            raise _no_closed_form(op, algorithm)
    return 1 if place < 0 else rounds + (place < extras)


def _no_closed_form(op: str, algorithm: str) -> ValueError:
    return ValueError(f"no closed form for {op} {algorithm}")


def _powers(q: int) -> list[int]:
    """Return 1, 2, 4, ... below q: one per round."""
    return [1 << k for k in range(q.bit_length() - 1)]


def _children(p: int, place: int) -> int:
    """Count the children of a place in the binomial tree: place + d for d = 1, 2, .. below the lowest set bit."""
    lowest = place & -place if place else 1 << (p - 1).bit_length()
    return sum(place + d < p for d in _powers(lowest))
