"""The two operations of a rank, isend and irecv, which mpi.py and threads.py implement, and messages under way.

A user's message is received by its tag. A collective's messages are received in the order in which
they were sent, and their tag says what the sender is doing. The receiver compares it with what it
is doing itself. So ranks that call different operations, or one with different dtypes or numbers of
elements, get an error instead of values.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minipar.errors import CommunicationError

USER_TAGS = 1 << 16  # the user's tags are 0..USER_TAGS-1
# The tag of a collective's messages has the index of its name in this list.
OPERATIONS = "control all_reduce reduce_scatter all_gather all_to_all broadcast barrier".split()
DTYPES: dict[int, str] = {np.dtype(letter).num: np.dtype(letter).name for letter in "?bBhHiIlLqQefdgFDG"}


def to_tag(name: str, dtype: np.dtype, elements: int, number: int) -> int:
    """Pack a call of a collective, the `number`-th of its communicator, into a tag above USER_TAGS."""
    tag = 128 + number % 128  # 128 sets a bit above all of the user's tags
    tag = tag * 1024 + elements % 1024
    tag = tag * 32 + min(dtype.num, 31)
    return tag * 8 + OPERATIONS.index(name)


def meaning(tag: int) -> str:
    """Say what a rank is doing that sends messages with this tag."""
    if tag < USER_TAGS:
        return f"tag {tag}"
    tag, name = divmod(tag, 8)
    tag, dtype = divmod(tag, 32)
    number, elements = divmod(tag, 1024)
    call = f"{OPERATIONS[name]} of {DTYPES.get(dtype, 'another dtype')}"
    return f"{call}, elements mod 1024 = {elements}, operation {number % 128}"


def has_returned(rank: int) -> str:
    """Say that a rank's program is over while another one waits for it."""
    return f"rank {rank} has returned: did it have fewer batches?"


@dataclass(eq=False)
class Request:
    """A send or a receive under way: one rank's half of a message. Each transport adds how it completes."""

    owner: "Link"
    direction: str  # "send to" or "receive from"
    peer: int  # the world rank that has to act for it
    nbytes: int
    tag: int

    def test(self) -> bool:
        """Return whether it is complete, without blocking. After True nobody asks again.

        CommunicationError for a message of another size or tag.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Say in words what is being waited for, for the error that ends a wait."""
        return f"{self.owner.title()}: {self.direction} rank {self.peer} ({self.nbytes} bytes, {meaning(self.tag)})"

    def check(self, nbytes: int | str, tag: int) -> None:
        """Raise CommunicationError unless the message that has come has the expected bytes and tag."""
        if (nbytes, tag) == (self.nbytes, self.tag):
            return
        given = f"rank {self.peer} sent {nbytes} bytes ({meaning(tag)})"
        expected = f"this rank expects {self.nbytes} ({meaning(self.tag)})"
        rule = "every rank must call the same operations in the same order, with the same shape and dtype"
        raise CommunicationError(f"{self.owner.title()}: {given}, but {expected}: {rule}")


# An algorithm is a generator. It yields the requests that must be done before it continues.
Steps = Iterator[Iterable[Request]]


class Traffic:
    """The account of one rank, without the 8-byte headers of logical clocks."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], list[int]] = {}  # (operation, axis): [messages, bytes]

    def messages(self, op: str | None = None, axis: str | None = None) -> int:
        """Return the number of messages sent. None means every operation or every axis."""
        return self._total(0, op, axis)

    def bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """Return the number of bytes sent. None means every operation or every axis."""
        return self._total(1, op, axis)

    def _total(self, which: int, op: str | None, axis: str | None) -> int:
        return sum(
            count[which]
            for (counted_op, counted_axis), count in self.counts.items()
            if op in (None, counted_op) and axis in (None, counted_axis)
        )

    def reset(self) -> None:
        """Start again from zero. (A collective under way finishes on the old account.)"""
        self.counts = {}


class Link:
    """An operation as its algorithm sees it: messages to the ranks of its group, all with the operation's tag.

    What it sends is counted as traffic.
    """

    def __init__(self, comm: Any, name: str, algorithm: str, tag: int) -> None:
        self.comm = comm  # a Communicator, whose file imports this one
        self.name = name
        self.algorithm = algorithm
        self.tag = tag
        self.rank = comm.rank
        self.size = comm.size
        self.transport = comm.transport
        self.count = comm.traffic.counts.setdefault((name, comm.axis), [0, 0])  # [messages, bytes]

    def isend(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a message, and count it."""
        self.count[0] += 1
        self.count[1] += array.nbytes
        return self.transport.isend(array, dest, self.tag, self)

    def irecv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive a message."""
        return self.transport.irecv(array, source, self.tag, self)

    def title(self) -> str:
        """Name the rank and the operation, for errors: `rank 5 (dp rank 2), all_reduce ring`."""
        return f"{self.comm.label}, {self.name} {self.algorithm}".rstrip()


class Transport(Protocol):
    """The ranks of one group, numbered 0..size-1, and the two operations between them."""

    rank: int
    size: int
    ranks: list[int]  # the world rank of each member
    name: str  # the same on every member, and no other group's
    launcher: str  # what started the ranks, for error messages: "mpirun", or "this process" for threads
    job: Any  # what ends all ranks together (mpi.Job); None between threads

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        """Start to send a contiguous host array.

        It must not be changed until the request is done.
        """

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        """Start to receive exactly `array.nbytes` bytes, of the user's message with this tag or a collective's next."""

    def pause(self, attempt: int, waiting_for: Request) -> None:
        """Let other ranks run: the wait for this request goes on, after `attempt` pauses.

        CommunicationError if the request can never be done.
        """

    def group(self, ranks: Sequence[int], name: str) -> "Transport":
        """Make a transport for `ranks` alone, renumbered in that order.

        Called by exactly these ranks.
        """
