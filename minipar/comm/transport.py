"""What a rank can do: two verbs. Everything else in this package is written from them.

(`Transport.exchange` is the two in one call, so that a transport can wait for both where that is fastest.)

A transport carries bytes between the ranks of one group. `minipar.comm.mpi` does it between processes,
`minipar.comm.local` between threads; no collective knows which one it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Owner(Protocol):
    """The operation a message belongs to; errors print it."""

    def title(self) -> str:
        """For example `rank 2 of 4 on axis dp (world rank 5), all_reduce ring`."""


class Waitable(Protocol):
    """Something that completes: a message, or a whole collective."""

    def test(self) -> bool:
        """True once it is complete. Never blocks; calling it is what drives the transport onwards.

        Raises CommunicationError when a message arrived whose size is not the one expected.
        """

    @property
    def owner(self) -> Owner:
        """The operation that waits."""

    def describe(self) -> str:
        """What is being waited for, in words, for the error that ends a wait."""


class Request(Waitable, Protocol):
    """A message on its way."""

    def linger(self) -> bool:
        """`test()`, repeated for a short while if that may help; for when nothing else is to be done meanwhile."""


class Transport(Protocol):
    """The ranks of one group and the two verbs between them. Ranks are numbered 0..size-1 inside the group."""

    rank: int
    size: int
    launcher: str  # what started the ranks ("mpirun", "run_local"): named in error messages

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Owner) -> Request:
        """Start to send a contiguous host array. It must not be changed until the request is done."""

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Owner) -> Request:
        """Start to receive exactly `array.nbytes` bytes into a contiguous host array.

        Messages between the same two ranks with the same tag arrive in the order they were sent.
        """

    def exchange(
        self, sent: np.ndarray, dest: int, received: np.ndarray, source: int, tag: int, owner: Owner
    ) -> tuple[Request, ...]:
        """isend and irecv in one call, which may wait a moment for both; the requests that are not done by then."""

    def pause(self, attempt: int, waiting_for: Waitable) -> None:
        """Let others run: called between two tests, the `attempt`-th time in a row without success."""

    def group(self, ranks: Sequence[int], name: str) -> Transport:
        """A transport of its own for `ranks`, renumbered in that order. Called by exactly these ranks."""

    def native(self, op: str, *arguments: Any) -> Request:
        """The library's own collective, started (`algorithm="mpi"`). UsageError where there is none."""

    def abort(self, code: int) -> None:
        """End every rank now."""


def message_size_error(owner: Owner, expected: int, arrived: str, source: int, tag: int) -> str:
    """The sentence for a message of the wrong size."""
    return (
        f"{owner.title()}: expected {expected} bytes from rank {source} (tag {tag}), but {arrived} arrived; "
        "every rank must call the same operation with the same shape and dtype"
    )
