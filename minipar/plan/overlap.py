"""Collectives of data parallelism next to computation: a stream for each kind, and what a rank
waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# From ZeRO stage 2 on: those of the unit that computes, and those that are being reduced.
FULL_GRADIENTS = 2


@dataclass(frozen=True)
class UnitPass:
    """A forward or backward pass of one unit: it waits for its parameters, computes, and sends its
    gradients.

    `gather`, `reduce` and `across` (UnitTime) are the seconds of these collectives, 0 where there
    is none.
    """

    seconds: float
    gather: float = 0.0
    reduce: float = 0.0
    across: float = 0.0


def overlapped(
    passes: Sequence[UnitPass], start: float = 0.0, stream: float = 0.0, few_gradients: bool = False
) -> tuple[float, float]:
    """Return (end of the computation, end of the communication) of passes that begin at `start`.

    The collectives run one after the other in a stream that is busy until `stream`, those between
    replicas in another one (FSDP2's two streams): the next reduce-scatter does not wait for them.
    The next unit's gather begins when a unit asks for its own parameters (FSDP's prefetch). With
    `few_gradients` (ZeRO stages 2 and 3) a unit waits until at most FULL_GRADIENTS whole gradients
    exist with its own.
    """
    now = start
    arrival = start
    far = stream
    reduced: list[float] = []
    for i, unit in enumerate(passes):
        if i == 0 and unit.gather:
            stream = arrival = max(stream, now) + unit.gather
        own_arrival = arrival
        if i + 1 < len(passes) and passes[i + 1].gather:
            stream = arrival = max(stream, now) + passes[i + 1].gather
        now = max(now, own_arrival)
        if few_gradients and len(reduced) >= FULL_GRADIENTS:
            now = max(now, reduced[-FULL_GRADIENTS])
        now += unit.seconds
        if unit.reduce or unit.across:
            stream = max(stream, now) + unit.reduce
            far = max(far, stream) + unit.across
            reduced.append(stream)
    return now, max(stream, far)
