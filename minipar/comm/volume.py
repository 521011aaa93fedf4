"""What each algorithm sends, in closed form. Tests compare these with the counter, using ==.

n elements over p ranks; c_r is the number of elements in chunk r (`chunk_bounds`); ranks are taken modulo p. For an
algorithm on a power of two, q is the largest power of two not above p and the first 2(p - q) ranks are folded in pairs
(`chunks.fold`); m_i is the number of elements of place i.
"""

from __future__ import annotations

from minipar.comm.chunks import chunk_bounds, fold, place_bounds


def wire_bytes(op: str, algorithm: str, n: int, itemsize: int, p: int, rank: int, root: int = 0) -> int:
    """Bytes that `rank` sends. n: elements of the whole array (all_reduce, reduce_scatter and all_to_all: of x;
    all_gather: of out). ValueError for "auto" and "mpi", of which nothing can be said.

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
    if p == 1:
        _known(op, algorithm)
        return 0
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
    q, extras, place = fold(p, rank)
    chunks = [stop - start for start, stop in chunk_bounds(n, p)]
    places = [stop - start for start, stop in place_bounds(n, p)]
    rests, returns = place < 0, 0 <= place < extras
    halving = n - places[place]
    doubling = sum(sum(places[(place & -d) : (place & -d) + d]) for d in _powers(q)) if not rests else 0
    match op, algorithm:
        case "all_reduce", "recursive_doubling":
            return n if rests else n * len(_powers(q)) + n * returns
        case "all_reduce", "recursive_halving":
            return n if rests else halving + doubling + n * returns
        case "reduce_scatter", "recursive_halving":
            return n if rests else halving + (chunks[rank - 1] if returns else 0)
        case "all_gather", "recursive_doubling":
            return chunks[rank] if rests else doubling + n * returns
    raise ValueError(f"no closed form for {op} {algorithm}")


def messages(op: str, algorithm: str, p: int, rank: int, root: int = 0) -> int:
    """Messages that `rank` sends; empty ones count, and their number does not depend on the array.

    ring, ordered   p-1 (all_reduce: 2(p-1))          pairwise        p-1
    recursive       lg q (all_reduce by halving: 2 lg q); + 1 to a folded neighbour; 1 for a resting rank
    binomial        the children in the tree           dissemination   ceil(lg p)
    """
    _known(op, algorithm)
    if p == 1:
        return 0
    if algorithm in ("ring", "ordered", "pairwise"):
        return (p - 1) * (2 if op == "all_reduce" else 1)
    if algorithm == "binomial":
        return _children(p, (rank - root) % p)
    if algorithm == "dissemination":
        return (p - 1).bit_length()
    q, extras, place = fold(p, rank)
    if place < 0:
        return 1
    rounds = len(_powers(q)) * (2 if (op, algorithm) == ("all_reduce", "recursive_halving") else 1)
    return rounds + (place < extras)


def _known(op: str, algorithm: str) -> None:
    from minipar.comm.selection import ALGORITHMS

    if algorithm == "mpi" or algorithm not in ALGORITHMS.get(op, ()):
        raise ValueError(f"no closed form for {op} {algorithm}")


def _powers(q: int) -> list[int]:
    """1, 2, 4, ... below q: one per round."""
    return [1 << k for k in range(q.bit_length() - 1)]


def _children(p: int, place: int) -> int:
    """Children of a place in the binomial tree: places place + d for d = 1, 2, .. below its lowest set bit."""
    lowest = place & -place if place else 1 << (p - 1).bit_length()
    return sum(place + d < p for d in _powers(lowest))
