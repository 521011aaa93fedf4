"""Operations under way: every collective, blocking or asynchronous, is driven here and nowhere else.

Operations on one communicator run in the order in which they were issued (NB: as on an NCCL stream). A rank that waits
advances the operations of all its communicators, so ranks may issue to axes in different orders without a deadlock.
"""

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np

from minipar import backend
from minipar.backend import Array
from minipar.comm.clock import Clock, Network, Tracer, make_clock
from minipar.comm.traffic import Traffic
from minipar.comm.transport import Request, Transport, tag_of
from minipar.errors import CommunicationError, UsageError
from minipar.memory import hold

CHECK_EVERY = 16  # unsuccessful tests between two looks at the clock
SAY_SECONDS = 30.0  # of waiting until rank 0 says so; then after twice that, and so on
RECORDED = 64  # operations that a rank remembers for the report after a timeout
SCRATCH_VIEWS = 64  # of the scratch memory, kept for reuse


class Engine:
    """The progress engine of one rank, and the accounts that all its communicators share."""

    def __init__(self, transport: Transport, clock: str | Clock | None, network: Network | None) -> None:
        self.transport = transport
        self.clock = make_clock(clock)
        if network is not None and not self.clock.logical:
            raise UsageError("a network prices messages on the clocks cpu and model; give one of them")
        self.network = network or Network()
        self.traffic = Traffic()
        self.tracer = Tracer(self.clock)
        self.streams: list[Stream] = []  # those with operations under way
        self.operations = 0  # collectives issued, on all communicators
        self.recent: deque[tuple[str, int]] = deque(maxlen=RECORDED)  # axis and tag of the last operations
        self.unwaited: dict[Work, str] = {}  # asynchronous operations, and the line of the program that issued each
        self.timeout = wait_timeout()

    def wait(self, request: Request) -> None:
        """Wait until `request` is done, and advance every outstanding operation meanwhile.

        CommunicationError if the rank that has to act for it has left, and after MINIPAR_TIMEOUT (1800) seconds.
        """
        attempt, start, said = 0, time.monotonic(), SAY_SECONDS
        while not request.test():
            self.progress()
            self.transport.pause(attempt, request)
            attempt += 1
            if attempt % CHECK_EVERY == 0:
                seconds = time.monotonic() - start
                self.transport.look(request, seconds, self)
                if seconds > said and self.transport.rank == 0:
                    print(f"minipar: {request.describe()}: waiting for {seconds:.0f} s", file=sys.stderr, flush=True)
                    said *= 2
                if seconds > self.timeout:
                    text = f"{request.describe()}: nothing for {self.timeout:g} s (MINIPAR_TIMEOUT)"
                    raise CommunicationError(text + self.transport.report(request, self))

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Wait without a timeout inside the block: for the work of one rank alone, such as `--verify`."""
        timeout, self.timeout = self.timeout, math.inf
        try:
            yield
        finally:
            self.timeout = timeout

    def close(self) -> None:
        """Report the asynchronous operations whose `wait` was never called, at the end of the program."""
        for work, line in self.unwaited.items():
            sys.stderr.write(f"minipar: {work.title()}, issued at {line}: never waited for\n")
        self.unwaited.clear()

    def progress(self) -> None:
        """Advance all streams as far as possible, without waiting."""
        for stream in tuple(self.streams):
            stream.advance()


def wait_timeout() -> float:
    """Return the seconds after which a wait is an error. UsageError if MINIPAR_TIMEOUT is none."""
    text = os.environ.get("MINIPAR_TIMEOUT", "1800")
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise UsageError(f"MINIPAR_TIMEOUT={text}: expected a positive number of seconds")


class Stream:
    """The operations issued on one communicator and not finished, oldest first, and what they share.

    NB: an asynchronous collective of NCCL runs on a CUDA stream next to the computation. `end` is that stream's time.
    """

    def __init__(self, engine: Engine, transport: Transport, axis: str) -> None:
        self.engine = engine
        self.transport = transport
        self.axis = axis
        self.queue: deque[Work] = deque()
        self.end = 0.0  # of the last operation, on a logical clock
        self.port = 0.0  # when its last message had left
        self.operations = 0  # collectives issued
        place = "" if axis == "world" else f" ({axis} rank {transport.rank})"
        self.label = f"rank {transport.ranks[transport.rank]}{place}"
        self.messages: Counter[str] = Counter()  # so far, by their ends, in a trace
        self._memory = np.empty(0, np.uint8)
        self._views: dict[tuple[int, np.dtype], np.ndarray] = {}

    def next_tag(self, op: str, algorithm: str, elements: np.ndarray, combine: Any = None) -> int:
        """Return the tag of the next operation, and record it."""
        self.operations += 1
        self.engine.operations += 1
        tag = tag_of(op, algorithm, combine is np.maximum, elements.dtype.num)
        tag |= (elements.size & 127) << 12 | (self.operations & 127) << 19
        self.engine.recent.append((self.axis, tag))
        return tag

    def add(self, work: "Work") -> None:
        """Start an operation if no other is under way, and put it at the end of the queue if it is not finished."""
        if not self.queue:
            if work.advance():
                return
            self.engine.streams.append(self)
        self.queue.append(work)

    def advance(self) -> None:
        """Advance the oldest operation, and the next one when it is finished."""
        while self.queue and self.queue[0].advance():
            self.queue.popleft()
            if not self.queue:
                self.engine.streams.remove(self)

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `count` elements, the same for all operations: they run one after the other."""
        key = (count, dtype)
        view = self._views.get(key)
        if view is None:
            nbytes = count * dtype.itemsize
            if nbytes > self._memory.nbytes or len(self._views) >= SCRATCH_VIEWS:
                self._memory = np.empty(max(nbytes, self._memory.nbytes), np.uint8)
                hold("buffers", self._memory)
                self._views.clear()
            view = self._views[key] = self._memory[:nbytes].view(dtype)
        return view


