"""Ranks that have waited long compare notes: are they in the same operation at all?

Ranks that call different operations, or the same one with sizes for which "auto" takes different algorithms, may wait
for messages that nobody will ever send. A rank whose wait has lasted NOTES_AFTER seconds tells the others of its group
what it is doing, and reads what they have told. Two that stand at the same operation and see it differently end the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minipar.comm.transport import Request
from minipar.errors import CommunicationError

if TYPE_CHECKING:
    from minipar.comm.link import Link

NOTES_AFTER = 2.0  # seconds
NOTE_BYTES = 256
NOTE_TAG = (1 << 16) - 1  # just above the tags of the user


class Notes:
    """What the members of one communicator have told this rank, and what it has told them. Not counted as traffic."""

    def __init__(self) -> None:
        self._told = 0  # the number of the operation that the others have been told of
        self._outgoing: list[Request] = []
        self._incoming: dict[int, tuple[np.ndarray, Request]] = {}

    def compare(self, link: Link) -> None:
        """Tell the others about `link`, once, and read what has come. CommunicationError when they disagree."""
        mine = f"{link.number} {link.op} {link.algorithm} of {link.total} bytes"
        others = [rank for rank in range(link.size) if rank != link.rank]
        if self._told != link.number:
            self._told = link.number
            note = np.frombuffer(mine.encode().ljust(NOTE_BYTES), np.uint8)
            self._outgoing = [request for request in self._outgoing if not request.test()]
            self._outgoing += [link.transport.isend(note, rank, NOTE_TAG, link) for rank in others]
        for rank in others:
            if rank not in self._incoming:
                room = np.empty(NOTE_BYTES, np.uint8)
                self._incoming[rank] = room, link.transport.irecv(room, rank, NOTE_TAG, link)
            room, request = self._incoming[rank]
            if request.test():
                del self._incoming[rank]
                theirs = room.tobytes().decode().strip()
                number, _, operation = theirs.partition(" ")
                if number == str(link.number) and theirs != mine:
                    raise CommunicationError(
                        f"{link.title()} of {link.total} bytes: rank {rank} is in {operation}; "
                        "every rank must call the same operation with the same shape and dtype"
                    )
