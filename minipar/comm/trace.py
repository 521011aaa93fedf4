"""Operations that take time: on a logical clock they move it, and while a trace is recorded they are drawn.

Each rank is a process with several tracks: "computation" holds the regions of the program,
"communication <axis>" the collectives of one communicator, and "communication <axis>, send and
receive" the single messages. Slices on one track nest or follow one another, as Perfetto demands. An
arrow joins each message's sender and receiver, and records the message's bytes at its start.
chrome_trace.py writes the file.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minipar.backend import Array
from minipar.comm.transport import USER_TAGS, Link, Request, Steps
from minipar.comm.work import Work


class TimedLink(Link):
    """A link that takes the time of its messages, and draws them as arrows.

    Each arriving message moves the operation to max(now, sender's clock + alpha + beta*bytes). p-1
    sends posted at once take (p-1)(alpha + beta*bytes). On a logical clock the sender's clock goes
    ahead of each message: a header of 8 bytes with the same tag, not counted as traffic.
    """

    def __init__(self, comm: Any, name: str, algorithm: str, tag: int) -> None:
        super().__init__(comm, name, algorithm, tag)
        self.is_message = tag < USER_TAGS  # a message of the user
        self.clock = comm.clock
        self.tracer = comm.tracer
        self.time = self.clock.now()  # when the operation was issued
        self.port = 0.0  # when the last message sent has left
        # Seconds in which a message was missing that its sender had not sent (wall: not delivered).
        self.waited = 0.0
        self.nbytes = 0  # sent
        self.headers: list[Request] = []  # for the messages since the last step; none on a wall clock
        # Of each message under way: the sender's clock, the network's price, and the arrow.
        self.arrivals: dict[Request, tuple[np.ndarray, float, str]] = {}

    def isend(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a message, behind its header on a logical clock."""
        self.nbytes += array.nbytes
        if not self.clock.logical:
            leaves = self.clock.now()
        else:
            leaves = max(self.time, self.port)
            self.port = leaves + self._seconds(array, self.rank, dest)
            stamp = np.array([leaves])
            self.headers.append(self.transport.isend(stamp, dest, self.tag, self))
        request = super().isend(array, dest)
        arrow = self._arrow(self.rank, dest)
        if self.tracer.enabled:
            self.tracer.arrow(self.track(), arrow, leaves, array.nbytes)
        return request

    def irecv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive a message, behind its header on a logical clock."""
        stamp = np.empty(1)
        if self.clock.logical:
            self.headers.append(self.transport.irecv(stamp, source, self.tag, self))
        request = super().irecv(array, source)
        seconds = self._seconds(array, source, self.rank)
        self.arrivals[request] = (stamp, seconds, self._arrow(source, self.rank))
        return request

    def settle(self, requests: Iterable[Request]) -> None:
        """Move the operation's time to the arrival of the last of these messages, and end their arrows there."""
        incoming = [self.arrivals.pop(request) for request in requests if request in self.arrivals]
        if self.clock.logical:
            for stamp, seconds, _ in incoming:
                sent = float(stamp[0])
                self.waited += max(0.0, sent - self.time)  # the rest, until it arrives, is transmission
                self.time = max(self.time, sent + seconds)
        else:
            before = self.time
            self.time = self.clock.now()
            self.waited += self.time - before
        if self.tracer.enabled:
            for _, _, arrow in incoming:
                self.tracer.arrow(self.track(), arrow, self.time)

    def record(self, started: float) -> None:
        """Draw the operation as a slice that ends now."""
        if self.tracer.enabled:
            arguments = {"algorithm": self.algorithm, "bytes": self.nbytes, "wait": self.waited}
            self.tracer.slice(self.track(), self.name, "communication", started, self.time, arguments)

    def track(self) -> int:
        """Return the track of a trace on which the operation is drawn."""
        kind = ", send and receive" if self.is_message else ""
        return self.tracer.track(self.comm.name + kind, f"communication {self.comm.axis}{kind}")

    def _seconds(self, array: np.ndarray, source: int, dest: int) -> float:
        ranks = self.comm.ranks
        return self.comm.engine.network.seconds(array.nbytes, ranks[source], ranks[dest])

    def _arrow(self, source: int, dest: int) -> str:
        """Name the next message from `source` to `dest`, alike on both ranks."""
        ends = f"{self.comm.name}:{source}>{dest}"
        if self.is_message:
            ends += f".{self.tag}"
        self.comm.messages[ends] += 1
        return f"{ends}#{self.comm.messages[ends]}"


class TimedWork(Work):
    """A Work on a logical clock or in a trace: it takes the time that its messages impose, and is drawn as a slice.

    It starts at the later of the call and the end of the previous operation.
    """

    link: TimedLink

    def begin(self, steps: Steps, result: Array | None) -> None:
        """Issue the operation. The call itself takes no time; a send is recorded at once."""
        link = self.link
        called = link.time
        if link.name == "send":
            if not self.comm.clock.logical:
                link.time = self.comm.clock.now()
            link.record(called)
        super().begin(self._time_message(steps) if link.is_message else self._time(steps), result)
        self.comm.clock.resume(called)

    def test(self) -> bool:
        """Run as far as possible."""
        return self._timed(super().test)

    def wait(self) -> Array:
        """Run to the end, before which the rank does not continue."""
        return self._timed(super().wait)

    def _timed(self, call: Callable[[], Any]) -> Any:
        """Make a call that takes no time itself; an operation that is finished takes its own."""
        self.asked = self.comm.clock.now()  # when the caller last tested or waited
        result = call()
        self.comm.clock.resume(max(self.asked, self.link.time) if self.done else self.asked)
        return result

    def call_back(self) -> None:
        """Call what `then` was given at the time of the last message, also on a rank that notices it later."""
        now = self.comm.clock.now()
        self.comm.clock.resume(self.link.time)
        super().call_back()
        self.comm.clock.resume(now)

    def _time(self, steps: Steps) -> Steps:
        """Yield the same steps, with headers, and take their time.

        Begins when it is the operation's turn.
        """
        link = self.link
        started = max(link.time, self.comm.end) if self.comm.clock.logical else self.comm.clock.now()
        link.time = started
        link.port = self.comm.port
        for requests in steps:
            yield [*requests, *link.headers]
            link.headers.clear()
            link.settle(requests)
        self.comm.end = link.time
        self.comm.port = link.port
        link.record(started)

    def _time_message(self, steps: Steps) -> Steps:
        """Yield a single message. A receive takes its time, and is recorded, when it has arrived."""
        link = self.link
        requests = next(steps)
        yield [*requests, *link.headers]
        if link.name == "recv":
            link.time = self.asked
            link.settle(requests)
            link.record(self.asked)
