"""The trace: a record of each rank's work, as Chrome trace JSON.

It opens in Perfetto or chrome://tracing. Each rank is a process with several tracks: "computation" holds the
regions of the program, "communication <axis>" the collectives of one communicator, and "communication <axis>, send and
receive" the single messages. Slices on one track nest or follow one another, as Perfetto demands. An arrow joins each
message's sender and receiver, and records the message's bytes at its start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from minipar.comm.clock import Clock, ModelClock, WallClock

COMPUTATION = "computation"
MICROSECONDS = 1e6


class Tracer:
    """The recorder of one rank. It is off until `start_trace`, and then costs one `if` per operation."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.enabled = False
        self.events: list[dict[str, Any]] = []
        self._tracks: dict[str, tuple[int, str]] = {COMPUTATION: (0, COMPUTATION)}  # key -> (tid, name)

    @contextmanager
    def region(self, name: str, flops: float = 0.0) -> Iterator[None]:
        """Record the block as a slice of computation. On a model clock it takes flops / clock.flops_per_second."""
        if isinstance(self.clock, ModelClock):
            start = self.clock.now()
            self.clock.advance(flops / self.clock.flops_per_second)
        elif self.enabled:
            start = self.clock.now()
        else:
            yield
            return
        try:
            yield
        finally:
            if self.enabled:
                self.slice(0, name, "computation", start, self.clock.now(), {"flops": flops} if flops else {})

    def track(self, key: str, name: str) -> int:
        """Return the number of the track with this key. The first call makes it and gives it its name."""
        return self._tracks.setdefault(key, (len(self._tracks), name))[0]

    def slice(self, track: int, name: str, category: str, start: float, end: float, arguments: dict[str, Any]) -> None:
        """Record an interval, given in seconds, on a track."""
        start, end = start * MICROSECONDS, end * MICROSECONDS
        event = {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start, "tid": track}
        self.events.append(event | {"args": arguments} if arguments else event)

    def arrow(self, track: int, arrow: str, at: float, nbytes: int | None = None) -> None:
        """Record one end of a message: its start if `nbytes` is given, else its arrival."""
        kind: dict[str, Any] = {"ph": "f", "bp": "e"} if nbytes is None else {"ph": "s", "args": {"bytes": nbytes}}
        place = {"id": arrow, "ts": at * MICROSECONDS, "tid": track}
        self.events.append(kind | {"name": "message", "cat": "message"} | place)

    def chrome_events(self, rank: int) -> list[dict[str, Any]]:
        """Return all events, with the names of the process and of its tracks."""
        names: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        ]
        for tid, name in self._tracks.values():
            names.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}})
        return names + [event | {"pid": rank} for event in self.events]


class Ranks(Protocol):
    """The part of a Communicator that a trace of all ranks needs."""

    rank: int
    ranks: list[int]
    clock: Clock
    tracer: Tracer

    def barrier(self) -> None: ...

    def gather_bytes(self, data: bytes) -> list[bytes] | None: ...

    def agree(self, error: str | None) -> None: ...


class Mesh(Protocol):
    """The part of a DeviceMesh that is written to a trace."""

    AXES: tuple[str, ...]
    shape: dict[str, int]


def start_trace(comm: Ranks) -> None:
    """Forget all events and record from now on. Collective. Wall clocks of all ranks are set to 0 together."""
    comm.barrier()
    if isinstance(comm.clock, WallClock):
        comm.barrier()  # the second time every rank is awake and leaves it at nearly the same moment
        comm.clock.align()
    comm.tracer.events.clear()
    comm.tracer.enabled = True


def save_chrome_trace(path: str, comm: Ranks, mesh: Mesh | None = None) -> None:
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
