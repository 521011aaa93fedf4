"""One operation's view of the wire: its two verbs, its tags, its account, and (when watched) its time.

`Link` counts messages and does nothing else, so a small all-reduce stays a handful of Python calls. `WatchedLink` is
used instead when a logical clock runs or a trace is being recorded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from minipar.comm.transport import Owner, Request, Transport

if TYPE_CHECKING:
    from minipar.comm.group import Group

# What an algorithm is: it yields the requests that must be done before it continues.
Steps = Generator[Iterable[Request], None, None]


class Link:
    """The messages of one operation on one communicator."""

    __slots__ = ("algorithm", "alone", "comm", "count", "number", "op", "rank", "size", "tag", "transport")

    def __init__(self, comm: Group, op: str, algorithm: str, tag: int, number: int) -> None:
        self.comm = comm
        self.op = op
        self.algorithm = algorithm
        self.tag = tag  # of step 0
        self.number = number  # which operation of this communicator it is
        self.rank = comm.rank
        self.size = comm.size
        self.transport: Transport = comm.transport
        self.count = comm.traffic.counter(op, comm.axis)
        self.alone = False  # a blocking call, and no other work of this rank is under way

    def isend(self, array: np.ndarray, dest: int, step: int) -> Request:
        """Start to send to a rank of the group; counted."""
        count = self.count
        count[0] += 1
        count[1] += array.nbytes
        return self.transport.isend(array, dest, self.tag + step, self)

    def irecv(self, array: np.ndarray, source: int, step: int) -> Request:
        """Start to receive from a rank of the group."""
        return self.transport.irecv(array, source, self.tag + step, self)

    def exchange(
        self, sent: np.ndarray, dest: int, received: np.ndarray, source: int, step: int
    ) -> tuple[Request, ...]:
        """`isend` and `irecv` together: what most steps of most algorithms are. Returns what is still to be done.

        When the rank has nothing else to do the transport may linger here: waiting in one short loop instead of through
        generator and engine halves the time of a small all-reduce.
        """
        if self.alone:
            count = self.count
            count[0] += 1
            count[1] += sent.nbytes
            return self.transport.exchange(sent, dest, received, source, self.tag + step, self)
        outgoing = self.isend(sent, dest, step)
        return self.irecv(received, source, step), outgoing

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Room for `count` elements, reused by the next operation on this communicator."""
        return self.comm.scratch(count, dtype)

    def title(self) -> str:
        """For error messages."""
        return f"{self.comm.title()}, {self.op} {self.algorithm}".rstrip()


class Stamped:
    """A message with the sender's clock ahead of it: an 8-byte header with the same tag, not counted as traffic."""

    __slots__ = ("arrow", "header", "payload", "seconds", "stamp")

    def __init__(self, payload: Request, seconds: float, arrow: str, header: Request | None, stamp: np.ndarray | None):
        self.payload = payload
        self.seconds = seconds  # on the way, on a logical clock
        self.arrow = arrow  # the name of this message in the trace; "" for one going out
        self.header = header
        self.stamp = stamp

    def test(self) -> bool:
        return (self.header is None or self.header.test()) and self.payload.test()

    def linger(self) -> bool:
        return self.test()

    @property
    def owner(self) -> Owner:
        return self.payload.owner

    def describe(self) -> str:
        return self.payload.describe()


class WatchedLink(Link):
    """A Link with a clock of its own: the clock of the stream of operations on this communicator.

    NB: an asynchronous collective of NCCL runs on a CUDA stream beside the computation; this is that stream's time.
    It starts at the later of the call and the end of the previous operation here; each arriving message moves it to
    max(now, sender's clock + alpha + beta*bytes). Messages of a communicator's collectives leave one after the other:
    p-1 sends posted at once take (p-1)(alpha + beta*bytes), as the formulas of the literature have it.
    """

    __slots__ = ("called", "nbytes", "port", "started", "time", "waited")

    def __init__(self, comm: Group, op: str, algorithm: str, tag: int, number: int) -> None:
        super().__init__(comm, op, algorithm, tag, number)
        self.called = self.started = self.time = comm.clock.now()
        self.port = 0.0  # when the last message sent has left
        self.waited = 0.0  # seconds in which a message was missing that its sender had not sent (wall: not delivered)
        self.nbytes = 0  # sent

    def isend(self, array: np.ndarray, dest: int, step: int) -> Request:
        clock, tracer = self.comm.clock, self.comm.tracer
        leaves = self.time if clock.logical else clock.now()
        self.nbytes += array.nbytes
        header = None
        stamp = None
        if clock.logical:
            leaves = max(leaves, self.port)
            self.port = leaves + self._seconds(array, self.rank, dest)
            stamp = np.array([leaves])
            header = self.transport.isend(stamp, dest, self.tag + step, self)
        payload = super().isend(array, dest, step)
        if tracer.enabled:
            tracer.arrow_out(self, self._arrow(self.rank, dest, step), leaves, array.nbytes)
        return Stamped(payload, 0.0, "", header, stamp)

    def irecv(self, array: np.ndarray, source: int, step: int) -> Request:
        header = None
        stamp = None
        if self.comm.clock.logical:
            stamp = np.empty(1)
            header = self.transport.irecv(stamp, source, self.tag + step, self)
        payload = super().irecv(array, source, step)
        seconds = self._seconds(array, source, self.rank)
        return Stamped(payload, seconds, self._arrow(source, self.rank, step), header, stamp)

    def _seconds(self, array: np.ndarray, source: int, dest: int) -> float:
        ranks = self.comm.ranks
        return self.comm.network.seconds(array.nbytes, ranks[source], ranks[dest])

    def _arrow(self, source: int, dest: int, step: int) -> str:
        return f"{self.comm.name}#{self.number}.{self.tag + step}:{source}>{dest}"

    def follow(self, steps: Steps) -> Steps:
        """The same steps, with the time they take. Runs when the operation's turn has come."""
        comm, clock = self.comm, self.comm.clock
        self.started = self.time = max(self.called, comm.stream_time) if clock.logical else clock.now()
        self.port = comm.stream_port
        for requests in steps:
            yield requests
            self.settle(requests)
        comm.stream_time, comm.stream_port = self.time, self.port
        self.record()

    def settle(self, requests: Iterable[Any]) -> None:
        """These requests are done: move the stream's clock to the last arrival, and end their arrows there."""
        clock, tracer = self.comm.clock, self.comm.tracer
        incoming = [request for request in requests if request.arrow]
        if clock.logical:
            for request in incoming:
                sent = float(request.stamp[0])
                self.waited += max(0.0, sent - self.time)  # the rest, until it arrives, is transmission
                self.time = max(self.time, sent + request.seconds)
        else:
            before, self.time = self.time, clock.now()
            self.waited += self.time - before
        if tracer.enabled:
            for request in incoming:
                tracer.arrow_in(self, request.arrow)

    def record(self) -> None:
        """Draw the operation as a slice."""
        tracer = self.comm.tracer
        if tracer.enabled:
            tracer.communication(self)
