"""Group: a rank's place among others, and how an operation of theirs is started, numbered, driven and fed with arrays.

Communicator adds what the group can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minipar import backend
from minipar.backend import Array
from minipar.comm.clock import Clock, Network, make_clock
from minipar.comm.engine import Engine, Stream, Work, then
from minipar.comm.link import Link, Steps, WatchedLink
from minipar.comm.trace import Tracer
from minipar.comm.traffic import Traffic
from minipar.comm.transport import Transport
from minipar.errors import CommunicationError, UsageError
from minipar.memory import hold

# Tags. The user's are 0..USER_TAGS-1. Each operation takes a run of tags of its own, one per step; after TAGS of them
# the numbers come round again, long after the messages that used them have arrived.
USER_TAGS = 1 << 16
TAGS = 1 << 20

Result = Any  # the array, or with async_op the Work whose wait() returns it


class Group:
    """The state of one communicator on one rank, and the machinery below its operations."""

    def __init__(
        self,
        transport: Transport,
        axis: str = "world",
        *,
        clock: str | Clock | None = None,
        network: Network | None = None,
        parent: Group | None = None,
        ranks: list[int] | None = None,
        name: str = "world",
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.axis = axis
        self.name = name  # the same on every member, and no other group's
        self.ranks = list(range(self.size)) if ranks is None else ranks
        if parent is None:
            self.engine = Engine(transport)
            self.clock: Clock = make_clock(clock)
            if network is not None and not self.clock.logical:
                raise UsageError("a network prices messages on the clocks cpu and model; give one of them")
            self.network = network or Network()
            self.traffic = Traffic()
            self.tracer = Tracer(self.clock)
        else:
            self.engine = parent.engine
            self.clock = parent.clock
            self.network = parent.network
            self.traffic = parent.traffic
            self.tracer = parent.tracer
        self.stream_time = 0.0  # when the last operation here ended, on a logical clock
        self.stream_port = 0.0  # and when its last message had left
        self.message_numbers: dict[tuple[int, int, int], int] = {}  # for the arrows of a trace
        self._stream = Stream(self.engine)
        self._operations = 0
        self._splits = 0
        self._steps_per_operation = 2 * self.size + 8
        self._room = np.empty(0, np.uint8)
        self._scratch: dict[tuple[int, np.dtype], np.ndarray] = {}

    def progress(self) -> None:
        """Advance outstanding asynchronous work of all this rank's communicators, without waiting."""
        if self.engine.streams:
            now = self.clock.now()
            self.engine.progress()
            self.clock.resume(now)

    def abort(self, code: int = 1) -> None:
        """End every rank of the job now."""
        self.transport.abort(code)

    def title(self) -> str:
        """This rank, for error messages."""
        if self.axis == "world":
            return f"rank {self.rank}"
        return f"rank {self.rank} of axis {self.axis} (world rank {self.ranks[self.rank]})"

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Room for `count` elements. There is one such room: operations on a communicator run one after the other."""
        key = (count, dtype)
        found = self._scratch.get(key)
        if found is None:
            nbytes = count * dtype.itemsize
            if nbytes > self._room.nbytes or len(self._scratch) >= 64:
                self._room = np.empty(max(nbytes, self._room.nbytes), np.uint8)
                hold("buffers", self._room)
                self._scratch.clear()
            found = self._scratch[key] = self._room[:nbytes].view(dtype)
        return found

    def _link(self, op: str, algorithm: str) -> Link:
        self._operations = number = self._operations + 1
        tag = USER_TAGS + number * self._steps_per_operation % TAGS
        if self.clock.logical or self.tracer.enabled:
            return WatchedLink(self, op, algorithm, tag, number)
        return Link(self, op, algorithm, tag, number)

    def _run(self, link: Link, steps: Steps, result: Any, async_op: bool) -> Result:
        if isinstance(link, WatchedLink):
            steps = link.follow(steps)
        if async_op or self._stream.queue:
            work = Work(self._stream, link, steps, result)
            self._stream.add(work)
            if not async_op:
                return work.wait()
            if isinstance(link, WatchedLink):
                self.clock.resume(link.called)
            return work
        if isinstance(link, WatchedLink):
            self.engine.drive(steps)
            self.clock.resume(link.time)
        else:
            link.alone = not self.engine.streams
            self.engine.drive(steps)
        return result

    def _control(self, make: Callable[[Link], Steps]) -> None:
        """Run steps that no clock and no trace sees."""
        if self.size == 1:
            return
        now = self.clock.now()
        self._operations = number = self._operations + 1
        tag = USER_TAGS + number * self._steps_per_operation % TAGS
        link = Link(self, "control", "ring", tag, number)
        work = Work(self._stream, link, make(link), None)
        self._stream.add(work)
        work.wait()
        self.clock.resume(now)

    def _native(self, link: Link, *arguments: Any) -> Steps:
        """The library's own collective as an algorithm of one step."""
        request = self.transport.native(link.op, link, *arguments)
        yield (request,)

    def _flat(self, x: Array, op: str) -> np.ndarray:
        """The numbers of x as a flat host array: x's own memory, or for a device array a copy."""
        if type(x) is np.ndarray:
            if not x.flags.c_contiguous:
                raise ValueError(f"{self.title()}, {op}: an array of shape {x.shape} is not contiguous; send a copy")
            return x.reshape(-1)
        return np.ascontiguousarray(backend.to_host(x)).reshape(-1)

    def _output(self, op: str, x: Array, out: Array | None, size: int | None) -> tuple[Array, np.ndarray]:
        """The array for a result and the flat host array behind it; `size` elements are expected (None: any number)."""
        if out is None:
            assert size is not None
            out = np.empty(size, x.dtype) if backend.is_host(x) else backend.xp.empty(size, dtype=x.dtype)
        elif (size is not None and out.size != size) or out.dtype != x.dtype:
            raise CommunicationError(
                f"{self.title()}, {op}: out has {out.size} elements of {out.dtype}, expected {size} of {x.dtype}"
            )
        return out, self._flat(out, op)


def copy_back(steps: Steps, host: np.ndarray, x: Array) -> Steps:
    """`steps` on the staged copy, then the copy back to the device; `steps` alone when x is a host array."""
    if backend.is_host(x):
        return steps

    def copy() -> None:
        x[...] = backend.from_host(host.reshape(x.shape))

    return then(steps, copy)


def nothing() -> Steps:
    yield ()


def assign(out: np.ndarray, x: np.ndarray) -> Steps:
    out[...] = x
    yield ()
