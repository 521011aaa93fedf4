"""What data parallelism sends beside the computation: a stream of collectives, each of which begins when its data is
there and the one before it is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FULL_GRADIENTS = 2  # from ZeRO stage 2 on: the unit's at work, and the one whose reduction is under way


@dataclass(frozen=True)
class Work:
    """A unit's turn in a pass: it waits for its parameters (`gather` seconds, 0 if they are there), computes, and sends
    its gradients (`reduce` seconds, 0 if it does not).
    """

    seconds: float
    gather: float = 0.0
    reduce: float = 0.0


def run(
    work: Sequence[Work], now: float = 0.0, stream: float = 0.0, few_gradients: bool = False
) -> tuple[float, float]:
    """(when the last unit is done, when the stream is) for a pass that begins at `now` beside a stream that is busy
    until `stream`.

    The next unit's parameters start on their way when a unit asks for its own (FSDP's prefetch). `few_gradients`: a
    unit waits until no more than FULL_GRADIENTS whole ones would be there with its own (ZeRO stage 2 and 3).
    """
    arrives = now
    reduced: list[float] = []
    for i, unit in enumerate(work):
        if i == 0 and unit.gather:
            stream = max(stream, now) + unit.gather
            arrives = stream
        own = arrives
        if i + 1 < len(work) and work[i + 1].gather:
            stream = max(stream, now) + work[i + 1].gather
            arrives = stream
        now = max(now, own)
        if few_gradients and len(reduced) >= FULL_GRADIENTS:
            now = max(now, reduced[-FULL_GRADIENTS])
        now += unit.seconds
        if unit.reduce:
            stream = max(stream, now) + unit.reduce
            reduced.append(stream)
    return now, stream
