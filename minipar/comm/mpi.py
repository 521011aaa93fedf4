"""isend and irecv over MPI (mpi4py), with buffers only: no array is ever pickled.

Buffers are passed as `[array, bytes, MPI.BYTE]`. Naming count and type saves 0.4 us of the 1 us that a call costs,
because mpi4py need not read the array interface. It also makes every NumPy dtype sendable, MPI's own or not.
"""

import math
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from minipar.comm.algorithms import Bounds, chunk_bounds
from minipar.comm.transport import USER_TAGS, Link, Request, has_returned, meaning
from minipar.errors import CommunicationError, UsageError
from minipar.robust_start import mpirun
from minipar.robust_start.report import write_report

BYTE = MPI.BYTE
EMPTY = [np.empty(0, np.uint8), 0, BYTE]  # a message of which the tag says all

# Waiting: test, and give the core to another rank after each test without success. After so many tests sleep, longer
# and longer. Sleeping at once makes small rings ten times slower. Testing without a pause, or never sleeping, takes
# time from the ranks that compute when there are more ranks than cores.
YIELD_TESTS = 400
FIRST_SLEEP = 50e-6  # seconds
LONGEST_SLEEP = 1e-3

# Tags of notices: I leave; I leave with a usage error; I wrote my report, write yours; I have this exception.
LEFT, FAILED, REPORTED, RAISED = range(4)
LEFT_SECONDS = 2.0  # of waiting for a rank that has left, until its last messages must have arrived
REPORT_SECONDS = 2.0  # for the other ranks to write their reports
RAISED_SECONDS = 1.0  # for other ranks to have the same exception, which one of them prints

REDUCTIONS: dict[np.ufunc, MPI.Op] = {np.add: MPI.SUM, np.maximum: MPI.MAX}
STATUS = MPI.Status()  # of the receive tested last: read at once, so one serves all (one thread per rank calls MPI)


@dataclass(slots=True, eq=False)
class _Request(Request):
    """A request of MPI for a message."""

    handle: MPI.Request

    def test(self) -> bool:
        return self.handle.Test()


@dataclass(slots=True, eq=False)
class _Receive(_Request):
    """A message received. MPI delivers any shorter message, and any tag of a collective, so both are checked."""

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
        if STATUS.Get_tag() != self.tag or (self.nbytes and STATUS.Get_count(BYTE) != self.nbytes):
            raise self.mismatch(STATUS.Get_count(BYTE), STATUS.Get_tag())
        self.done = True
        return True


@dataclass(slots=True, eq=False)
class _Native(_Receive):
    """One of MPI's own collectives, and the empty message whose tag says what the left neighbour calls."""

    handle: MPI.Prequest
    collective: Any = None

    def test(self) -> bool:
        if not self.done:
            if not _Receive.test(self):
                return False
            self.peer = -1  # what is missing now is no rank's message
        return self.collective.Test()

    def describe(self) -> str:
        return f"{self.owner.title()}: MPI's own collective" if self.done else Request.describe(self)


