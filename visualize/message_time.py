"""The part of a pipeline's idle time in which a rank waits for a message that is on its way."""

from __future__ import annotations

from minipar.parallel.pipeline.actions import Action, Time, Timeline
from minipar.parallel.pipeline.check import message_of


def takes_messages(timeline: Timeline) -> bool:
    """Return whether a rank may wait for a message: it takes time, or waits for others in a channel."""
    return len(timeline.ranks) > 1 and (timeline.comm > 0 or bool(timeline.messages))


def awaited_messages(timeline: Timeline) -> list[list[tuple[Time, Time]]]:
    """Return for each rank the spans (start, end) in which it does nothing and a message that it needs is on its way.

    A message is on its way from when its result is made: for `timeline.comm`, or as long as it also waits for others in
    its channel. While the rank computes, nothing waits for it.
    """
    made: dict[Action, Time] = {}
    for row in timeline.ranks:
        for slot in row:
            for half in slot.action.halves:
                made[half] = slot.end
    arrived = {slot.action: slot.end for slot in timeline.messages}
    home = timeline.schedule.home
    awaited: list[list[tuple[Time, Time]]] = []
    for rank, row in enumerate(timeline.ranks):
        spans = []
        free: Time = 0
        for slot in row:
            trips = []  # of the messages that this action uses: when each leaves and arrives
            for need in timeline.schedule.needs(slot.action):
                message = message_of(timeline.schedule, need)
                if message is not None and home[need.stage] != rank:
                    send, _ = message
                    trips.append((made[need], arrived.get(send, made[need] + timeline.comm)))
            for left, arrival in sorted(trips):
                start, end = max(free, left), min(arrival, slot.start)
                if start < end:
                    spans.append((start, end))
                    free = end
            free = slot.end
        awaited.append(spans)
    return awaited
