"""Clocks: real time, or logical time that messages move.

The network's prices, and the recorder of a rank's work.

On a logical clock each message carries its sender's time. The receiver continues at the later of
its own time and that time plus the network's price. Eight ranks that share two cores then still
show the timeline of eight cores. NB: the rule for messages is Lamport's (1978) with durations, as
in network simulators (LogGP, SimGrid's SMPI).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MICROSECONDS = 1e6


@dataclass(frozen=True)
class Network:
    """The price of messages: n bytes take alpha + beta*n seconds, or those of `between` from host to host.

    The messages of a communicator's collectives leave a rank one after the other. Messages of
    different communicators and ranks do not slow one another down: every rank has a network card of
    its own.
    """

    alpha: float = 0.0  # seconds per message
    beta: float = 0.0  # seconds per byte
    between: "Network | None" = None  # None: as inside a host
    per_host: int = 8  # ranks, which are numbered host by host

    def seconds(self, nbytes: int, source: int = 0, dest: int = 0) -> float:
        """Return the time of a message of `nbytes` between two world ranks."""
        if self.between is not None and source // self.per_host != dest // self.per_host:
            return self.between.seconds(nbytes, source, dest)
        return self.alpha + self.beta * nbytes


class Clock:
    """The time of one rank in seconds.

    It is logical, moved by messages that carry their sender's time, or real.
    """

    name: str
    logical = True
    ticks: Callable[[], float]  # what moves it between communication calls

    def __init__(self) -> None:
        self._time = 0.0
        self._mark = self.ticks()

    def now(self) -> float:
        """Return the present time."""
        return self._time + (self.ticks() - self._mark)

    def resume(self, at: float) -> None:
        """Continue at time `at`, after a communication call. Real time goes on by itself."""
        if self.logical:
            self._time = at
            self._mark = self.ticks()


class WallClock(Clock):
    """Real time: seconds since the last call of `align` (at first, since the clock was made)."""

    name = "wall"
    logical = False
    ticks = staticmethod(time.perf_counter)

    def align(self) -> None:
        """Set the clock to 0."""
        self._mark = self.ticks()


class CpuClock(Clock):
    """Logical time: this thread's CPU time between communication calls.

    The calls take only what messages impose.
    """

    name = "cpu"
    ticks = staticmethod(time.thread_time)


class ModelClock(Clock):
    """Logical time that only `advance`, by a cost model's times, and messages move: exact and repeatable."""

    name = "model"

    @staticmethod
    def ticks() -> float:
        """Return 0: no time passes by itself."""
        return 0.0

    def __init__(self, flops_per_second: float = 1e12) -> None:
        super().__init__()
        self.flops_per_second = flops_per_second

    def advance(self, seconds: float) -> None:
        """Compute for `seconds`."""
        self._time += seconds

    def compute(self, flops: float) -> None:
        """Take the time of so many operations of a matrix product."""
        self.advance(flops / self.flops_per_second)


CLOCKS: dict[str, Callable[[], Clock]] = {"wall": WallClock, "cpu": CpuClock, "model": ModelClock}


class Tracer:
    """The recorder of one rank's work, as Chrome trace events (trace.py).

    While off it costs one `if` per operation.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.enabled = False
        self.events: list[dict[str, Any]] = []
        # key -> (tid, name)
        self.tracks: dict[str, tuple[int, str]] = {"computation": (0, "computation")}

    @contextmanager
    def region(self, name: str, flops: float = 0.0) -> Iterator[None]:
        """Record the block as a slice of computation.

        On a model clock it takes flops / clock.flops_per_second.
        """
        start = self.clock.now()
        if isinstance(self.clock, ModelClock):
            self.clock.compute(flops)
        try:
            yield
        finally:
            if self.enabled:
                self.slice(
                    0, name, "computation", start, self.clock.now(), {"flops": flops} if flops else {}
                )

    def track(self, key: str, name: str) -> int:
        """Return the number of the track with this key.

        The first call makes it and gives it its name.
        """
        return self.tracks.setdefault(key, (len(self.tracks), name))[0]

    def slice(
        self, track: int, name: str, category: str, start: float, end: float, arguments: dict[str, Any]
    ) -> None:
        """Record an interval, given in seconds, on a track."""
        start *= MICROSECONDS
        end *= MICROSECONDS
        event = {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start}
        self.events.append(event | {"tid": track, "args": arguments})

    def arrow(self, track: int, arrow: str, at: float, nbytes: int | None = None) -> None:
        """Record one end of a message: its start if `nbytes` is given, else its arrival."""
        event: dict[str, Any] = {"name": "message", "cat": "message", "id": arrow}
        event |= {"ts": at * MICROSECONDS, "tid": track}
        end = {"ph": "f", "bp": "e"} if nbytes is None else {"ph": "s", "args": {"bytes": nbytes}}
        self.events.append(event | end)
