"""The trace: operations that take time and are drawn, and the record of all ranks as Chrome trace JSON.

It opens in Perfetto or chrome://tracing. Each rank is a process with several tracks: "computation" holds the
regions of the program, "communication <axis>" the collectives of one communicator, and "communication <axis>, send and
receive" the single messages. Slices on one track nest or follow one another, as Perfetto demands. An arrow joins each
message's sender and receiver, and records the message's bytes at its start.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minipar.comm.clock import WallClock
from minipar.comm.transport import Request
from minipar.comm.work import Stream, Work
from minipar.memory import unrecorded


class TimedWork(Work):
    """A Work on a logical clock or in a trace: it takes the time that its messages impose, and is drawn as a slice.

    It starts at the later of the call and the end of the previous operation. Each arriving message moves it to
    max(now, sender's clock + alpha + beta*bytes). p-1 sends posted at once take (p-1)(alpha + beta*bytes). On a logical
    clock the sender's clock goes ahead of each message: a header of 8 bytes with the same tag, not counted as traffic.
    """

    def __init__(self, stream: Stream, op: str, algorithm: str, tag: int) -> None:
        super().__init__(stream, op, algorithm, tag)
        self.clock, self.tracer = stream.engine.clock, stream.engine.tracer
        self.called = self.started = self.time = self.clock.now()
        self.port = 0.0  # when the last message sent has left
        self.asked = self.called  # when the caller last tested or waited
        self.waited = 0.0  # seconds in which a message was missing that its sender had not sent (wall: not delivered)
        self.nbytes = 0  # sent
        self.headers: list[Request] = []  # of the messages posted since the last step; none on a wall clock
        self.arrivals: dict[Request, tuple[np.ndarray, float, str]] = {}  # sender's clock, network's price, arrow

    def isend(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a message, behind its header on a logical clock."""
        self.nbytes += array.nbytes
        leaves = max(self.time, self.port) if self.clock.logical else self.clock.now()
        if self.clock.logical:
            self.port = leaves + self._seconds(array, self.rank, dest)
            self.headers.append(self.transport.isend(np.array([leaves]), dest, self.tag, self))
        payload, arrow = super().isend(array, dest), self._arrow(self.rank, dest)
        if self.tracer.enabled:
            self.tracer.arrow(self._track(), arrow, leaves, array.nbytes)
        return payload

    def irecv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive a message, behind its header on a logical clock."""
        stamp = np.empty(1)
        if self.clock.logical:
            self.headers.append(self.transport.irecv(stamp, source, self.tag, self))
        payload, seconds = super().irecv(array, source), self._seconds(array, source, self.rank)
        self.arrivals[payload] = stamp, seconds, self._arrow(source, self.rank)
        return payload

    def _seconds(self, array: np.ndarray, source: int, dest: int) -> float:
        ranks = self.transport.ranks
        return self.stream.engine.network.seconds(array.nbytes, ranks[source], ranks[dest])

    def _track(self) -> int:
        kind = ", send and receive" if self.single else ""
        return self.tracer.track(self.transport.name + kind, f"communication {self.stream.axis}{kind}")

    def _arrow(self, source: int, dest: int) -> str:
        """Name the next message from `source` to `dest`, alike on both ranks."""
        ends = f"{self.transport.name}:{source}>{dest}" + (f".{self.tag}" if self.single else "")
        self.stream.messages[ends] += 1
        return f"{ends}#{self.stream.messages[ends]}"

    def start(self, steps: Iterator[Iterable[Request]], result: Any) -> Work:
        """Issue the operation. The call itself takes no time."""
        super().start(self._follow_message(steps) if self.single else self._follow(steps), result)
        self.clock.resume(self.called)
        return self

    def test(self) -> bool:
        self.asked = self.clock.now()
        return super().test()

    def wait(self) -> Any:
        """Wait until the operation is finished. The rank continues no earlier than it ended."""
        self.asked = self.clock.now()
        result = super().wait()
        self.clock.resume(max(self.asked, self.time))
        return result

    def _follow(self, steps: Iterator[Iterable[Request]]) -> Iterator[Iterable[Request]]:
        """Yield the same steps, with headers, and take their time. Begins when it is the operation's turn."""
        stream = self.stream
        self.started = self.time = max(self.called, stream.end) if self.clock.logical else self.clock.now()
        self.port = stream.port
        for requests in steps:
            yield [*requests, *self.headers]
            self.headers.clear()
            self._settle(requests)
        stream.end, stream.port = self.time, self.port
        self._record()

    def _follow_message(self, steps: Iterator[Iterable[Request]]) -> Iterator[Iterable[Request]]:
        """Yield a single message. A send takes no time and is recorded at once, a receive when it has arrived."""
        for requests in steps:
            if self.op == "send":
                self.time = self.called if self.clock.logical else self.clock.now()
                self._record()
            yield [*requests, *self.headers]
            if self.op == "recv":
                self.started = self.time = self.asked
                self._settle(requests)
                self._record()
            self.clock.resume(max(self.asked, self.time))

    def _settle(self, requests: Iterable[Request]) -> None:
        """Move the operation's time to the arrival of the last of these messages, and end their arrows there."""
        incoming = [self.arrivals.pop(request) for request in requests if request in self.arrivals]
        if self.clock.logical:
            for stamp, seconds, _ in incoming:
                sent = float(stamp[0])
                self.waited += max(0.0, sent - self.time)  # the rest, until it arrives, is transmission
                self.time = max(self.time, sent + seconds)
        else:
            before, self.time = self.time, self.clock.now()
            self.waited += self.time - before
        if self.tracer.enabled:
            for _, _, arrow in incoming:
                self.tracer.arrow(self._track(), arrow, self.time)

    def _record(self) -> None:
        if self.tracer.enabled:
            arguments = {"op": self.op, "algorithm": self.algorithm, "bytes": self.nbytes, "wait": self.waited}
            self.tracer.slice(self._track(), self.op, "communication", self.started, self.time, arguments)


def start_trace(comm: Any) -> None:  # a Communicator, which imports this file
    """Forget all events and record from now on. Collective. Wall clocks of all ranks are set to 0 together."""
    comm.barrier()
    if isinstance(comm.clock, WallClock):
        comm.barrier()  # the second time every rank is awake and leaves it at nearly the same moment
        comm.clock.align()
    comm.tracer.events.clear()
    comm.tracer.enabled = True


@contextmanager
def unseen(comm: Any) -> Iterator[None]:
    """Keep what the block sends, computes and holds out of the trace, the clock, the traffic and the memory ledger."""
    traced, counts, now = comm.tracer.enabled, comm.traffic.counts, comm.clock.now()
    comm.tracer.enabled, comm.traffic.counts = False, {}
    try:
        with unrecorded():
            yield
    finally:
        comm.tracer.enabled, comm.traffic.counts = traced, counts
        comm.clock.resume(now)


def save_chrome_trace(path: str, comm: Any, mesh: Any = None) -> None:
    """Stop recording and write all ranks' events to `path` as {"traceEvents": [...]} on rank 0. Collective.

    otherData names the clock and, if it is given, the mesh: {"pp": PP, "dp": DP, "tp": TP}, the slowest axis first.
    """
    comm.tracer.enabled = False
    gathered = comm.gather_bytes(json.dumps(comm.tracer.chrome_events(comm.ranks[comm.rank])).encode())
    error = None
    if gathered is not None:
        events = [event for data in gathered for event in json.loads(data)]
        about: dict[str, Any] = {"clock": comm.clock.name}
        if mesh is not None:
            about["mesh"] = {axis: mesh.shape[axis] for axis in reversed(mesh.AXES)}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, file)
        except OSError as problem:
            error = f"--trace {path}: {problem.strerror}"
    comm.agree(error)
