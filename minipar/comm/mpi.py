"""The two verbs over MPI (mpi4py), with buffers only: no array is ever pickled.

Buffers are passed as `[array, bytes, MPI.BYTE]`: naming count and type spares mpi4py's parsing of the array interface,
0.4 us of the 1 us that a call costs, and it makes every NumPy dtype sendable, MPI's own or not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from minipar.comm.transport import Owner, Request, Waitable, message_size_error
from minipar.errors import CommunicationError, UsageError

BYTE = MPI.BYTE

# Polite waiting: test, and give the core to another rank after each test in vain; after so many tests, sleep, longer
# and longer. Sleeping at once makes small rings ten times slower; testing without a pause, or never sleeping, burns the
# time of the ranks that compute when there are more ranks than cores.
YIELD_TESTS = 400
FIRST_SLEEP = 50e-6  # seconds
LONGEST_SLEEP = 1e-3

OUTPUT_SECONDS = 0.3  # from the last line printed to the end of the job

REDUCTIONS = {"sum": MPI.SUM, "max": MPI.MAX}
DATATYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
}


STATUS = MPI.Status()  # of the receive tested last: read at once, so one serves all (one thread per rank calls MPI)


def _linger(test: Callable[[MPI.Status | None], bool], status: MPI.Status | None) -> bool:
    """Test YIELD_TESTS times at most, in the tightest loop that Python has: most messages are waited for in here."""
    sched_yield = os.sched_yield
    for _ in range(YIELD_TESTS):
        if test(status):
            return True
        sched_yield()
    return False


class _Message:
    """A message that MPI carries."""

    __slots__ = ("done", "handle", "nbytes", "owner", "peer", "tag")

    def __init__(self, handle: MPI.Request, nbytes: int, peer: int, tag: int, owner: Owner) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.peer = peer
        self.tag = tag
        self.owner = owner
        self.done = False


class _Send(_Message):
    """A message going out."""

    __slots__ = ()

    def test(self) -> bool:
        return self.handle.Test()

    def linger(self) -> bool:
        return self.handle.Test() or _linger(self.handle.Test, None)

    def describe(self) -> str:
        return f"{self.owner.title()}: send of {self.nbytes} bytes to rank {self.peer} (tag {self.tag})"


class _Receive(_Message):
    """A message coming in. MPI delivers a shorter message silently, so the count that arrived is checked."""

    __slots__ = ()

    def test(self) -> bool:
        if self.done:
            return True
        try:
            if not self.handle.Test(STATUS):
                return False
        except MPI.Exception as error:
            raise self.failure(error) from None
        return self.check()

    def linger(self) -> bool:
        try:
            if not _linger(self.handle.Test, STATUS):
                return False
        except MPI.Exception as error:
            raise self.failure(error) from None
        return self.check()

    def check(self) -> bool:
        arrived = STATUS.Get_count(BYTE)
        if arrived != self.nbytes:
            raise self._wrong_size(str(arrived))
        self.done = True
        return True

    def failure(self, error: MPI.Exception) -> CommunicationError:
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return self._wrong_size("more")
        return CommunicationError(f"{self.describe()}: {error}")

    def describe(self) -> str:
        return f"{self.owner.title()}: receive of {self.nbytes} bytes from rank {self.peer} (tag {self.tag})"

    def _wrong_size(self, arrived: str) -> CommunicationError:
        return CommunicationError(message_size_error(self.owner, self.nbytes, arrived, self.peer, self.tag))


class _Native:
    """One of MPI's own collectives under way."""

    __slots__ = ("handle", "op", "owner")

    def __init__(self, handle: MPI.Request, op: str, owner: Owner) -> None:
        self.handle = handle
        self.op = op
        self.owner = owner

    def test(self) -> bool:
        return self.handle.Test()

    def linger(self) -> bool:
        return _linger(self.handle.Test, None)

    def describe(self) -> str:
        return f"{self.owner.title()}: MPI's own {self.op}"


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
        return _Send(self._isend([array, nbytes, BYTE], dest, tag), nbytes, dest, tag, owner)

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Owner) -> Request:
        nbytes = array.nbytes
        return _Receive(self._irecv([array, nbytes, BYTE], source, tag), nbytes, source, tag, owner)

    def exchange(
        self, sent: np.ndarray, dest: int, received: np.ndarray, source: int, tag: int, owner: Owner
    ) -> tuple[Request, ...]:
        # The sending half first, so that it travels while the other is posted. Then the loop of `_linger`, written out.
        nbytes = received.nbytes
        outgoing = self._isend([sent, sent.nbytes, BYTE], dest, tag)
        incoming = self._irecv([received, nbytes, BYTE], source, tag)
        test, sched_yield = incoming.Test, os.sched_yield
        try:
            for _ in range(YIELD_TESTS):
                if test(STATUS):
                    if STATUS.Get_count(BYTE) != nbytes:
                        _Receive(incoming, nbytes, source, tag, owner).check()
                    return () if outgoing.Test() else (_Send(outgoing, sent.nbytes, dest, tag, owner),)
                sched_yield()
        except MPI.Exception as error:
            raise _Receive(incoming, nbytes, source, tag, owner).failure(error) from None
        send = _Send(outgoing, sent.nbytes, dest, tag, owner)
        return _Receive(incoming, nbytes, source, tag, owner), send

    def pause(self, attempt: int, waiting_for: Waitable) -> None:
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
        return _Native(getattr(self, "_" + op)(*arguments), op, owner)

    def _all_reduce(self, x: np.ndarray, reduction: str) -> MPI.Request:
        return self.comm.Iallreduce(MPI.IN_PLACE, [x, datatype(x)], REDUCTIONS[reduction])

    def _reduce_scatter(self, x: np.ndarray, out: np.ndarray, counts: list[int], reduction: str) -> MPI.Request:
        kind = datatype(x)
        return self.comm.Ireduce_scatter([x, kind], [out, kind], counts, REDUCTIONS[reduction])

    def _all_gather(self, out: np.ndarray, counts: list[int]) -> MPI.Request:
        return self.comm.Iallgatherv(MPI.IN_PLACE, [out, [count * out.itemsize for count in counts], BYTE])

    def _all_to_all(self, x: np.ndarray, counts: list[int], out: np.ndarray, own: int) -> MPI.Request:
        sent = [count * x.itemsize for count in counts]
        return self.comm.Ialltoallv([x, sent, BYTE], [out, [own * x.itemsize] * self.size, BYTE])

    def _broadcast(self, x: np.ndarray, root: int) -> MPI.Request:
        return self.comm.Ibcast([x, x.nbytes, BYTE], root)

    def _barrier(self) -> MPI.Request:
        return self.comm.Ibarrier()

    def abort(self, code: int) -> None:
        abort(code)


def abort(code: int) -> None:
    """End every rank of the job, a moment after the last output: mpirun drops what is still in its pipes."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(OUTPUT_SECONDS)
    MPI.COMM_WORLD.Abort(code)


def datatype(x: np.ndarray) -> MPI.Datatype:
    """MPI's type for an array's dtype, needed where MPI itself adds. UsageError where it has none (float16)."""
    try:
        return DATATYPES[x.dtype.name]
    except KeyError:
        raise UsageError(f'algorithm="mpi": MPI has no datatype for {x.dtype}; choose another algorithm') from None
