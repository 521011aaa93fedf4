"""The collectives' algorithms, each a generator of messages, and the chunks of an array that they exchange.

A generator posts messages with `link.isend(array, dest)` and `link.irecv(array, source)` and yields
the requests that must be done before it continues. Messages from one rank to another arrive in the
order in which they were sent. Who drives the generator (work.py) decides how to wait, so the same
lines serve the blocking call and the asynchronous one. `chain` makes one algorithm of several that
run one after another.

Arrays are flat. There are p ranks, n bytes, and chunk r = `chunk_bounds(n, p)[r]`. A message costs
alpha, a byte beta, and adding a byte gamma. Algorithms for a power of two `fold` the extra ranks
first. NB: arithmetic is done in the array's own dtype, as NCCL and MPI do; float16 sums lose what
float16 loses.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise

import numpy as np

from minipar.comm.transport import Link, Request, Steps
from minipar.memory import hold

Bounds = Sequence[tuple[int, int]]
Combine = Callable[..., object]  # np.add or np.maximum, called as combine(a, b, out=c)


def scratch(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory for what arrives, which the ledger of memory counts."""
    array = np.empty(shape, dtype)
    hold("buffers", array)
    return array


@cache
def chunk_bounds(n: int, p: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each rank's chunk of n elements, as np.array_split cuts: the first n % p are longer."""
    size, longer = divmod(n, p)
    starts = [r * size + min(r, longer) for r in range(p + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


def bounds_of(counts: Sequence[int] | np.ndarray) -> Bounds:
    """Return (start, stop) of stretches of these lengths, one after another."""
    return list(pairwise(accumulate(counts, initial=0)))


def chunks(x: np.ndarray, p: int, bounds: Bounds | None = None) -> list[np.ndarray]:
    """Return views of the p chunks of x."""
    return [x[start:stop] for start, stop in bounds or chunk_bounds(x.size, p)]


@cache
def virtual_ranks(p: int, rank: int) -> tuple[int, int, int]:
    """Return what `rank` is in an algorithm that needs a power of two: (q, extras, virtual).

    q is the largest power of two with q <= p, and extras = p - q. The first 2*extras ranks form
    pairs. Each even rank gives its data to the odd rank above and rests until the result is back:
    its virtual rank is -1. The others have virtual ranks 0..q-1. NB: this is MPICH's way, and its
    `newrank` (Thakur, Rabenseifner and Gropp 2005, section 4.5).
    """
    q = 1 << (p.bit_length() - 1)
    extras = p - q
    if rank >= 2 * extras:
        return q, extras, rank - extras
    return q, extras, rank // 2 if rank % 2 else -1


def real_rank(virtual: int, extras: int) -> int:
    """Return the rank that has this virtual rank after folding: the inverse of `virtual_ranks`."""
    return 2 * virtual + 1 if virtual < extras else virtual + extras


@cache
def virtual_bounds(n: int, p: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) for each virtual rank: its rank's chunk, joined with that of a rank folded into it."""
    bounds = chunk_bounds(n, p)
    _, extras, _ = virtual_ranks(p, 0)
    pairs = [(bounds[2 * virtual][0], bounds[2 * virtual + 1][1]) for virtual in range(extras)]
    return (*pairs, *bounds[2 * extras :])


def ring_all_gather(link: Link, x: np.ndarray) -> Steps:
    """Gather all of x on every rank, in place: at first each rank r has chunk r of x.

    (p-1) alpha + n(p-1)/p beta. Each rank sends to its right the chunk that it has just received from its left.
    """
    p = link.size
    r = link.rank
    parts = chunks(x, p)
    for step in range(p - 1):
        yield (
            link.isend(parts[(r - step) % p], (r + 1) % p),
            link.irecv(parts[(r - step - 1) % p], (r - 1) % p),
        )


def pairwise_all_gather(link: Link, x: np.ndarray) -> Steps:
    """Gather as the ring does, but send the own chunk to all others at once: (p-1) alpha + n(p-1)/p beta, one wait."""
    p = link.size
    r = link.rank
    parts = chunks(x, p)
    requests: list[Request] = []
    for step in range(p - 1):
        dest = (r + step + 1) % p
        source = (r - step - 1) % p
        requests.append(link.irecv(parts[source], source))
        requests.append(link.isend(parts[r], dest))
    yield requests


def gather_by_doubling(link: Link, x: np.ndarray) -> Steps:
    """Gather x among the virtual ranks, in place, by recursive doubling: each step doubles what a pair has."""
    q, extras, virtual = virtual_ranks(link.size, link.rank)
    bounds = virtual_bounds(x.size, link.size)
    distance = 1
    while virtual >= 0 and distance < q:
        partner = real_rank(virtual ^ distance, extras)
        first = virtual & -distance  # the aligned block of virtual ranks that it has in full
        other = first ^ distance
        sent = x[bounds[first][0] : bounds[first + distance - 1][1]]
        received = x[bounds[other][0] : bounds[other + distance - 1][1]]
        yield link.isend(sent, partner), link.irecv(received, partner)
        distance *= 2


def unfold(link: Link, x: np.ndarray, out: np.ndarray) -> Steps:
    """Return x to the rank that was folded into this one, which waits for it in its `out`."""
    _, extras, virtual = virtual_ranks(link.size, link.rank)
    if virtual < 0:
        yield (link.irecv(out, link.rank + 1),)
    elif virtual < extras:
        yield (link.isend(x, link.rank - 1),)


def binomial_broadcast(link: Link, x: np.ndarray, root: int) -> Steps:
    """Copy x of `root` to every rank, in place, along a binomial tree. lg p (alpha + n beta)."""
    p = link.size
    virtual = (link.rank - root) % p
    distance = virtual & -virtual  # the lowest set bit of the virtual rank
    if virtual == 0:
        distance = 1 << (p - 1).bit_length()  # the root: the first power of two not below p
    else:
        yield (link.irecv(x, (link.rank - distance) % p),)
    while distance > 1:
        distance //= 2
        if virtual + distance < p:
            yield (link.isend(x, (link.rank + distance) % p),)


def pairwise_all_to_all(
    link: Link, x: np.ndarray, out: np.ndarray, sends: Bounds, receives: Bounds
) -> Steps:
    """Send chunk j of x to rank j; set out = the chunks sent here, in rank order. (p-1) alpha + n(p-1)/p beta.

    `sends` and `receives` are the chunks of x and of out. Empty ones are sent, too.
    """
    p = link.size
    r = link.rank
    sent = chunks(x, p, sends)
    received = chunks(out, p, receives)
    received[r][...] = sent[r]
    for step in range(p - 1):
        dest = (r + step + 1) % p
        source = (r - step - 1) % p
        yield link.isend(sent[dest], dest), link.irecv(received[source], source)


def dissemination_barrier(link: Link) -> Steps:
    """Return when every rank has called.

    In step s each rank sends to the rank 2**s to its right. ceil(lg p) alpha.
    """
    p = link.size
    r = link.rank
    nothing = np.empty(0, np.uint8)
    for step in range((p - 1).bit_length()):
        yield link.isend(nothing, (r + 2**step) % p), link.irecv(nothing, (r - 2**step) % p)


def ring_reduce_scatter(link: Link, x: np.ndarray, out: np.ndarray, combine: Combine) -> Steps:
    """Set out = chunk r of the sum: each partial sum goes once round the ring, and every rank adds its part to it.

    (p-1) alpha + n(p-1)/p (beta + gamma): the fewest bytes possible (Patarasuk and Yuan 2009, section 4).
    Chunk j is summed in the order j+1, j+2, ..., j: fixed, but not the rank order. `x` is not changed.
    """
    p = link.size
    r = link.rank
    own = chunks(x, p)
    incoming, outgoing = scratch((2, own[0].size), x.dtype)
    partial = own[r - 1]  # the sum so far, first this rank's own contribution to its left chunk
    for step in range(p - 1):
        mine = own[(r - step - 2) % p]
        received = incoming[: mine.size]
        yield link.isend(partial, (r + 1) % p), link.irecv(received, (r - 1) % p)
        partial = out if step == p - 2 else received
        combine(received, mine, out=partial)
        incoming, outgoing = outgoing, incoming


def ring_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = the sum: reduce-scatter, then all-gather. 2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma."""
    # The result may overwrite this rank's own chunk: the reduce-scatter reads that chunk last, when it writes it.
    own = chunks(x, link.size)[link.rank]
    return chain(ring_reduce_scatter(link, x, own, combine), ring_all_gather(link, x))


def fold(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Send x of each rank without a virtual rank to its neighbour, which adds it to its own.

    `unfold` is the way back.
    """
    _, extras, virtual = virtual_ranks(link.size, link.rank)
    if virtual < 0:
        yield (link.isend(x, link.rank + 1),)
    elif virtual < extras:
        received = scratch(x.shape, x.dtype)
        yield (link.irecv(received, link.rank - 1),)
        combine(x, received, out=x)


def recursive_doubling_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = the sum: at distance 1, 2, 4, ... pairs exchange all they have, and both add.

    lg p (alpha + n beta + n gamma): the fewest steps, for small arrays. Both ranks of a pair add the same two values,
    so all ranks end with the same bits.
    """
    q, extras, virtual = virtual_ranks(link.size, link.rank)
    if extras:
        yield from fold(link, x, combine)
    received = scratch(x.shape, x.dtype)
    distance = 1
    while virtual >= 0 and distance < q:
        partner = real_rank(virtual ^ distance, extras)
        yield link.isend(x, partner), link.irecv(received, partner)
        combine(x, received, out=x)
        distance *= 2
    if extras:
        yield from unfold(link, x, x)


def _halve(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x[virtual_bounds[virtual]] = the sum: the reduce-scatter half of Rabenseifner's algorithm, in place.

    At distance q/2, q/4, ..., 1 a pair splits the part that it still shares. Each rank sends one
    half and adds up the other. The rest of x has no meaning afterwards.
    """
    q, extras, virtual = virtual_ranks(link.size, link.rank)
    if extras:
        yield from fold(link, x, combine)
    bounds = virtual_bounds(x.size, link.size)
    first = 0
    last = q  # the virtual ranks whose sum this rank still shares
    while virtual >= 0 and last - first > 1:
        middle = (first + last) // 2
        partner = real_rank(virtual ^ (middle - first), extras)
        start = bounds[first][0]
        cut = bounds[middle][0]
        stop = bounds[last - 1][1]
        if virtual < middle:
            kept = x[start:cut]
            sent = x[cut:stop]
            last = middle
        else:
            kept = x[cut:stop]
            sent = x[start:cut]
            first = middle
        received = scratch(kept.shape, kept.dtype)
        yield link.isend(sent, partner), link.irecv(received, partner)
        combine(kept, received, out=kept)


def recursive_halving_all_reduce(link: Link, x: np.ndarray, combine: Combine) -> Steps:
    """Set x = the sum: recursive halving, then an all-gather by recursive doubling (Rabenseifner 2004).

    2 lg p alpha + 2n(p-1)/p beta + n(p-1)/p gamma when p is a power of two. Otherwise the fold adds
    2 messages of n.
    """
    return chain(_halve(link, x, combine), gather_by_doubling(link, x), unfold(link, x, x))


def recursive_halving_reduce_scatter(
    link: Link, x: np.ndarray, out: np.ndarray, combine: Combine
) -> Steps:
    """Set out = chunk r of the sum. lg p alpha + n(p-1)/p (beta + gamma) when p is a power of two."""
    total = x.copy()  # halving overwrites its input
    yield from _halve(link, total, combine)
    parts = chunks(total, link.size)
    _, extras, virtual = virtual_ranks(link.size, link.rank)
    if extras:
        yield from unfold(link, parts[link.rank - 1], out)
    if virtual >= 0:
        out[...] = parts[link.rank]


def ordered_reduce_scatter(link: Link, x: np.ndarray, out: np.ndarray, combine: Combine) -> Steps:
    """Set out = chunk r of x_0 + x_1 + ... + x_{p-1}, added from left to right: the bits of one device accumulating.

    (p-1) alpha + n(p-1)/p (beta + gamma), as the ring, but with scratch for n elements: all messages are posted at
    once, pairwise, and each contribution is added in its turn. Ranks wait for one another once instead of p-1 times,
    which saves the most time when they share cores.
    """
    p = link.size
    r = link.rank
    parts = chunks(x, p)
    rows = scratch((p, parts[r].size), x.dtype)
    contributions = list(rows)
    contributions[r] = parts[r]
    receives: dict[int, Request] = {}
    sends = []
    for step in range(p - 1):
        dest = (r + step + 1) % p
        source = (r - step - 1) % p
        receives[source] = link.irecv(contributions[source], source)
        sends.append(link.isend(parts[dest], dest))
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
    """Set x = x_0 + x_1 + ... + x_{p-1}, added from left to right, at the ring's cost in two rounds of messages."""
    own = chunks(x, link.size)[link.rank]
    return chain(ordered_reduce_scatter(link, x, own, combine), pairwise_all_gather(link, x))


# The algorithms of each operation, by name. A package may add its own.
ALGORITHMS: dict[str, dict[str, Callable[..., Steps]]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "recursive_doubling": recursive_doubling_all_reduce,
        "recursive_halving": recursive_halving_all_reduce,
        "ordered": ordered_all_reduce,
    },
    "reduce_scatter": {
        "ring": ring_reduce_scatter,
        "recursive_halving": recursive_halving_reduce_scatter,
        "ordered": ordered_reduce_scatter,
    },
    "all_gather": {"ring": ring_all_gather, "pairwise": pairwise_all_gather},
    "all_to_all": {"pairwise": pairwise_all_to_all},
    "broadcast": {"binomial": binomial_broadcast},
    "barrier": {"dissemination": dissemination_barrier},
}
