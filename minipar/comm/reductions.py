"""all_reduce and reduce_scatter, each algorithm a generator.

A generator posts messages with `link.isend(array, dest)` and `link.irecv(array, source)` and yields the requests that
must be done before it continues. Messages from one rank to another arrive in the order in which they were sent. Who
drives the generator (work.py) decides how to wait, so the same lines serve the blocking call and the asynchronous one.

Arrays are flat. There are p ranks, n bytes, and chunk r = `chunk_bounds(n, p)[r]`. A message costs alpha, a byte beta,
and adding a byte gamma. Algorithms for a power of two *fold* the extra ranks first (gathers.py). Each of the q places
then belongs to one rank. A rank without a place (place < 0) gives its data to a neighbour and gets the result back.

NB: arithmetic is done in the array's own dtype, as NCCL and MPI do; float16 sums lose what float16 loses.
"""

from collections.abc import Callable

import numpy as np

from minipar.comm.gathers import (
    at_place,
    chunk_bounds,
    fold,
    gather_places,
    pairwise_all_gather,
    place_bounds,
    ring_all_gather,
    unfold,
)
from minipar.comm.transport import Link, Request, Steps

Combine = Callable[..., object]  # np.add or np.maximum, called as combine(a, b, out=c)


def ring_reduce_scatter(link: Link, x: np.ndarray, out: np.ndarray, combine: Combine) -> Steps:
    """Set out = chunk r of the sum: each partial sum goes once round the ring, and every rank adds its part to it.

    (p-1) alpha + n(p-1)/p (beta + gamma): the fewest bytes possible (Patarasuk and Yuan 2009, section 4).
    Chunk j is summed in the order j+1, j+2, ..., j: fixed, but not the rank order. `x` is not changed.
    """
    p, r = link.size, link.rank
    bounds = chunk_bounds(x.size, p)
    right, left = (r + 1) % p, (r - 1) % p
    longest = bounds[0][1] - bounds[0][0]
    incoming, outgoing = link.scratch(2 * longest, x.dtype).reshape(2, longest)
    start, stop = bounds[left]
    partial = x[start:stop]  # the sum so far, first this rank's own contribution to its left chunk
    for step in range(p - 1):
        start, stop = bounds[(r - step - 2) % p]
        received = incoming[: stop - start]
        yield link.isend(partial, right), link.irecv(received, left)
        partial = out if step == p - 2 else received
        combine(received, x[start:stop], out=partial)
        incoming, outgoing = outgoing, incoming


def ring_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = the sum: a ring reduce-scatter, then a ring all-gather, with the same bits as calling the two.

    2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma.
    """
    start, stop = chunk_bounds(x.size, link.size)[link.rank]
    # The result may overwrite this rank's own chunk: the reduce-scatter reads that chunk last, when it writes it.
    yield from ring_reduce_scatter(link, x, x[start:stop], combine)
    yield from ring_all_gather(link, x)


def _fold(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Send x of each rank without a place to its neighbour, which adds it to its own. `unfold` is the way back."""
    _, extras, place = fold(link.size, link.rank)
    if place < 0:
        yield (link.isend(x, link.rank + 1),)
    elif place < extras:
        received = link.scratch(x.size, x.dtype)
        yield (link.irecv(received, link.rank - 1),)
        combine(x, received, out=x)


