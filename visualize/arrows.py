"""The messages of a timeline that are drawn as arrows: so few that each can be followed from sender to receiver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MOST_ARROWS = 300  # of collectives: more are a hedge


class Message(NamedTuple):
    """One message between two ranks; times in seconds from the trace's origin."""

    source: int
    left: float
    dest: int
    came: float
    axis: str = ""  # of the communicator that it belongs to
    nbytes: int | None = None  # None: the trace does not say
    track: str = ""  # of its sender: "communication pp, send and receive" for one between single ranks


def tracks_with_arrows(messages: Sequence[Message]) -> list[str]:
    """Choose the tracks whose messages are drawn.

    Messages between single ranks, as of a pipeline, are drawn and no others, if there are any. Of collectives, those of
    the tracks with fewest messages are drawn as long as they are at most MOST_ARROWS together, and at least one track.
    """
    count = Counter(message.track for message in messages)
    single = [track for track in count if "," in track]
    if single:
        return single
    chosen: list[str] = []
    total = 0
    for track in sorted(count, key=lambda track: (count[track], track)):
        total += count[track]
        if chosen and total > MOST_ARROWS:
            break
        chosen.append(track)
    return chosen
