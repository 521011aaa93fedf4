"""isend and irecv over MPI (mpi4py), with buffers only: no array is ever pickled.

Buffers are passed as `[array, bytes, MPI.BYTE]`. Naming count and type saves 0.4 us of the 1 us
that a call costs, because mpi4py need not read the array interface. It also makes every NumPy dtype
sendable, MPI's own or not.
"""

import atexit
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from minipar.comm.transport import USER_TAGS, Link, Message, Request, has_returned
from minipar.errors import CommunicationError

BYTE = MPI.BYTE

# Waiting: test, and give the core to another rank after each test without success. After so many
# tests sleep, longer and longer. Sleeping at once makes small rings ten times slower. Testing
# without a pause, or never sleeping, takes time from the ranks that compute when there are more
# ranks than cores.
YIELD_TESTS = 400
FIRST_SLEEP = 50e-6  # seconds
LONGEST_SLEEP = 1e-3
# From the last line printed to the end of the job: mpirun drops what is still in its pipes.
OUTPUT_SECONDS = 0.3

# Tags of notices.
LEFT, FAILED = range(2)
LEFT_PAUSES = 2000  # after these, about 2 s, the last messages of a rank that has left must have arrived
FAILED_SECONDS = 3.0  # for the other ranks to fail, too

STATUS = MPI.Status()  # read at once after each test, so one serves all (one thread per rank calls MPI)


@dataclass(eq=False)
class _Send(Message):
    """A message that this rank sends."""

    handle: MPI.Request

    def test(self) -> bool:
        return self.handle.Test()


@dataclass(eq=False)
class _Receive(Message):
    """A message received.

    MPI delivers any shorter message, and any tag of a collective, so both are checked.
    """

    handle: MPI.Request
    done: bool = False

    def test(self) -> bool:
        if self.done:
            return True
        try:
            if not self.handle.Test(STATUS):
                return False
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise self.mismatch(f"more than {self.nbytes}", STATUS.Get_tag()) from None
        if STATUS.Get_tag() != self.tag or STATUS.Get_count(BYTE) != self.nbytes:
            raise self.mismatch(STATUS.Get_count(BYTE), STATUS.Get_tag())
        self.done = True
        return True


class Notices:
    """The messages between ranks outside of operations: a rank leaves, or fails."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.arrived: dict[int, set[int]] = {LEFT: set(), FAILED: set()}  # the ranks that have sent one
        self.sent: list[MPI.Request] = []  # kept until MPI ends

    def send(self, tag: int, seconds: float) -> bool:
        """Send a notice to every other rank, and wait for theirs.

        Return False if some have not come in time.
        """
        others = set(range(self.comm.size)) - {self.comm.rank}
        for rank in others:
            self.sent.append(self.comm.Isend([None, 0, BYTE], rank, tag))
        deadline = time.monotonic() + seconds
        while self.ranks_with(tag) != others and time.monotonic() < deadline:
            time.sleep(LONGEST_SLEEP)
        return self.arrived[tag] == others

    def ranks_with(self, tag: int) -> set[int]:
        """Receive the notices that have arrived. Return the ranks that have sent one of this kind."""
        while self.comm.Iprobe(status=STATUS):
            source = STATUS.Get_source()
            kind = STATUS.Get_tag()
            self.comm.Recv([None, 0, BYTE], source, kind)
            self.arrived[kind].add(source)
        return self.arrived[tag]

    def leave(self) -> None:
        """Tell the others that this rank leaves, and wait until all do: MPI must not end with messages on their way."""
        self.send(LEFT, math.inf)

    def every_rank_fails(self) -> bool:
        """Tell the others that this rank ends with an error. Return False if some do not say so in time."""
        return self.send(FAILED, FAILED_SECONDS)


class MPITransport:
    """The ranks of one MPI communicator.

    Collectives have a copy of it, on which no message is received by its tag.
    """

    launcher = "mpirun"

    def __init__(
        self, comm: MPI.Intracomm, ranks: Sequence[int], notices: Notices, name: str = "world"
    ) -> None:
        self.comm = comm
        self.notices = notices
        self.name = name
        self.ranks = list(ranks)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._collectives = comm.Dup()

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        nbytes = array.nbytes
        comm = self.comm if tag < USER_TAGS else self._collectives
        handle = comm.Isend([array, nbytes, BYTE], dest, tag)
        return _Send(owner, "send to", self.ranks[dest], nbytes, tag, handle)

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        nbytes = array.nbytes
        if tag < USER_TAGS:
            handle = self.comm.Irecv([array, nbytes, BYTE], source, tag)
        else:
            handle = self._collectives.Irecv([array, nbytes, BYTE], source, MPI.ANY_TAG)
        return _Receive(owner, "receive from", self.ranks[source], nbytes, tag, handle)

    def pause(self, attempt: int, waiting_for: Request) -> None:
        if attempt < YIELD_TESTS:
            os.sched_yield()
        else:
            time.sleep(min(FIRST_SLEEP * (1 + (attempt - YIELD_TESTS) // 8), LONGEST_SLEEP))
        if attempt > LEFT_PAUSES and waiting_for.peer in self.notices.ranks_with(LEFT):
            raise CommunicationError(f"{waiting_for.describe()}: {has_returned(waiting_for.peer)}")

    def group(self, ranks: Sequence[int], name: str) -> "MPITransport":
        everyone = self.comm.Get_group()
        members = everyone.Incl(list(ranks))
        comm = self.comm.Create_group(members)
        members.Free()
        everyone.Free()
        return MPITransport(comm, [self.ranks[rank] for rank in ranks], self.notices, name)


def start() -> MPITransport:
    """Start MPI. Return the transport of all ranks, whose exceptions and ends no other rank waits for in vain."""
    notices = Notices()
    if MPI.COMM_WORLD.size > 1:
        sys.excepthook = abort_with_traceback
        atexit.register(notices.leave)
    return MPITransport(MPI.COMM_WORLD, range(MPI.COMM_WORLD.size), notices)


def abort_with_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback and end the job. (The excepthook: plain Python would leave the other ranks waiting.)"""
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(f"rank {MPI.COMM_WORLD.rank}:\n{text}")
    abort(1)


def abort(code: int) -> NoReturn:
    """End every rank of the job. mpirun exits with `code`, or with 1 if the code's lowest 8 bits are 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(OUTPUT_SECONDS)
    MPI.COMM_WORLD.Abort(code % 256 or 1)
    os._exit(code % 256 or 1)  # Abort may return before mpirun has ended this process