def recursive_doubling_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = the sum: at distance 1, 2, 4, ... pairs exchange all they have, and both add.

    lg p (alpha + n beta + n gamma): the fewest steps, for small arrays. Both ranks of a pair add the same two values,
    so all ranks end with the same bits.
    """
    q, extras, place = fold(link.size, link.rank)
    if extras:
        yield from _fold(link, x, combine)
    received = link.scratch(x.size, x.dtype)
    distance = 1
    while place >= 0 and distance < q:
        partner = at_place(place ^ distance, extras)
        yield link.isend(x, partner), link.irecv(received, partner)
        combine(x, received, out=x)
        distance *= 2
    if extras:
        yield from unfold(link, x, x)


def _halve(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x[place_bounds[place]] = the sum: the reduce-scatter half of Rabenseifner's algorithm, in place.

    At distance q/2, q/4, ..., 1 a pair splits the part that it still shares. Each rank sends one half and adds up the
    other. The rest of x has no meaning afterwards.
    """
    q, extras, place = fold(link.size, link.rank)
    if extras:
        yield from _fold(link, x, combine)
    bounds = place_bounds(x.size, link.size)
    first, last = 0, q  # the places whose sum this rank still shares
    while place >= 0 and last - first > 1:
        middle = (first + last) // 2
        partner = at_place(place ^ (middle - first), extras)
        start, cut, stop = bounds[first][0], bounds[middle][0], bounds[last - 1][1]
        if place < middle:
            kept, sent, last = x[start:cut], x[cut:stop], middle
        else:
            kept, sent, first = x[cut:stop], x[start:cut], middle
        received = link.scratch(x.size, x.dtype)[: kept.size]
        yield link.isend(sent, partner), link.irecv(received, partner)
        combine(kept, received, out=kept)


def recursive_halving_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = the sum: recursive halving, then an all-gather by recursive doubling (Rabenseifner 2004).

    2 lg p alpha + 2n(p-1)/p beta + n(p-1)/p gamma when p is a power of two. Otherwise the fold adds 2 messages of n.
    """
    yield from _halve(link, x, combine)
    yield from gather_places(link, x)
    yield from unfold(link, x, x)


def recursive_halving_reduce_scatter(link: Link, x: np.ndarray, out: np.ndarray, combine: Combine) -> Steps:
    """Set out = chunk r of the sum. lg p alpha + n(p-1)/p (beta + gamma) when p is a power of two.

    The sum is made in a copy, because halving overwrites its input. A folded neighbour gets its chunk back.
    """
    total = x.copy()
    yield from _halve(link, total, combine)
    bounds = chunk_bounds(x.size, link.size)
    _, extras, place = fold(link.size, link.rank)
    if extras:
        start, stop = bounds[link.rank - 1]
        yield from unfold(link, total[start:stop], out)
    if place >= 0:
        start, stop = bounds[link.rank]
        out[...] = total[start:stop]


def ordered_reduce_scatter(link: Link, x: np.ndarray, out: np.ndarray, combine: Combine) -> Steps:
    """Set out = chunk r of x_0 + x_1 + ... + x_{p-1}, added from left to right: the bits of one device accumulating.

    (p-1) alpha + n(p-1)/p (beta + gamma), as the ring, but with scratch for n elements: all messages are posted at
    once, pairwise, and each contribution is added in its turn. Ranks wait for one another once instead of p-1 times,
    which saves the most time when they share cores.
    """
    p, r = link.size, link.rank
    bounds = chunk_bounds(x.size, p)
    start, stop = bounds[r]
    own = stop - start
    rows = link.scratch(p * own, x.dtype).reshape(p, own)
    contributions = list(rows)
    contributions[r] = x[start:stop]
    receives: dict[int, Request] = {}
    sends = []
    for step in range(p - 1):
        dest, source = (r + step + 1) % p, (r - step - 1) % p
        receives[source] = link.irecv(contributions[source], source)
        sends.append(link.isend(x[bounds[dest][0] : bounds[dest][1]], dest))
    total = contributions[0]
    for source in range(p):
        if source != r:
            yield (receives[source],)
        if source > 0:
            partial = out if source == p - 1 else rows[r]  # row r is free: this rank's own part is in x
            combine(total, contributions[source], out=partial)
            total = partial
    yield sends


def ordered_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = x_0 + x_1 + ... + x_{p-1}, added from left to right. Then each rank sends its chunk to all others.

    2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma, in two rounds of messages.
    """
    start, stop = chunk_bounds(x.size, link.size)[link.rank]
    yield from ordered_reduce_scatter(link, x, x[start:stop], combine)
    yield from pairwise_all_gather(link, x)
