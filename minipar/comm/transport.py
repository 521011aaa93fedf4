"""The two operations of a rank, isend and irecv, as interfaces.

A transport carries bytes between the ranks of one group: `minipar.comm.mpi` between processes, `minipar.comm.threads`
between threads. Every collective is written from the two operations, and none knows which transport it uses.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol

import numpy as np


class Owner(Protocol):
    """The operation that a message belongs to. Errors print it."""

    def title(self) -> str:
        """Name it, for example `rank 2 of axis dp (world rank 5), all_reduce ring`."""


class Request(Protocol):
    """Something that completes: a message, or a whole collective."""

    def test(self) -> bool:
        """Return True once it is complete, without blocking. CommunicationError for a message of another size."""

    def describe(self) -> str:
        """Say in words what is being waited for, for the error that ends a wait."""


class Transport(Protocol):
    """The ranks of one group, numbered 0..size-1, and the two operations between them."""

    rank: int
    size: int
    launcher: str  # what started the ranks, for error messages: "mpirun" or "run_local"

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Owner) -> Request:
        """Start to send a contiguous host array. It must not be changed until the request is done."""

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Owner) -> Request:
        """Start to receive exactly `array.nbytes` bytes. Messages with the same ranks and tag arrive in order."""

    def pause(self, attempt: int, waiting_for: Request) -> None:
        """Let other ranks run. Called between two tests, the `attempt`-th time in a row without success."""

    def group(self, ranks: Sequence[int], name: str) -> Transport:
        """Make a transport for `ranks` alone, renumbered in that order. Called by exactly these ranks."""

    def native(self, op: str, owner: Owner, *arguments: Any) -> Request:
        """Start the library's own collective (`algorithm="mpi"`). UsageError where there is none."""

    def abort(self, code: int) -> None:
        """End every rank now."""


class Link(Protocol):
    """The two operations as an algorithm sees them: messages are counted, and `step` makes their tags differ."""

    rank: int
    size: int

    def isend(self, array: np.ndarray, dest: int, step: int) -> Request:
        """Count a message and start to send it to a rank of the group (`Transport.isend`)."""

    def irecv(self, array: np.ndarray, source: int, step: int) -> Request:
        """Start to receive from a rank of the group (`Transport.irecv`)."""

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `count` elements. The next operation on the communicator uses the same memory."""


# An algorithm is a generator. It yields the requests that must be done before it continues.
Steps = Generator[Iterable[Request], None, None]


def message_size_error(owner: Owner, expected: int, arrived: str, source: int, tag: int) -> str:
    """Format the error for a message of the wrong size."""
    remedy = "every rank must call the same operation with the same shape and dtype"
    return f"{owner.title()}: expected {expected} bytes from rank {source} (tag {tag}), but {arrived} arrived; {remedy}"
