"""How an array is cut over the ranks, and who takes part when their number is not a power of two."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def chunk_bounds(n: int, p: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each of the p chunks of n elements, cut as np.array_split cuts: the first n % p have one more.

    Chunk r belongs to rank r, in reduce_scatter, in all_gather and in all_to_all.
    """
    size, longer = divmod(n, p)
    starts = [r * size + min(r, longer) for r in range(p + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


@lru_cache(maxsize=1024)
def fold(p: int, rank: int) -> tuple[int, int, int]:
    """How `rank` takes part in an algorithm that wants a power of two: (q, extras, place).

    q is the largest power of two with q <= p, extras = p - q. The first 2*extras ranks pair up: each even one hands its
    data to the odd one above it and rests (place -1) until the result comes back. The others take places 0..q-1.
    NB: this is MPICH's way (Thakur, Rabenseifner and Gropp 2005, section 4.5).
    """
    q = 1 << (p.bit_length() - 1)
    extras = p - q
    if rank >= 2 * extras:
        return q, extras, rank - extras
    return q, extras, rank // 2 if rank % 2 else -1


def at_place(place: int, extras: int) -> int:
    """The rank that holds this place after folding: the inverse of `fold`."""
    return 2 * place + 1 if place < extras else place + extras


@lru_cache(maxsize=4096)
def place_bounds(n: int, p: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each place: the chunk of its rank, joined with the chunk of the rank that folded into it."""
    bounds = chunk_bounds(n, p)
    q, extras, _ = fold(p, 0)
    return tuple(
        (bounds[2 * place][0], bounds[2 * place + 1][1]) if place < extras else bounds[place + extras]
        for place in range(q)
    )
