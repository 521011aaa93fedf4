"""isend and irecv over MPI (mpi4py), with buffers only: no array is ever pickled.

Buffers are passed as `[array, bytes, MPI.BYTE]`. Naming count and type saves 0.4 us of the 1 us that a call costs,
because mpi4py need not read the array interface. It also makes every NumPy dtype sendable, MPI's own or not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from minipar.comm.gathers import chunk_bounds
from minipar.comm.transport import Owner, Request, message_size_error
from minipar.errors import CommunicationError, UsageError

BYTE = MPI.BYTE

# Waiting: test, and give the core to another rank after each test without success. After so many tests sleep, longer
# and longer. Sleeping at once makes small rings ten times slower. Testing without a pause, or never sleeping, takes
# time from the ranks that compute when there are more ranks than cores.
YIELD_TESTS = 400
FIRST_SLEEP = 50e-6  # seconds
LONGEST_SLEEP = 1e-3

OUTPUT_SECONDS = 0.3  # from the last line printed to the end of the job

REDUCTIONS: dict[np.ufunc, MPI.Op] = {np.add: MPI.SUM, np.maximum: MPI.MAX}
DATATYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
}
STATUS = MPI.Status()  # of the receive tested last: read at once, so one serves all (one thread per rank calls MPI)

SEND = "send of {} bytes to rank {} (tag {})"
RECEIVE = "receive of {} bytes from rank {} (tag {})"
NATIVE = "MPI's own {}"


@dataclass(slots=True, eq=False)
class _Request:
    """A request of MPI: a message sent, or one of MPI's own collectives."""

    handle: MPI.Request
    owner: Owner
    words: tuple[Any, ...]  # one of the texts above, and its values

    def test(self) -> bool:
        return self.handle.Test()

    def describe(self) -> str:
        text, *values = self.words
        return f"{self.owner.title()}: {text.format(*values)}"


@dataclass(slots=True, eq=False)
class _Receive(_Request):
    """A message received. MPI delivers a shorter message without an error, so the count that arrived is checked."""

    done: bool = False

    def test(self) -> bool:
        if self.done:
            return True
        try:
            if not self.handle.Test(STATUS):
                return False
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise self._wrong_size("more") from None
            raise CommunicationError(f"{self.describe()}: {error}") from None
        arrived = STATUS.Get_count(BYTE)
        if arrived != self.words[1]:
            raise self._wrong_size(str(arrived))
        self.done = True
        return True

    def _wrong_size(self, arrived: str) -> CommunicationError:
        _, expected, source, tag = self.words
        return CommunicationError(message_size_error(self.owner, expected, arrived, source, tag))


class MPITransport:
    """The ranks of one MPI communicator."""

    launcher = "mpirun"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._isend = comm.Isend
        self._irecv = comm.Irecv

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Owner) -> Request:
        nbytes = array.nbytes
        return _Request(self._isend([array, nbytes, BYTE], dest, tag), owner, (SEND, nbytes, dest, tag))

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Owner) -> Request:
        nbytes = array.nbytes
        return _Receive(self._irecv([array, nbytes, BYTE], source, tag), owner, (RECEIVE, nbytes, source, tag))

    def pause(self, attempt: int, waiting_for: Request) -> None:
        if attempt < YIELD_TESTS:
            os.sched_yield()
        else:
            time.sleep(min(FIRST_SLEEP * (1 + (attempt - YIELD_TESTS) // 8), LONGEST_SLEEP))

    def group(self, ranks: Sequence[int], name: str) -> MPITransport:
        everyone = self.comm.Get_group()
        members = everyone.Incl(list(ranks))
        comm = self.comm.Create_group(members, 0)
        comm.Set_name(name)
        members.Free()
        everyone.Free()
        return MPITransport(comm)

    def native(self, op: str, owner: Owner, *arguments: Any) -> Request:
        return _Request(getattr(self, "_" + op)(*arguments), owner, (NATIVE, op))

    # The arguments are those of the algorithms in reductions.py and gathers.py.

    def _all_reduce(self, x: np.ndarray, combine: np.ufunc) -> MPI.Request:
        return self.comm.Iallreduce(MPI.IN_PLACE, [x, datatype(x)], REDUCTIONS[combine])

    def _reduce_scatter(self, x: np.ndarray, out: np.ndarray, combine: np.ufunc) -> MPI.Request:
        kind = datatype(x)
        return self.comm.Ireduce_scatter([x, kind], [out, kind], self._counts(x, 1), REDUCTIONS[combine])

    def _all_gather(self, out: np.ndarray) -> MPI.Request:
        return self.comm.Iallgatherv(MPI.IN_PLACE, [out, self._counts(out, out.itemsize), BYTE])

    def _all_to_all(self, x: np.ndarray, out: np.ndarray) -> MPI.Request:
        received = [out.nbytes // self.size] * self.size
        return self.comm.Ialltoallv([x, self._counts(x, x.itemsize), BYTE], [out, received, BYTE])

    def _broadcast(self, x: np.ndarray, root: int) -> MPI.Request:
        return self.comm.Ibcast([x, x.nbytes, BYTE], root)

    def _barrier(self) -> MPI.Request:
        return self.comm.Ibarrier()

    def _counts(self, x: np.ndarray, unit: int) -> list[int]:
        return [unit * (stop - start) for start, stop in chunk_bounds(x.size, self.size)]

    def abort(self, code: int) -> None:
        abort(code)


def abort(code: int) -> None:
    """End every rank of the job, a moment after the last output: mpirun drops the output that is still in its pipes."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(OUTPUT_SECONDS)
    MPI.COMM_WORLD.Abort(code)


def datatype(x: np.ndarray) -> MPI.Datatype:
    """Return MPI's type for an array's dtype, which MPI needs to add. UsageError where it has none (float16)."""
    try:
        return DATATYPES[x.dtype.name]
    except KeyError:
        raise UsageError(f'algorithm="mpi": MPI has no datatype for {x.dtype}; choose another algorithm') from None