class Notices:
    """The messages between ranks outside of operations: a rank leaves, fails, or has written a report."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        tags = (LEFT, FAILED, REPORTED, RAISED)
        self.arrived: dict[int, dict[int, int]] = {tag: {} for tag in tags}  # tag -> {rank: value}
        self._sent: list[Any] = []  # buffers must stay until their messages have left

    def send(self, tag: int, value: int = 0, seconds: float = 0.0) -> bool:
        """Send a notice to every other rank, and wait for theirs. Return False if some have not come in time."""
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

    def print_once(self, text: str) -> None:
        """Print the text of this rank's exception, unless a lower rank has the same one and prints it.

        A text is printed at the latest RAISED_SECONDS after its exception, and the caller's abort comes that late too:
        so it ends no rank that had another exception before.
        """
        digest, deadline = zlib.crc32(text.encode()), time.monotonic() + RAISED_SECONDS
        raised = self.arrived[RAISED]
        self.send(RAISED, digest)
        lower = range(self.rank)
        self.wait(RAISED, lower, deadline)
        if digest in [raised.get(rank) for rank in lower]:
            time.sleep(2 * RAISED_SECONDS)  # the abort of the rank that prints ends this one, unless it died first
        sys.stderr.write(f"rank {self.rank}:\n{text}")
        sys.stderr.flush()
        self.wait(RAISED, range(self.size), deadline)
        if same := [str(rank) for rank in range(self.rank + 1, self.size) if raised.get(rank) == digest]:
            sys.stderr.write(f"minipar: the same on rank {', '.join(same)}\n")

    def write(self, request: Request, engine: Any, seconds: float = 0.0) -> str:
        """Write this rank's report, and tell the others, who then write theirs. Return the files' common name."""
        folder = Path(tempfile.gettempdir(), f"minipar-{os.getuid()}")
        operations = "\n".join(f"{axis}: {meaning(tag)}" for axis, tag in reversed(engine.recent))
        text = f"{request.describe()}\nlast operations, the newest first:\n{operations}\n"
        try:
            write_report(folder / f"rank-{self.rank}.txt", text)
        except OSError as error:
            problem = f"its report cannot be written to {error.filename}: {error.strerror}"
            print(f"minipar: rank {self.rank}: {problem}\n{text}", end="", file=sys.stderr, flush=True)
        self.send(REPORTED, engine.operations, seconds)
        return f"{folder}/rank-*.txt"

    def look(self, request: Request, seconds: float, engine: Any) -> None:
        """Write a report if another rank has. CommunicationError if the rank that has to act for `request` has left."""
        self.receive()
        if self.arrived[REPORTED] and self.rank not in self.arrived[REPORTED]:
            self.write(request, engine)
        if seconds > LEFT_SECONDS and request.peer in self.arrived[LEFT]:
            raise CommunicationError(f"{request.describe()}: {has_returned(request.peer)}")

    def report(self, request: Request, engine: Any) -> str:
        """Make every rank write what it waits for and its last operations. Return where, and which rank is behind."""
        files, counts = self.write(request, engine, REPORT_SECONDS), self.arrived[REPORTED]
        if silent := [str(rank) for rank in range(self.size) if rank not in counts]:
            behind = f"rank {', '.join(silent)} does not answer: it computes, or is stopped"
        else:
            behind = f"rank {min(counts, key=lambda rank: counts[rank])} has called the fewest operations"
        return f"; {behind}; what each rank waits for, and its last operations, are in {files}"


class MPITransport:
    """The ranks of one MPI communicator. Collectives have a copy of it, on which no message is received by its tag."""

    launcher = "mpirun"

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], notices: Notices, name: str = "world") -> None:
        self.comm, self.notices, self.name, self.ranks = comm, notices, name, list(ranks)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._collectives = comm.Dup()
        self._native: _Native | None = None  # for all, as they run one after the other: a new one takes longer

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        nbytes = array.nbytes
        comm = self.comm if tag < USER_TAGS else self._collectives
        return _Request(owner, "send to", self.ranks[dest], nbytes, tag, comm.Isend([array, nbytes, BYTE], dest, tag))

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        nbytes = array.nbytes
        comm, accepted = (self.comm, tag) if tag < USER_TAGS else (self._collectives, MPI.ANY_TAG)
        handle = comm.Irecv([array, nbytes, BYTE], source, accepted)
        return _Receive(owner, "receive from", self.ranks[source], nbytes, tag, handle)

    def pause(self, attempt: int, waiting_for: Request) -> None:
        if attempt < YIELD_TESTS:
            os.sched_yield()
        else:
            time.sleep(min(FIRST_SLEEP * (1 + (attempt - YIELD_TESTS) // 8), LONGEST_SLEEP))

    def group(self, ranks: Sequence[int], name: str) -> "MPITransport":
        everyone = self.comm.Get_group()
        members = everyone.Incl(list(ranks))
        comm = self.comm.Create_group(members, 0)
        members.Free()
        everyone.Free()
        return MPITransport(comm, [self.ranks[rank] for rank in ranks], self.notices, name)

    def native(self, op: str, tag: int, owner: Link, *arguments: Any) -> Request:
        try:
            collective = self._start(op, *arguments)
        except (MPI.Exception, KeyError):
            kind = arguments[0].dtype
            raise UsageError(f'algorithm="mpi": MPI has no {op} of {kind}; choose another algorithm') from None
        if (native := self._native) is None:
            handle = self._collectives.Recv_init(EMPTY, (self.rank - 1) % self.size, MPI.ANY_TAG)
            native = self._native = _Native(owner, "receive from", -1, 0, tag, handle)
        native.owner, native.peer, native.tag, native.done = owner, self.ranks[self.rank - 1], tag, False
        native.handle.Start()
        self._collectives.Send(EMPTY, (self.rank + 1) % self.size, tag)  # an empty message leaves at once
        native.collective = collective
        return native

    def _start(self, op: str, *arguments: Any) -> MPI.Request:
        """Start MPI's collective with the arguments of the algorithms in algorithms.py."""
        match op, arguments:
            case "all_reduce", (x, combine):  # to add elements, MPI needs their type
                return self.comm.Iallreduce(MPI.IN_PLACE, [x, x.dtype.char], REDUCTIONS[combine])
            case "reduce_scatter", (x, out, combine):
                counts = self._counts(x, 1)
                return self.comm.Ireduce_scatter([x, x.dtype.char], [out, x.dtype.char], counts, REDUCTIONS[combine])
            case "all_gather", (out,):
                return self.comm.Iallgatherv(MPI.IN_PLACE, [out, self._counts(out, out.itemsize), BYTE])
            case "all_to_all", (x, out, *bounds):
                sends, receives = bounds or (None, None)
                received = self._counts(out, out.itemsize, receives)
                return self.comm.Ialltoallv([x, self._counts(x, x.itemsize, sends), BYTE], [out, received, BYTE])
            case "broadcast", (x, root):
                return self.comm.Ibcast([x, x.nbytes, BYTE], root)
        return self.comm.Ibarrier()

    def _counts(self, x: np.ndarray, unit: int, bounds: Bounds | None = None) -> list[int]:
        return [unit * (stop - start) for start, stop in bounds or chunk_bounds(x.size, self.size)]


def abort(code: int) -> None:
    """End every rank of the job. mpirun exits with `code`, or with 1 if the code's lowest 8 bits are 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    code %= 256
    if code == 0:
        code = 1
    mpirun.end_job(code)  # without the lines that MPI_Abort prints on each rank
    time.sleep(mpirun.OUTPUT_SECONDS)
    MPI.COMM_WORLD.Abort(code)
