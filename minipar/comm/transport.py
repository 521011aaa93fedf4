"""The two operations of a rank, isend and irecv, as interfaces.

A transport carries bytes between the ranks of one group: `minipar.comm.mpi` between processes, `minipar.comm.threads`
between threads. Every collective is written from the two operations, and none knows which transport it uses.

A user's message is received by its tag. A collective's messages are received in the order in which their sender sent
them, and their tag says what the sender is doing. The receiver compares it with what it is doing itself. So ranks that
call different operations, or one with different dtypes, reductions or numbers of elements, get an error instead of
values.
"""

from collections.abc import Generator, Iterable, Sequence
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


class Owner(Protocol):
    """The operation that a message belongs to. Errors print it."""

    def title(self) -> str:
        """Name it, for example `rank 5 (dp rank 2), all_reduce ring`."""


class Request(Protocol):
    """Something that completes: a message, or a whole collective."""

    @property
    def peer(self) -> int | None:
        """Return the world rank that has to act for it, if that is one."""

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
        """Start to receive exactly `array.nbytes` bytes, of the user's message with this tag or a collective's next."""

    def pause(self, attempt: int, waiting_for: Request) -> None:
        """Let other ranks run. Called between two tests, the `attempt`-th time in a row without success."""

    def look(self, request: Request, seconds: float, engine: Any) -> None:
        """Look now and then, in a wait that has lasted `seconds`, for what other ranks say outside of operations.

        CommunicationError if the rank that has to act for `request` has left the program. A report that another rank
        wants is written from `engine`.
        """

    def report(self, request: Request, engine: Any) -> str:
        """Make every rank write what it waits for and its last operations. Return where, and which rank is behind."""

    def group(self, ranks: Sequence[int], name: str) -> "Transport":
        """Make a transport for `ranks` alone, renumbered in that order. Called by exactly these ranks."""

    def native(self, op: str, owner: Owner, *arguments: Any) -> Request:
        """Start the library's own collective (`algorithm="mpi"`). UsageError where there is none."""

    def abort(self, code: int) -> None:
        """End every rank now."""


class Link(Protocol):
    """The two operations as an algorithm sees them: messages are counted, and have the tag of their operation."""

    rank: int
    size: int

    def isend(self, array: np.ndarray, dest: int) -> Request:
        """Count a message and start to send it to a rank of the group (`Transport.isend`)."""

    def irecv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive from a rank of the group (`Transport.irecv`)."""

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `count` elements. The next operation on the communicator uses the same memory."""


# An algorithm is a generator. It yields the requests that must be done before it continues.
Steps = Generator[Iterable[Request], None, None]


def pending(owner: Owner, direction: str, peer: int, nbytes: int, tag: int) -> str:
    """Say what a message is that has not come or gone yet. `peer` is a world rank."""
    return f"{owner.title()}: {direction} rank {peer} ({nbytes} bytes, {meaning(tag)})"


def check_arrival(owner: Owner, peer: int, expected: int, tag: int, arrived: int | str, sent_tag: int) -> None:
    """Raise CommunicationError for a message from world rank `peer` with another size or tag than expected."""
    if arrived == expected and sent_tag == tag:
        return
    if sent_tag == tag:
        what = f"rank {peer} sent {arrived} bytes ({meaning(tag)}), but {expected} were expected"
    else:
        another = ", with another number of elements" if meaning(sent_tag) == meaning(tag) else ""
        what = f"rank {peer} called {meaning(sent_tag)}{another}, but this rank {meaning(tag)}"
        what += f" ({arrived} bytes arrived, {expected} expected)"
    remedy = "every rank must call the same operations in the same order, with the same shape and dtype"
    raise CommunicationError(f"{owner.title()}: {what}; {remedy}")
