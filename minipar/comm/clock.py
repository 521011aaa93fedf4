"""Time is a clock you choose.

`WallClock`   what a watch shows.
`CpuClock`    a logical clock per rank. It advances by the rank's own CPU time between communication calls, and each
              message carries its sender's clock: the receiver continues at the later of the two, plus the network's
              price. Eight ranks that share two cores then still show the timeline that eight cores would.
`ModelClock`  the same, but computation takes the time that a cost model says: exact and repeatable.

NB: the rule for messages is Lamport's (1978) with durations, as in network simulators (LogGP, SimGrid's SMPI).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from minipar.errors import UsageError


@dataclass(frozen=True)
class Network:
    """A message of n bytes takes alpha + beta*n seconds.

    The messages that a communicator's collectives send leave a rank one after the other; those of different
    communicators and ranks do not slow one another down.
    """

    alpha: float = 0.0  # seconds per message
    beta: float = 0.0  # seconds per byte

    def seconds(self, nbytes: int, source: int = 0, dest: int = 0) -> float:
        """What a message of `nbytes` takes between two world ranks."""
        return self.alpha + self.beta * nbytes


@dataclass(frozen=True)
class HostNetwork(Network):
    """Two levels: alpha and beta between ranks of one host, those of `between` from host to host. Ranks are numbered
    host by host, `per_host` to each; every rank has a card of its own to the outside.
    """

    between: Network = Network()
    per_host: int = 8

    def seconds(self, nbytes: int, source: int = 0, dest: int = 0) -> float:
        if source // self.per_host != dest // self.per_host:
            return self.between.seconds(nbytes, source, dest)
        return super().seconds(nbytes, source, dest)


class Clock(Protocol):
    """One rank's time in seconds."""

    name: str
    logical: bool  # messages carry the sender's time

    def now(self) -> float:
        """The present moment."""

    def resume(self, at: float) -> None:
        """A communication call ends: the rank continues at time `at`. Nothing to do for a wall clock."""


class WallClock:
    """Seconds since `align` was last called (since the clock was made, at first)."""

    name = "wall"
    logical = False

    def __init__(self) -> None:
        self.align()

    def align(self) -> None:
        """Call this moment zero."""
        self._origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def resume(self, at: float) -> None:
        pass


class CpuClock:
    """This thread's CPU time between communication calls; the calls themselves take only what messages impose."""

    name = "cpu"
    logical = True

    def __init__(self) -> None:
        self._time = 0.0
        self._mark = time.thread_time()

    def now(self) -> float:
        return self._time + (time.thread_time() - self._mark)

    def resume(self, at: float) -> None:
        self._time = at
        self._mark = time.thread_time()


class ModelClock:
    """Time moves by `advance` and by messages, by nothing else."""

    name = "model"
    logical = True

    def __init__(self, flops_per_second: float = 1e12) -> None:
        self.flops_per_second = flops_per_second
        self._time = 0.0

    def now(self) -> float:
        return self._time

    def resume(self, at: float) -> None:
        self._time = at

    def advance(self, seconds: float) -> None:
        """Compute for `seconds`."""
        self._time += seconds


CLOCKS: dict[str, Callable[[], Clock]] = {"wall": WallClock, "cpu": CpuClock, "model": ModelClock}


def make_clock(clock: str | Clock | None) -> Clock:
    """The clock of that name; None is "wall"; a clock is returned as it is. UsageError for an unknown name."""
    if clock is None:
        return WallClock()
    if isinstance(clock, str):
        if clock not in CLOCKS:
            raise UsageError(f'clock "{clock}": expected one of {", ".join(CLOCKS)}')
        return CLOCKS[clock]()
    return clock
