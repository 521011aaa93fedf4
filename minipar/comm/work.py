"""Operations under way: every collective and every message, blocking or asynchronous, is driven by `Work.drive`.

Operations on one communicator run in the order in which they were issued (NB: as on an NCCL
stream). A rank that waits advances the operations of all its communicators, so ranks may issue to
axes in different orders without a deadlock.
"""

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain

import numpy as np

from minipar.backend import Array
from minipar.comm.clock import CLOCKS, Clock, Network, Tracer, WallClock
from minipar.comm.operation import Operation, to_tag
from minipar.comm.traffic import Traffic
from minipar.comm.transport import Link, Request, Steps, Transport
from minipar.errors import CommunicationError, UsageError, print_line
from minipar.memory import hold

CHECK_EVERY = 16  # unsuccessful tests between two looks at the clock
SAY_SECONDS = 30.0  # rank 0 says so after waiting as long, then after twice that, and so on
RECORDED = 8  # operations that a rank remembers for its report after a timeout


class Engine:
    """The progress engine of one rank, and the accounts that all its communicators share."""

    def __init__(self, transport: Transport, clock: str | Clock | None, network: Network | None) -> None:
        self.transport = transport
        if isinstance(clock, str) and clock not in CLOCKS:
            raise UsageError(f'clock "{clock}": expected one of {", ".join(CLOCKS)}')
        if clock is None:
            clock = WallClock()
        self.clock = CLOCKS[clock]() if isinstance(clock, str) else clock
        if network is not None and not self.clock.logical:
            raise UsageError("a network prices messages on the clocks cpu and model; give one of them")
        self.network = network or Network()
        self.traffic = Traffic()
        self.tracer = Tracer(self.clock)
        self.streams: dict[Stream, None] = {}  # they have operations under way
        self.operations = 0  # collectives issued, on all communicators
        self.recent: deque[tuple[str, int]] = deque(maxlen=RECORDED)  # axis and tag of the last operations
        self.unwaited: dict[
            Work, str
        ] = {}  # asynchronous operations, and the line of the program that issued each
        self.timeout = wait_timeout()

    def wait_for_message(self, work: "Work", request: Request) -> None:
        """Wait until `work` has the message that it misses, and advance all operations.

        CommunicationError if its rank left, or after the timeout.
        """
        attempt = 0
        start = time.monotonic()
        said = SAY_SECONDS
        while work.missing is request:
            self.progress()
            self.transport.pause(attempt, request)
            attempt += 1
            if attempt % CHECK_EVERY == 0:
                seconds = time.monotonic() - start
                if (notices := self.transport.notices) is not None:
                    notices.look(request, seconds, self)
                if seconds > said and self.transport.rank == 0:
                    print_line(f"minipar: {request.describe()}: waiting for {seconds:.0f} s")
                    said *= 2
                if seconds > self.timeout:
                    text = f"{request.describe()}: nothing for {self.timeout:g} s (MINIPAR_TIMEOUT)"
                    raise CommunicationError(
                        text + (notices.report(request, self) if notices is not None else "")
                    )
            Work.drive(work, to_end=False)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Wait without a timeout inside the block: for the work of one rank alone, such as `--verify`."""
        timeout = self.timeout
        self.timeout = math.inf
        try:
            yield
        finally:
            self.timeout = timeout

    def close(self) -> None:
        """Report the asynchronous operations whose `wait` was never called, at the end of the program."""
        for work, line in self.unwaited.items():
            sys.stderr.write(f"minipar: {work.link.title()}, issued at {line}: never waited for\n")
        self.unwaited.clear()

    def progress(self) -> None:
        """Advance all streams as far as possible, without waiting."""
        for stream in tuple(self.streams):
            if stream.queue:  # a callback of another stream's operation may have emptied it
                # This runs all of the queue, the oldest first. It is Work's `drive` and not
                # TimedWork's, because the caller has not asked for this operation, and waiting takes
                # no CPU time.
                Work.drive(stream.queue[-1], to_end=False)


def wait_timeout() -> float:
    """Return the seconds after which a wait is an error.

    UsageError if MINIPAR_TIMEOUT is none, or infinite.
    """
    text = os.environ.get("MINIPAR_TIMEOUT", "1800")
    with suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < math.inf:
            return seconds
    raise UsageError(f"MINIPAR_TIMEOUT={text}: expected a positive, finite number of seconds")


class Stream:
    """The state of a Communicator: the operations issued and not finished, oldest first, and what they share."""

    def __init__(
        self,
        transport: Transport,
        axis: str = "world",
        *,
        clock: str | Clock | None = None,
        network: Network | None = None,
        parent: "Stream | None" = None,
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.ranks = transport.ranks
        self.axis = axis
        self.name = transport.name
        self.engine: Engine = Engine(transport, clock, network) if parent is None else parent.engine
        self.clock = self.engine.clock
        self.traffic = self.engine.traffic
        self.tracer = self.engine.tracer
        self.queue: deque[Work] = deque()
        self.end = 0.0  # when the last operation ended, on a logical clock
        self.port = 0.0  # when its last message had left
        self.operations = 0  # collectives issued
        self.rows = 0  # groups made of this one
        axis_rank = "" if axis == "world" else f" ({axis} rank {self.rank})"
        self.label = f"rank {self.ranks[self.rank]}{axis_rank}"  # in error messages
        self.messages: Counter[str] = Counter()  # so far, by their ends, in a trace
        self._scratch = np.empty(0, np.uint8)
        # The arrays that `scratch` has returned, by size and dtype: to find one takes less time
        # than to make it.
        self._scratch_views: dict[tuple[int, np.dtype], np.ndarray] = {}

    def next_tag(self, operation: Operation) -> int:
        """Return the tag of the next operation, and record it."""
        self.operations += 1
        self.engine.operations += 1
        tag = to_tag(operation, self.operations)
        self.engine.recent.append((self.axis, tag))
        return tag

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `count` elements, the same for all operations: they run one after the other."""
        view = self._scratch_views.get((count, dtype))
        if view is None:
            nbytes = count * dtype.itemsize
            if nbytes > self._scratch.nbytes:
                self._scratch_views.clear()  # they are views of the smaller memory
                self._scratch = np.empty(nbytes, np.uint8)
                hold("buffers", self._scratch)
            view = self._scratch[:nbytes].view(dtype)
            self._scratch_views[count, dtype] = view
        return view


