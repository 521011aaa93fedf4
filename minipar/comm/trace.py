"""The trace: what each rank did and when, as Chrome trace JSON (opens in Perfetto or chrome://tracing).

A process per rank. Its tracks: "computation" holds the regions of the program, "communication <axis>" the collectives
of one communicator, "communication <axis>, send and receive" the single messages. Slices on one track nest or follow
one another, as Perfetto demands. An arrow joins each message's sender and receiver; where it starts it has its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minipar.comm.clock import Clock, ModelClock, WallClock

if TYPE_CHECKING:
    from minipar.comm.communicator import Communicator
    from minipar.comm.link import WatchedLink
    from minipar.comm.mesh import DeviceMesh

COMPUTATION = "computation"
MICROSECONDS = 1e6


class Tracer:
    """One rank's recorder; off until `start_trace`. Off, it costs one `if` per operation."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.enabled = False
        self.events: list[dict[str, Any]] = []
        self._tracks: dict[str, tuple[int, str]] = {COMPUTATION: (0, COMPUTATION)}  # key -> (tid, name)

    @contextmanager
    def region(self, name: str, flops: float = 0.0) -> Iterator[None]:
        """A stretch of computation, drawn as a slice. On a model clock it takes flops / clock.flops_per_second."""
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
                self._slice(0, name, "computation", start, self.clock.now(), {"flops": flops} if flops else {})

    def communication(self, link: WatchedLink) -> None:
        """A finished operation, as a slice on its communicator's track."""
        arguments = {"op": link.op, "algorithm": link.algorithm, "bytes": link.nbytes, "wait": link.waited}
        self._slice(self._track(link), link.op, "communication", link.started, link.time, arguments)

    def arrow_out(self, link: WatchedLink, arrow: str, at: float, nbytes: int) -> None:
        """A message of so many bytes leaves this rank."""
        self._arrow({"ph": "s", "args": {"bytes": nbytes}}, link, arrow, at)

    def arrow_in(self, link: WatchedLink, arrow: str) -> None:
        """A message has arrived at this rank."""
        self._arrow({"ph": "f", "bp": "e"}, link, arrow, link.time)

    def _arrow(self, kind: dict[str, Any], link: WatchedLink, arrow: str, at: float) -> None:
        place = {"id": arrow, "ts": at * MICROSECONDS, "tid": self._track(link)}
        self.events.append(kind | {"name": "message", "cat": "message"} | place)

    def _slice(self, tid: int, name: str, category: str, start: float, end: float, arguments: dict[str, Any]) -> None:
        start, end = start * MICROSECONDS, end * MICROSECONDS
        event = {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start, "tid": tid}
        self.events.append(event | {"args": arguments} if arguments else event)

    def _track(self, link: WatchedLink) -> int:
        comm = link.comm
        single = link.op in ("send", "recv")
        key = comm.name + ("|single" if single else "")
        if key not in self._tracks:
            name = f"communication {comm.axis}" + (", send and receive" if single else "")
            self._tracks[key] = (len(self._tracks), name)
        return self._tracks[key][0]

    def chrome_events(self, rank: int) -> list[dict[str, Any]]:
        """Everything recorded, with the names of the process and of its tracks."""
        names: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        ]
        for tid, name in self._tracks.values():
            names.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}})
        return names + [event | {"pid": rank} for event in self.events]


def start_trace(comm: Communicator) -> None:
    """Collective: forget what was recorded and record from now on. Wall clocks of all ranks are set to 0 together."""
    comm.barrier()
    if isinstance(comm.clock, WallClock):
        comm.barrier()  # the second time every rank is awake and leaves it at nearly the same moment
        comm.clock.align()
    comm.tracer.events.clear()
    comm.tracer.enabled = True


def save_chrome_trace(path: str, comm: Communicator, mesh: DeviceMesh | None = None) -> None:
    """Collective: stop recording; rank 0 writes all ranks' events to `path` as {"traceEvents": [...]}.

    otherData names the clock and, where it is given, the mesh: {"pp": PP, "dp": DP, "tp": TP}, the slowest axis first.
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
