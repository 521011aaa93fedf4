"""The part of a pipeline's idle time in which a rank waits for a message that is on its way."""

from __future__ import annotations

from minipar.parallel.pipeline.actions import Action, Time, Timeline


def awaited_messages(timeline: Timeline) -> list[list[tuple[Time, Time]]]:
    """Return for each rank the spans (start, end) in which it does nothing and a message that it needs is on its way.

    A message leaves when its result is made and takes `timeline.comm`. While the rank computes, nothing waits for it.
    """
    made: dict[Action, Time] = {}
    for row in timeline.ranks:
        for slot in row:
            for half in slot.action.halves:
                made[half] = slot.end
    home = timeline.schedule.home
    awaited: list[list[tuple[Time, Time]]] = []
    for rank, row in enumerate(timeline.ranks):
        spans = []
        free: Time = 0
        for slot in row:
            needs = [need for need in timeline.schedule.needs(slot.action) if home[need.stage] != rank]
            for left in sorted(made[need] for need in needs):
                start, end = max(free, left), min(left + timeline.comm, slot.start)
                if start < end:
                    spans.append((start, end))
                    free = end
            free = slot.end
        awaited.append(spans)
    return awaited
