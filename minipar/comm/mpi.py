"""isend and irecv over MPI (mpi4py), with buffers only: no array is ever pickled.

Buffers are passed as `[array, bytes, MPI.BYTE]`. Naming count and type saves 0.4 us of the 1 us
that a call costs, because mpi4py need not read the array interface. It also makes every NumPy dtype
sendable, MPI's own or not.
"""

import atexit
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from minipar.comm.transport import USER_TAGS, Link, Request, has_returned
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

LEFT_PAUSES = 2000  # after these, about 2 s, the last messages of a rank that has left must have arrived
FAILED_SECONDS = 3.0  # for the other ranks to fail, too

STATUS = MPI.Status()  # read at once after each test, so one serves all (one thread per rank calls MPI)


@dataclass(eq=False)
class _Request(Request):
    """A send, or a receive: MPI delivers any shorter message, and any tag of a collective, so both are checked."""

    handle: MPI.Request

    def test(self) -> bool:
        try:
            if not self.handle.Test(STATUS):
                return False
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            self.check(f"more than {self.nbytes}", STATUS.Get_tag())
        if self.direction == "receive from":
            self.check(STATUS.Get_count(BYTE), STATUS.Get_tag())
        return True


class Job:
    """The ranks that mpirun has started, outside of operations: which have left, and the end of all.

    It uses MPI's own barrier and messages, which work after an operation has failed.
    """

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        # A message of each rank, this one included, which it sends when its program is over.
        self.leaving = [self.comm.Irecv([None, 0, BYTE], rank) for rank in range(self.comm.size)]

    def leave(self) -> None:
        """Tell all ranks that this one leaves, and wait until all do: MPI must not end with messages on their way."""
        sends = [self.comm.Isend([None, 0, BYTE], rank) for rank in range(self.comm.size)]
        while not MPI.Request.Testall(sends + self.leaving):
            time.sleep(LONGEST_SLEEP)

    def every_rank_fails(self) -> bool:
        """Tell the others that this rank ends with an error. Return False if some do not say so in time."""
        barrier = self.comm.Ibarrier()
        deadline = time.monotonic() + FAILED_SECONDS
        while not barrier.Test() and time.monotonic() < deadline:
            time.sleep(LONGEST_SLEEP)
        return barrier.Test()

    def abort_with_traceback(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print the traceback and end the job. (The excepthook: plain Python would leave the other ranks waiting.)"""
        text = "".join(traceback.format_exception(error))
        self.abort(1, f"rank {self.comm.rank}:\n{text}")

    def abort(self, code: int, text: str) -> NoReturn:
        """Print a text and end every rank. mpirun exits with `code`, or with 1 if the code's lowest 8 bits are 0."""
        sys.stdout.flush()  # what the program has printed comes first
        print_line(text)
        time.sleep(OUTPUT_SECONDS)
        MPI.COMM_WORLD.Abort(code % 256 or 1)
        os._exit(code % 256 or 1)  # Abort may return before mpirun has ended this process


class MPITransport:
    """The ranks of one MPI communicator.

    Collectives have a copy of it, on which no message is received by its tag.
    """

    launcher = "mpirun"

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], job: Job, name: str = "world") -> None:
        self.comm = comm
        self.job = job
        self.name = name
        self.ranks = list(ranks)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._collectives = comm.Dup()

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        comm = self.comm if tag < USER_TAGS else self._collectives
        handle = comm.Isend([array, array.nbytes, BYTE], dest, tag)
        return _Request(owner, "send to", self.ranks[dest], array.nbytes, tag, handle)

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        buffer = [array, array.nbytes, BYTE]
        if tag < USER_TAGS:
            handle = self.comm.Irecv(buffer, source, tag)
        else:
            handle = self._collectives.Irecv(buffer, source, MPI.ANY_TAG)
        return _Request(owner, "receive from", self.ranks[source], array.nbytes, tag, handle)

    def pause(self, attempt: int, waiting_for: Any) -> None:  # it waits for a _Request
        if attempt < YIELD_TESTS:
            os.sched_yield()
        else:
            time.sleep(min(FIRST_SLEEP * (1 + (attempt - YIELD_TESTS) // 8), LONGEST_SLEEP))
        has_left = attempt > LEFT_PAUSES and self.job.leaving[waiting_for.peer].Test()
        # Its last message may have arrived since it was last tested.
        if has_left and not waiting_for.handle.Get_status():
            raise CommunicationError(f"{waiting_for.describe()}: {has_returned(waiting_for.peer)}")

    def group(self, ranks: Sequence[int], name: str) -> "MPITransport":
        members = self.comm.Get_group().Incl(list(ranks))
        comm = self.comm.Create_group(members)
        return MPITransport(comm, [self.ranks[rank] for rank in ranks], self.job, name)


def start() -> MPITransport:
    """Start MPI. Return the transport of all ranks, whose exceptions and ends no other rank waits for in vain."""
    job = Job()
    if job.comm.size > 1:
        sys.excepthook = job.abort_with_traceback
        atexit.register(job.leave)
    return MPITransport(MPI.COMM_WORLD, range(job.comm.size), job)
