"""all_gather, broadcast, all_to_all and barrier, each algorithm a generator (see `reductions`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minipar.comm.chunks import at_place, chunk_bounds, fold, place_bounds
from minipar.comm.link import Link, Steps

Bounds = Sequence[tuple[int, int]]


def ring_all_gather(link: Link, x: np.ndarray, bounds: Bounds | None = None, first_step: int = 0) -> Steps:
    """Chunk r of x stands on rank r; afterwards all of x stands on every rank. In place.

    (p-1) alpha + n(p-1)/p beta: each rank passes on to its right what it has just received from its left.
    """
    p, r = link.size, link.rank
    if bounds is None:
        bounds = chunk_bounds(x.size, p)
    right, left = (r + 1) % p, (r - 1) % p
    start, stop = bounds[r]
    for step in range(p - 1):
        sent = x[start:stop]
        start, stop = bounds[(r - step - 1) % p]
        yield link.exchange(sent, right, x[start:stop], left, first_step + step)


def pairwise_all_gather(link: Link, x: np.ndarray, first_step: int = 0) -> Steps:
    """As `ring_all_gather`, but each rank sends its own chunk to all others, everything posted at once.

    (p-1) alpha + n(p-1)/p beta, and one wait.
    """
    p, r = link.size, link.rank
    bounds = chunk_bounds(x.size, p)
    own = x[bounds[r][0] : bounds[r][1]]
    requests = []
    for step in range(p - 1):
        start, stop = bounds[(r - step - 1) % p]
        requests.append(link.irecv(x[start:stop], (r - step - 1) % p, first_step + step))
        requests.append(link.isend(own, (r + step + 1) % p, first_step + step))
    yield requests


def gather_places(link: Link, x: np.ndarray, first_step: int) -> Steps:
    """The all-gather by recursive doubling among the places of `fold`, in place: what a pair has doubles each step."""
    q, extras, place = fold(link.size, link.rank)
    bounds = place_bounds(x.size, link.size)
    step, distance = first_step, 1
    while distance < q:
        partner = at_place(place ^ distance, extras)
        first = place & -distance  # the aligned block of `distance` places that this rank has in full
        other = first ^ distance
        sent = x[bounds[first][0] : bounds[first + distance - 1][1]]
        received = x[bounds[other][0] : bounds[other + distance - 1][1]]
        yield link.exchange(sent, partner, received, partner, step)
        distance *= 2
        step += 1


def recursive_doubling_all_gather(link: Link, x: np.ndarray) -> Steps:
    """As `ring_all_gather`, in lg p alpha + n(p-1)/p beta when p is a power of two."""
    _, extras, place = fold(link.size, link.rank)
    bounds = chunk_bounds(x.size, link.size)
    if place < 0:
        start, stop = bounds[link.rank]
        yield (link.isend(x[start:stop], link.rank + 1, 0),)
        yield (link.irecv(x, link.rank + 1, 1),)
        return
    if place < extras:
        start, stop = bounds[link.rank - 1]
        yield (link.irecv(x[start:stop], link.rank - 1, 0),)
    yield from gather_places(link, x, first_step=2)
    if place < extras:
        yield (link.isend(x, link.rank - 1, 1),)


def binomial_broadcast(link: Link, x: np.ndarray, root: int) -> Steps:
    """x of `root` to everyone, in place: who has it sends it to ever nearer ranks. lg p (alpha + n beta)."""
    p = link.size
    place = (link.rank - root) % p
    distance = 1
    while distance < p:
        if place & distance:
            yield (link.irecv(x, (link.rank - distance) % p, 0),)
            break
        distance *= 2
    # Here `distance` is the lowest set bit of the place (for the root: the first power of two not below p).
    while distance > 1:
        distance //= 2
        if place + distance < p:
            yield (link.isend(x, (link.rank + distance) % p, 0),)


def pairwise_all_to_all(link: Link, x: np.ndarray, out: np.ndarray) -> Steps:
    """Chunk j of x goes to rank j; out holds, in rank order, what each rank sent here.

    (p-1) alpha + n(p-1)/p beta: in step s every rank sends to the s-th on its right.
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
        yield link.exchange(x[start:stop], dest, received, source, step)


def dissemination_barrier(link: Link) -> Steps:
    """No rank leaves before every rank has come: in step s each tells the rank 2**s to its right. ceil(lg p) alpha."""
    p, r = link.size, link.rank
    nothing = link.scratch(0, np.dtype(np.uint8))
    step = 0
    while (distance := 1 << step) < p:
        yield link.exchange(nothing, (r + distance) % p, nothing, (r - distance) % p, step)
        step += 1


def gather(link: Link, rooms: Sequence[np.ndarray], root: int) -> Steps:
    """rooms[r] of every rank r to `root`, one after the other."""
    if link.rank != root:
        yield (link.isend(rooms[link.rank], root, 0),)
        return
    for source in range(link.size):
        if source != root:
            yield (link.irecv(rooms[source], source, 0),)
