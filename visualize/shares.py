"""The shares of a rank's time in a trace: computing, communicating, waiting for messages, and none of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .timeline import COMMUNICATION, COMPUTATION, Slice, Trace, window

Span = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Parts of a stretch of time, from 0 to 1. They overlap: an all-reduce may run behind a backward, or inside it."""

    computing: float  # the row of computation is coloured
    communicating: float  # in some lane messages are on their way: it is coloured, and not pale
    waiting: float  # in some lane the rank waits for messages: it is pale
    neither: float  # nothing is drawn


def covered(spans: Iterable[Span], begin: float, end: float) -> float:
    """Measure how many seconds from `begin` to `end` lie in at least one of the spans (start, stop)."""
    total, reached = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def rank_shares(tracks: dict[str, list[Slice]], begin: float, end: float) -> Shares:
    """Compute what one rank, whose tracks these are, does from `begin` to `end`.

    The waiting of a slice counts at its front, where the timeline draws it, wherever in the slice it was.
    """
    computing = [(one.start, one.end) for one in tracks.get(COMPUTATION, [])]
    lanes = [one for track, slices in tracks.items() if track.startswith(COMMUNICATION) for one in slices]
    waiting = [(one.start, one.start + one.wait) for one in lanes]
    communicating = [(one.start + one.wait, one.end) for one in lanes]
    whole = end - begin
    return Shares(
        covered(computing, begin, end) / whole,
        covered(communicating, begin, end) / whole,
        covered(waiting, begin, end) / whole,
        max(0.0, 1 - covered(computing + waiting + communicating, begin, end) / whole),  # not -1e-16
    )


def trace_values(trace: Trace, steps: slice | None = None) -> dict[str, Any]:
    """Return the seconds of each step and each rank's shares of the steps that `plot_timeline` would show."""
    begin, end, _ = window(trace, steps)
    return {
        "clock": trace.clock,
        "mesh": trace.mesh,
        "step_seconds": [stop - start for start, stop in trace.steps()],
        "shown": [begin, end],
        "ranks": {rank: asdict(rank_shares(tracks, begin, end)) for rank, tracks in trace.ranks.items()},
    }