class CountedLink:
    """The `Link` of an operation over the transport of its stream.

    What it sends is counted as traffic.
    """

    def __init__(self, stream: Stream, name: str, algorithm: str, tag: int) -> None:
        self.stream = stream
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
        self.count[0] += 1
        self.count[1] += array.nbytes
        return self.transport.isend(array, dest, self.tag, self)

    def irecv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive a message."""
        return self.transport.irecv(array, source, self.tag, self)

    def title(self) -> str:
        """Name the rank and the operation, for errors: `rank 5 (dp rank 2), all_reduce ring`."""
        return f"{self.stream.label}, {self.name} {self.algorithm}".rstrip()


class Work:
    """One operation under way, and the handle of its caller.

    A collective waits for its turn in the queue of its stream. A single message of the user
    (pipelines are made of these) is in no queue. It advances when its caller tests it or waits for
    it, in any order.
    """

    def __init__(self, stream: Stream, link: Link, is_message: bool = False) -> None:
        self.stream = stream
        self.link = link
        self.is_message = is_message
        self.missing: Request | None = None  # the message that has to complete first
        self.done = False
        self.error: BaseException | None = None  # what has ended the operation early
        self._callbacks: list[Callable[[], object]] = []

    def begin(self, steps: Steps, result: Array | None) -> None:
        """Put a collective into the queue; `drive` posts its messages. (A user's message is posted already.)"""
        self.requests = chain.from_iterable(steps)
        self._result = result
        if self.is_message:
            self.missing = next(self.requests)
            return
        stream = self.stream
        stream.queue.append(self)
        stream.engine.streams[stream] = None

    def drive(self, to_end: bool) -> None:
        """Run the operations of the stream, the oldest first, as far as messages have arrived.

        With `to_end`, run them until this one is finished. An error is raised to whoever runs the
        operation, and again to its own caller.
        """
        if self.error is not None:
            raise self.error
        while not self.done:
            work = self if self.is_message else self.stream.queue[0]
            try:
                work.advance()
            except BaseException as error:
                work.fail(error)
                raise
            if work.missing is not None:
                if not to_end:
                    return
                self.stream.engine.wait_for_message(work, work.missing)

    def advance(self) -> None:
        """Post messages until one is `missing`, or the operation is finished."""
        if self.missing is not None and not self.missing.test():
            return
        self.missing = None
        for request in self.requests:
            if not request.test():
                self.missing = request
                return
        self.finish()

    def finish(self) -> None:
        """Leave the queue; the next operation begins."""
        self.done = True
        if not self.is_message:
            self.leave_queue()
        if self._callbacks:
            self.call_back()

    def fail(self, error: BaseException) -> None:
        """End the operation with an error. It leaves the queue, so that waits for others do not raise it again."""
        self.error = error
        if self in self.stream.queue:
            self.leave_queue()

    def leave_queue(self) -> None:
        """Give the oldest operation's turn to the next one."""
        stream = self.stream
        stream.queue.popleft()
        if not stream.queue:
            del stream.engine.streams[stream]

    def then(self, call: Callable[[], object]) -> None:
        """Call `call()` once the operation is finished; what it issues starts no earlier on a logical clock."""
        self._callbacks.append(call)
        if self.done:
            self.call_back()

    def call_back(self) -> None:
        """Call what `then` was given."""
        while self._callbacks:
            self._callbacks.pop(0)()

    def test(self) -> bool:
        """Advance the operation if possible, and return True once it is finished."""
        self.drive(to_end=False)
        if self.done:
            self.stream.engine.unwaited.pop(self, None)
        return self.done

    def wait(self) -> Array:
        """Wait until the operation is finished.

        Return its result: the array, None for a message that was sent.
        """
        self.drive(to_end=True)
        self.stream.engine.unwaited.pop(self, None)
        return self._result