class Work:
    """One operation of a communicator: the `Link` of its algorithm, and the handle of its caller."""

    __slots__ = tuple("_count _requests _result algorithm done missing op rank size stream tag transport".split())

    def __init__(self, stream: Stream, op: str, algorithm: str, tag: int) -> None:
        self.stream = stream
        self.op = op
        self.algorithm = algorithm
        self.tag = tag
        self.transport = transport = stream.transport
        self.rank = transport.rank
        self.size = transport.size
        self._count = stream.engine.traffic.counter(op, stream.axis)
        self.missing: Request | None = None  # the message that is missing
        self.done = False

    # -- for the algorithm (the docstrings are in transport.Link) -----------------------------------------------------

    def isend(self, array: np.ndarray, dest: int) -> Request:
        count = self._count
        count[0] += 1
        count[1] += array.nbytes
        return self.transport.isend(array, dest, self.tag, self)

    def irecv(self, array: np.ndarray, source: int) -> Request:
        return self.transport.irecv(array, source, self.tag, self)

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        return self.stream.scratch(count, dtype)

    def title(self) -> str:
        """Name the rank and the operation, for error messages."""
        return f"{self.stream.label}, {self.op} {self.algorithm}".rstrip()

    # -- for the caller -----------------------------------------------------------------------------------------------

    def start(self, steps: Iterator[Iterable[Request]], result: Any) -> "Work":
        """Issue the operation: run its algorithm as far as it goes, after the operations issued before it."""
        self._requests = chain.from_iterable(steps)
        self._result = result
        self.stream.add(self)
        return self

    def run(self, steps: Iterator[Iterable[Request]], result: Any) -> Any:
        """Run the operation to its end, where no other is under way on its communicator; return its result."""
        for requests in steps:
            for request in requests:
                if not request.test():
                    self.stream.engine.wait(request)
        return result

    def test(self) -> bool:
        """Advance the operation if possible, and return True once it is finished."""
        if not self.done:
            self.stream.advance()
        if self.done:
            self.stream.engine.unwaited.pop(self, None)
        return self.done

    def wait(self) -> Any:
        """Wait until the operation is finished, and return its result."""
        while not self.test():
            missing = self.stream.queue[0].missing
            assert missing is not None
            self.stream.engine.wait(missing)
        return self._result

    def advance(self) -> bool:
        """Run the algorithm until a message is missing. True when it is finished. Only the oldest Work may run."""
        request = self.missing
        while request is None or request.test():
            request = self.missing = next(self._requests, None)
            if request is None:
                self.done = True
                return True
        return False

    # -- for a single message of the user, which has no steps (TimedWork takes its time) -------------------------------

    def posted(self) -> None:
        """Note that the message is under way and the call returns."""

    def completed(self, request: Request, now: float) -> None:
        """Note that the message is through, and that a call that began at `now` returns."""


class Finished:
    """A Work of one rank alone, which has nothing to do."""

    done, missing = True, None

    def __init__(self, result: Any) -> None:
        self._result = result

    def test(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._result


class Message:
    """A message under way, sent or received by the user. (Pipelines are made of these.)"""

    def __init__(self, work: Work, host: np.ndarray, peer: int, array: Array | None) -> None:
        """Send `host`, or receive it if there is an `array` that it belongs to."""
        self._work = work
        self._host = host
        self._array = array
        self._request = work.isend(host, peer) if array is None else work.irecv(host, peer)
        self.done = False
        work.posted()

    def test(self) -> bool:
        """Return True once the message is through. Never waits."""
        if not self.done:
            now = self._work.stream.engine.clock.now()
            if self._request.test():
                self._finish(now)
        return self.done

    def wait(self) -> Array | None:
        """Wait until the message is through. Return the array received, None for a send."""
        if not self.done:
            engine = self._work.stream.engine
            now = engine.clock.now()
            engine.wait(self._request)
            self._finish(now)
        return self._array

    def _finish(self, now: float) -> None:
        self.done = True
        if self._array is not None and not backend.is_host(self._array):
            self._array[...] = backend.from_host(self._host.reshape(self._array.shape))
        self._work.completed(self._request, now)
