"""The two operations of a rank, isend and irecv, as interfaces that mpi.py and threads.py implement.

A user's message is received by its tag. A collective's messages are received in the order in which they were sent, and
their tag says what the sender is doing. The receiver compares it with what it is doing itself. So ranks that call
different operations, or one with different dtypes, reductions or numbers of elements, get an error instead of values.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from minipar.errors import CommunicationError

USER_TAGS = 1 << 16  # the user's tags are 0..USER_TAGS-1

# The tag of a collective, from its lowest bits on: 3 bits for the operation, 3 for the algorithm, 1 for the reduction,
# 5 for the dtype, 7 for the number of elements, 7 for the operation's number on its communicator, and a 1.
OPERATION_CODES = ("control", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")
ALGORITHM_CODES = tuple("ring recursive_doubling recursive_halving ordered pairwise binomial dissemination mpi".split())
DTYPES: dict[int, str] = {np.dtype(letter).num: np.dtype(letter).name for letter in "?bBhHiIlLqQefdgFDG"}


@lru_cache(maxsize=1024)
def tag_of(op: str, algorithm: str, maximum: bool, dtype: int) -> int:
    """Return the tag of operation 0 on an array without elements; `dtype` is NumPy's number of it."""
    kind = OPERATION_CODES.index(op) | ALGORITHM_CODES.index(algorithm) << 3 | maximum << 6
    return 1 << 26 | (dtype & 31) << 7 | kind


def meaning(tag: int) -> str:
    """Say what a rank is doing that sends messages with this tag."""
    if tag < USER_TAGS:
        return f"tag {tag}"
    op = OPERATION_CODES[tag & 7]
    reduction = ("sum ", "max ")[tag >> 6 & 1] if "reduce" in op else ""
    dtype = DTYPES.get(tag >> 7 & 31, "another dtype")
    return f"{op} {reduction}of {dtype} ({ALGORITHM_CODES[tag >> 3 & 7]}, operation {tag >> 19 & 127})"


def has_returned(rank: int) -> str:
    """Say that a rank's program is over while another one waits for it."""
    return f"rank {rank} has returned: did it have fewer batches?"


@dataclass(slots=True, eq=False)
class Request:
    """One rank's half of a message, which completes. (Of MPI's own collective it is the message that checks the call.)

    Each transport adds how it completes.
    """

    owner: "Link"
    direction: str  # "send to" or "receive from"
    peer: int  # the world rank that has to act for it
    nbytes: int
    tag: int

    def test(self) -> bool:
        """Return True once it is complete, without blocking. CommunicationError for a message of another size."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say in words what is being waited for, for the error that ends a wait."""
        return f"{self.owner.title()}: {self.direction} rank {self.peer} ({self.nbytes} bytes, {meaning(self.tag)})"

    def mismatch(self, arrived: int | str, sent_tag: int) -> CommunicationError:
        """Return the error for a message of another size (bytes) or tag than this receive expects."""
        sent, called = meaning(sent_tag), meaning(self.tag)
        if sent_tag == self.tag:
            what = f"rank {self.peer} sent {arrived} bytes ({called}), but {self.nbytes} were expected"
        else:
            another = ", with another number of elements" if sent == called else ""
            what = f"rank {self.peer} called {sent}{another}, but this rank {called}"
            what += f" ({arrived} bytes arrived, {self.nbytes} expected)"
        remedy = "every rank must call the same operations in the same order, with the same shape and dtype"
        if sent == called and sent.startswith("all_to_all"):
            remedy += ", or with counts of which each rank receives what the others send it"
        return CommunicationError(f"{self.owner.title()}: {what}; {remedy}")


# An algorithm is a generator. It yields the requests that must be done before it continues.
Steps = Generator[Iterable[Request], None, None]


class Link(Protocol):
    """An operation as its algorithm sees it (`work.Work`): messages are counted, and have the operation's tag."""

    rank: int
    size: int

    def isend(self, array: np.ndarray, dest: int) -> Request: ...
    def irecv(self, array: np.ndarray, source: int) -> Request: ...
    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray: ...
    def title(self) -> str: ...


class Transport(Protocol):
    """The ranks of one group, numbered 0..size-1, and the two operations between them."""

    rank: int
    size: int
    ranks: list[int]  # the world rank of each member
    name: str  # the same on every member, and no other group's
    launcher: str  # what started the ranks, for error messages: "mpirun", or the call that made threads
    notices: Any  # what ranks tell one another outside of operations (mpi.Notices); None between threads

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        """Start to send a contiguous host array. It must not be changed until the request is done."""

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        """Start to receive exactly `array.nbytes` bytes, of the user's message with this tag or a collective's next."""

    def pause(self, attempt: int, waiting_for: Request) -> None:
        """Let other ranks run. Called between two tests, the `attempt`-th time in a row without success."""

    def group(self, ranks: Sequence[int], name: str) -> "Transport":
        """Make a transport for `ranks` alone, renumbered in that order. Called by exactly these ranks."""

    def native(self, op: str, tag: int, owner: Link, *arguments: Any) -> Request:
        """Start the library's own collective, and compare its tag with a neighbour's. UsageError if there is none."""
