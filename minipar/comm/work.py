"""Operations under way: every collective and every message, blocking or asynchronous, is driven here.

Operations on one communicator run in the order in which they were issued (NB: as on an NCCL stream). A rank that waits
advances the operations of all its communicators, so ranks may issue to axes in different orders without a deadlock.
"""

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from minipar.comm.clock import CLOCKS, Clock, Network, Tracer, WallClock
from minipar.comm.traffic import Traffic
from minipar.comm.transport import USER_TAGS, Request, Transport, tag_of
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
        if isinstance(clock, str) and clock not in CLOCKS:
            raise UsageError(f'clock "{clock}": expected one of {", ".join(CLOCKS)}')
        self.clock = CLOCKS[clock]() if isinstance(clock, str) else clock or WallClock()
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
        """Wait for `request`, and advance all operations. CommunicationError if its rank left, or after the timeout."""
        attempt, start, said = 0, time.monotonic(), SAY_SECONDS
        while not request.test():
            self.progress()
            self.transport.pause(attempt, request)
            attempt += 1
            if attempt % CHECK_EVERY == 0:
                seconds = time.monotonic() - start
                if (notices := self.transport.notices) is not None:
                    notices.look(request, seconds, self)
                if seconds > said and self.transport.rank == 0:
                    print(f"minipar: {request.describe()}: waiting for {seconds:.0f} s", file=sys.stderr, flush=True)
                    said *= 2
                if seconds > self.timeout:
                    text = f"{request.describe()}: nothing for {self.timeout:g} s (MINIPAR_TIMEOUT)"
                    raise CommunicationError(text + (notices.report(request, self) if notices is not None else ""))

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
    """Return the seconds after which a wait is an error. UsageError if MINIPAR_TIMEOUT is none, or infinite."""
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
        self.rank, self.size, self.ranks = transport.rank, transport.size, transport.ranks
        self.axis, self.name = axis, transport.name
        self.engine: Engine = Engine(transport, clock, network) if parent is None else parent.engine
        self.clock, self.traffic, self.tracer = self.engine.clock, self.engine.traffic, self.engine.tracer
        self.queue: deque[Work] = deque()
        self.end = 0.0  # of the last operation, on a logical clock
        self.port = 0.0  # when its last message had left
        self.operations = 0  # collectives issued
        self.rows = 0  # groups made of this one
        place = "" if axis == "world" else f" ({axis} rank {self.rank})"
        self.label = f"rank {self.ranks[self.rank]}{place}"  # in error messages
        self.messages: Counter[str] = Counter()  # so far, by their ends, in a trace
        self._memory = np.empty(0, np.uint8)
        self.scratch = lru_cache(SCRATCH_VIEWS)(self._scratch)  # making a view takes longer

    def next_tag(self, op: str, algorithm: str, elements: np.ndarray, combine: Any = None) -> int:
        """Return the tag of the next operation, and record it."""
        self.operations += 1
        self.engine.operations += 1
        tag = tag_of(op, algorithm, combine is np.maximum, elements.dtype.num)
        tag |= (elements.size & 127) << 12 | (self.operations & 127) << 19
        self.engine.recent.append((self.axis, tag))
        return tag

    def advance(self) -> None:
        """Advance the oldest operation, and the next one when it is finished."""
        while self.queue and self.queue[0].advance():
            self.queue.popleft()
            if not self.queue:
                self.engine.streams.remove(self)

    def _scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `count` elements, the same for all operations: they run one after the other."""
        nbytes = count * dtype.itemsize
        if nbytes > self._memory.nbytes:
            self.scratch.cache_clear()  # views of the old memory
            self._memory = np.empty(nbytes, np.uint8)
            hold("buffers", self._memory)
        return self._memory[:nbytes].view(dtype)


class Work:
    """One operation of a communicator: the `Link` of its algorithm, and the handle of its caller.

    A collective is the work of its stream. A single message of the user (pipelines are made of these) has one step, and
    advances when its caller tests it or waits for it, in any order.
    """

    __slots__ = "_count _steps _result algorithm done missing op rank scratch single size stream tag transport".split()

    def __init__(self, stream: Stream, op: str, algorithm: str, tag: int) -> None:
        self.op, self.algorithm, self.tag = op, algorithm, tag
        self.stream, self.transport, self.scratch = stream, stream.transport, stream.scratch
        self.rank, self.size = stream.rank, stream.size
        self._count = stream.engine.traffic.counts.setdefault((op, stream.axis), [0, 0])
        self.single = tag < USER_TAGS  # a message of the user, which does not wait for its turn
        self.missing: Request | None = None  # the message that is missing
        self.done = False

    def isend(self, array: np.ndarray, dest: int) -> Request:
        count = self._count
        count[0] += 1
        count[1] += array.nbytes
        return self.transport.isend(array, dest, self.tag, self)

    def irecv(self, array: np.ndarray, source: int) -> Request:
        return self.transport.irecv(array, source, self.tag, self)

    def title(self) -> str:
        """Name the rank and the operation, for errors: `rank 5 (dp rank 2), all_reduce ring`."""
        return f"{self.stream.label}, {self.op} {self.algorithm}".rstrip()

    def start(self, steps: Iterator[Iterable[Request]], result: Any) -> "Work":
        """Issue the operation: run its algorithm as far as it goes, after the operations issued before it."""
        self._steps = chain.from_iterable(steps)
        self._result = result
        if self.single:
            self.missing = next(self._steps)
            return self
        self.stream.queue.append(self)
        if len(self.stream.queue) == 1:
            self.stream.engine.streams.append(self.stream)
            self.stream.advance()
        return self

    def run(self, steps: Iterator[Iterable[Request]], result: Any) -> Any:
        """Run the operation to its end, where no other is under way on its communicator; return its result."""
        for requests in steps:
            for request in requests:
                if not request.test():
                    self.stream.engine.wait(request)
        return result

    def then(self, call: Callable[[], object]) -> None:
        """Call `call()` once the operation is finished; what it issues starts no earlier on a logical clock."""
        self._steps = chain(self._steps, self._ended(call))
        if self.done:
            next(self._steps, None)

    def _ended(self, call: Callable[[], object]) -> Iterator[Request]:
        clock = self.stream.clock
        now = clock.now()
        clock.resume(getattr(self, "time", now))
        call()
        clock.resume(now)
        yield from ()

    def test(self) -> bool:
        """Advance the operation if possible, and return True once it is finished."""
        if not self.done:
            (self if self.single else self.stream).advance()
        if self.done:
            self.stream.engine.unwaited.pop(self, None)
        return self.done

    def wait(self) -> Any:
        """Wait until the operation is finished. Return its result: the array, None for a message that was sent."""
        while not Work.test(self):
            missing = self.missing or self.stream.queue[0].missing
            assert missing is not None
            self.stream.engine.wait(missing)
        return self._result

    def advance(self) -> bool:
        """Run the algorithm until a message is missing. True when it is finished. Only a stream's oldest may run."""
        request = self.missing
        while request is None or request.test():
            request = self.missing = next(self._steps, None)
            if request is None:
                self.done = True
                return True
        return False
