"""isend and irecv over MPI (mpi4py), with buffers only: no array is ever pickled.

Buffers are passed as `[array, bytes, MPI.BYTE]`. Naming count and type saves 0.4 us of the 1 us
that a call costs, because mpi4py need not read the array interface. It also makes every NumPy dtype
sendable, MPI's own or not.
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from minipar.comm.operation import USER_TAGS, meaning
from minipar.comm.transport import Link, Message, Request, has_returned
from minipar.comm.work import Engine
from minipar.errors import CommunicationError, print_line

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

# Tags of notices: I leave; I leave with an error; I printed my report, print yours.
LEFT, FAILED, REPORTED = range(3)
LEFT_SECONDS = 2.0  # after it, the last messages of a rank that has left must have arrived
REPORT_SECONDS = 2.0  # for the other ranks to print their reports
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
                raise CommunicationError(f"{self.describe()}: {error}") from None
            raise self.mismatch(f"more than {self.nbytes}", STATUS.Get_tag()) from None
        has_another_size = self.nbytes > 0 and STATUS.Get_count(BYTE) != self.nbytes
        if STATUS.Get_tag() != self.tag or has_another_size:
            raise self.mismatch(STATUS.Get_count(BYTE), STATUS.Get_tag())
        self.done = True
        return True


class Notices:
    """The messages between ranks outside of operations: a rank leaves, fails, or has printed a report."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.arrived: dict[int, dict[int, int]] = {LEFT: {}, FAILED: {}, REPORTED: {}}  # tag -> {rank: value}
        # Buffers must stay until their messages have left.
        self._sent: list[tuple[np.ndarray, MPI.Request]] = []

    def send(self, tag: int, value: int = 0, seconds: float = 0.0) -> bool:
        """Send a notice to every other rank, and wait for theirs.

        Return False if some have not come in time.
        """
        self.arrived[tag][self.rank] = value
        buffer = np.array([value])
        for rank in range(self.size):
            if rank != self.rank:
                self._sent.append((buffer, self.comm.Isend([buffer, 8, BYTE], rank, tag)))
        return self.wait(tag, range(self.size), time.monotonic() + seconds)

    def wait(self, tag: int, ranks: Sequence[int], deadline: float) -> bool:
        """Wait for these ranks' notices of one kind. Return False if some have not come in time."""
        arrived = self.arrived[tag]
        while any(rank not in arrived for rank in ranks) and time.monotonic() < deadline:
            time.sleep(LONGEST_SLEEP)
            self.receive()
        return all(rank in arrived for rank in ranks)

    def receive(self) -> None:
        """Record the notices that have arrived."""
        while self.comm.Iprobe(status=STATUS):
            source, tag, value = STATUS.Get_source(), STATUS.Get_tag(), np.empty(1, np.int64)
            self.comm.Recv([value, 8, BYTE], source, tag)
            self.arrived[tag][source] = int(value[0])

    def leave(self) -> None:
        """Tell the others that this rank leaves, and wait until all do: MPI must not end with messages on their way."""
        self.send(LEFT, seconds=math.inf)

    def everyone_fails(self) -> bool:
        """Tell the others that this rank ends with an error. Return False if some do not say so in time."""
        return self.send(FAILED, seconds=FAILED_SECONDS)

    def print_report(self, request: Request, engine: Engine) -> None:
        """Print what this rank waits for and its last operations. Tell the others, who then do the same."""
        if self.rank in self.arrived[REPORTED]:
            return
        operations = [f"{axis}: {meaning(tag)}" for axis, tag in reversed(engine.recent)]
        text = f"{request.describe()}; last operations, the newest first: {'; '.join(operations)}"
        print_line(f"minipar: {text}")
        self.send(REPORTED, engine.operations)

    def look(self, request: Request, seconds: float, engine: Engine) -> None:
        """Print a report if another rank has.

        CommunicationError if the rank that has to act for `request` has left.
        """
        self.receive()
        if self.arrived[REPORTED]:
            self.print_report(request, engine)
        if seconds > LEFT_SECONDS and request.peer in self.arrived[LEFT]:
            raise CommunicationError(f"{request.describe()}: {has_returned(request.peer)}")

    def report(self, request: Request, engine: Engine) -> str:
        """Make every rank print what it waits for and its last operations. Say which rank is behind."""
        self.print_report(request, engine)
        self.wait(REPORTED, range(self.size), time.monotonic() + REPORT_SECONDS)
        counts = self.arrived[REPORTED]
        silent = [str(rank) for rank in range(self.size) if rank not in counts]
        if silent:
            return f"; rank {', '.join(silent)} does not answer: it computes, or is stopped"
        return f"; rank {min(counts, key=lambda rank: counts[rank])} has called the fewest operations"


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

    def group(self, ranks: Sequence[int], name: str) -> "MPITransport":
        everyone = self.comm.Get_group()
        members = everyone.Incl(list(ranks))
        comm = self.comm.Create_group(members)
        members.Free()
        everyone.Free()
        return MPITransport(comm, [self.ranks[rank] for rank in ranks], self.notices, name)


def abort(code: int) -> NoReturn:
    """End every rank of the job. mpirun exits with `code`, or with 1 if the code's lowest 8 bits are 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(OUTPUT_SECONDS)
    MPI.COMM_WORLD.Abort(code % 256 or 1)
    os._exit(code % 256 or 1)  # Abort may return before mpirun has ended this process
