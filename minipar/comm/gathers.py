"""Chunks of an array, and all_gather, broadcast, all_to_all and barrier, each a generator (see reductions.py)."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from minipar.comm.transport import Link, Steps

Bounds = Sequence[tuple[int, int]]


@lru_cache(maxsize=4096)
def chunk_bounds(n: int, p: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each of the p chunks of n elements, as np.array_split cuts: the first n % p are longer.

    Chunk r belongs to rank r in reduce_scatter, all_gather and all_to_all.
    """
    size, longer = divmod(n, p)
    starts = [r * size + min(r, longer) for r in range(p + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


@lru_cache(maxsize=1024)
def fold(p: int, rank: int) -> tuple[int, int, int]:
    """Return the part of `rank` in an algorithm that needs a power of two: (q, extras, place).

    q is the largest power of two with q <= p, and extras = p - q. The first 2*extras ranks form pairs. Each even rank
    gives its data to the odd rank above and rests (place -1) until the result is back. The others have places 0..q-1.
    NB: this is MPICH's way (Thakur, Rabenseifner and Gropp 2005, section 4.5).
    """
    q = 1 << (p.bit_length() - 1)
    extras = p - q
    if rank >= 2 * extras:
        return q, extras, rank - extras
    return q, extras, rank // 2 if rank % 2 else -1


def at_place(place: int, extras: int) -> int:
    """Return the rank that has this place after folding: the inverse of `fold`."""
    return 2 * place + 1 if place < extras else place + extras


@lru_cache(maxsize=4096)
def place_bounds(n: int, p: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each place: the chunk of its rank, joined with the chunk of a rank folded into it."""
    bounds = chunk_bounds(n, p)
    q, extras, _ = fold(p, 0)
    return tuple(
        (bounds[2 * place][0], bounds[2 * place + 1][1]) if place < extras else bounds[place + extras]
        for place in range(q)
    )


def ring_all_gather(link: Link, x: np.ndarray, bounds: Bounds | None = None) -> Steps:
    """Gather all of x on every rank, in place: at first each rank r has chunk r of x.

    (p-1) alpha + n(p-1)/p beta. Each rank sends to its right the chunk that it has just received from its left.
    """
    p, r = link.size, link.rank
    if bounds is None:
        bounds = chunk_bounds(x.size, p)
    right, left = (r + 1) % p, (r - 1) % p
    start, stop = bounds[r]
    for step in range(p - 1):
        sent = x[start:stop]
        start, stop = bounds[(r - step - 1) % p]
        yield link.isend(sent, right), link.irecv(x[start:stop], left)


def pairwise_all_gather(link: Link, x: np.ndarray) -> Steps:
    """Gather as the ring does, but send the own chunk to all others at once: (p-1) alpha + n(p-1)/p beta, one wait."""
    p, r = link.size, link.rank
    bounds = chunk_bounds(x.size, p)
    own = x[bounds[r][0] : bounds[r][1]]
    requests = []
    for step in range(p - 1):
        start, stop = bounds[(r - step - 1) % p]
        requests.append(link.irecv(x[start:stop], (r - step - 1) % p))
        requests.append(link.isend(own, (r + step + 1) % p))
    yield requests


def gather_places(link: Link, x: np.ndarray) -> Steps:
    """Gather x among the places of `fold`, in place, by recursive doubling: each step doubles what a pair has."""
    q, extras, place = fold(link.size, link.rank)
    bounds = place_bounds(x.size, link.size)
    distance = 1
    while place >= 0 and distance < q:
        partner = at_place(place ^ distance, extras)
        first = place & -distance  # the aligned block of `distance` places that this rank has in full
        other = first ^ distance
        sent = x[bounds[first][0] : bounds[first + distance - 1][1]]
        received = x[bounds[other][0] : bounds[other + distance - 1][1]]
        yield link.isend(sent, partner), link.irecv(received, partner)
        distance *= 2


def unfold(link: Link, x: np.ndarray, out: np.ndarray) -> Steps:
    """Return x to the rank that was folded into this one, which waits for it in its `out`."""
    _, extras, place = fold(link.size, link.rank)
    if place < 0:
        yield (link.irecv(out, link.rank + 1),)
    elif place < extras:
        yield (link.isend(x, link.rank - 1),)


def recursive_doubling_all_gather(link: Link, x: np.ndarray) -> Steps:
    """Gather as `ring_all_gather` does, in lg p alpha + n(p-1)/p beta when p is a power of two."""
    _, extras, place = fold(link.size, link.rank)
    bounds = chunk_bounds(x.size, link.size)
    if place < 0:
        start, stop = bounds[link.rank]
        yield (link.isend(x[start:stop], link.rank + 1),)
    elif place < extras:
        start, stop = bounds[link.rank - 1]
        yield (link.irecv(x[start:stop], link.rank - 1),)
    yield from gather_places(link, x)
    if extras:
        yield from unfold(link, x, x)


def binomial_broadcast(link: Link, x: np.ndarray, root: int) -> Steps:
    """Copy x of `root` to every rank, in place, along a binomial tree. lg p (alpha + n beta)."""
    p = link.size
    place = (link.rank - root) % p
    distance = 1
    while distance < p:
        if place & distance:
            yield (link.irecv(x, (link.rank - distance) % p),)
            break
        distance *= 2
    # Here `distance` is the lowest set bit of the place (for the root: the first power of two not below p).
    while distance > 1:
        distance //= 2
        if place + distance < p:
            yield (link.isend(x, (link.rank + distance) % p),)


def pairwise_all_to_all(link: Link, x: np.ndarray, out: np.ndarray) -> Steps:
    """Send chunk j of x to rank j. `out` receives, in rank order, the chunks that the ranks sent to this one.

    (p-1) alpha + n(p-1)/p beta. In step s every rank sends to the rank s+1 places to its right.
    """
    p, r = link.size, link.rank
    bounds = chunk_bounds(x.size, p)
    start, stop = bounds[r]
    own = stop - start
    out[r * own : (r + 1) * own] = x[start:stop]
    for step in range(p - 1):
        dest, source = (r + step + 1) % p, (r - step - 1) % p
        start, stop = bounds[dest]
        received = out[source * own : (source + 1) * own]
        yield link.isend(x[start:stop], dest), link.irecv(received, source)


def dissemination_barrier(link: Link) -> Steps:
    """Return when every rank has called. In step s each rank sends to the rank 2**s to its right. ceil(lg p) alpha."""
    p, r = link.size, link.rank
    nothing = link.scratch(0, np.dtype(np.uint8))
    distance = 1
    while distance < p:
        yield link.isend(nothing, (r + distance) % p), link.irecv(nothing, (r - distance) % p)
        distance *= 2


def gather(link: Link, x: np.ndarray, bounds: Bounds, root: int) -> Steps:
    """Gather all of x on `root`, in place: at first each rank r has x from bounds[r]."""
    chunks = [x[start:stop] for start, stop in bounds]
    if link.rank == root:
        yield [link.irecv(chunk, source) for source, chunk in enumerate(chunks) if source != root]
    else:
        yield [link.isend(chunks[link.rank], root)]
