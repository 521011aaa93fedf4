"""Links: a rank's messages of one operation, which are counted, and on a logical clock or in a trace also timed."""

from collections.abc import Iterable

import numpy as np

from minipar.comm.transport import Request
from minipar.comm.work import Stream


class CountedLink:
    """The `Link` of an operation over the transport of its stream. What it sends is counted as traffic."""

    def __init__(self, stream: Stream, name: str, algorithm: str, tag: int) -> None:
        self.label = stream.label
        self.name = name
        self.algorithm = algorithm
        self.tag = tag
        self.rank = stream.rank
        self.size = stream.size
        self.scratch = stream.scratch
        self.transport = stream.transport
        self.count = stream.traffic.counts.setdefault((name, stream.axis), [0, 0])  # [messages, bytes]

    def isend(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a message, and count it."""
        count = self.count
        count[0] += 1
        count[1] += array.nbytes
        return self.transport.isend(array, dest, self.tag, self)

    def irecv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive a message."""
        return self.transport.irecv(array, source, self.tag, self)

    def title(self) -> str:
        """Name the rank and the operation, for errors: `rank 5 (dp rank 2), all_reduce ring`."""
        return f"{self.label}, {self.name} {self.algorithm}".rstrip()


class TimedLink:
    """A link that takes the time of its messages, and draws them as arrows.

    Each arriving message moves the operation to max(now, sender's clock + alpha + beta*bytes). p-1 sends posted at once
    take (p-1)(alpha + beta*bytes). On a logical clock the sender's clock goes ahead of each message: a header of 8
    bytes with the same tag, not counted as traffic.
    """

    def __init__(self, link: CountedLink, stream: Stream, is_message: bool) -> None:
        self.link = link
        self.rank = link.rank
        self.size = link.size
        self.scratch = link.scratch
        self.title = link.title
        self.stream = stream
        self.is_message = is_message
        self.clock = stream.clock
        self.tracer = stream.tracer
        self.time = self.clock.now()  # of the operation
        self.port = 0.0  # when the last message sent has left
        self.waited = 0.0  # seconds in which a message was missing that its sender had not sent (wall: not delivered)
        self.nbytes = 0  # sent
        self.headers: list[Request] = []  # of the messages posted since the last step; none on a wall clock
        self.arrivals: dict[Request, tuple[np.ndarray, float, str]] = {}  # sender's clock, network's price, arrow

    def isend(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a message, behind its header on a logical clock."""
        self.nbytes += array.nbytes
        leaves = self.clock.now()
        if self.clock.logical:
            leaves = max(self.time, self.port)
            self.port = leaves + self._seconds(array, self.rank, dest)
            header = self.link.transport.isend(np.array([leaves]), dest, self.link.tag, self)
            self.headers.append(header)
        request = self.link.isend(array, dest)
        arrow = self._arrow(self.rank, dest)
        if self.tracer.enabled:
            self.tracer.arrow(self.track(), arrow, leaves, array.nbytes)
        return request

    def irecv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive a message, behind its header on a logical clock."""
        stamp = np.empty(1)
        if self.clock.logical:
            header = self.link.transport.irecv(stamp, source, self.link.tag, self)
            self.headers.append(header)
        request = self.link.irecv(array, source)
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
            arguments = {
                "op": self.link.name,
                "algorithm": self.link.algorithm,
                "bytes": self.nbytes,
                "wait": self.waited,
            }
            self.tracer.slice(self.track(), self.link.name, "communication", started, self.time, arguments)

    def track(self) -> int:
        """Return the track of a trace on which the operation is drawn."""
        kind = ", send and receive" if self.is_message else ""
        return self.tracer.track(self.stream.name + kind, f"communication {self.stream.axis}{kind}")

    def _seconds(self, array: np.ndarray, source: int, dest: int) -> float:
        ranks = self.stream.ranks
        return self.stream.engine.network.seconds(array.nbytes, ranks[source], ranks[dest])

    def _arrow(self, source: int, dest: int) -> str:
        """Name the next message from `source` to `dest`, alike on both ranks."""
        ends = f"{self.stream.name}:{source}>{dest}"
        if self.is_message:
            ends += f".{self.link.tag}"
        self.stream.messages[ends] += 1
        return f"{ends}#{self.stream.messages[ends]}"
