"""Operations under way: every collective and every message, blocking or asynchronous, is a `Work`.

Operations on one communicator run in the order in which they were issued (NB: as on an NCCL
stream). A rank that waits advances the operations of all its communicators, so ranks may issue to
axes in different orders without a deadlock.
"""

import os
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from minipar.backend import Array
from minipar.comm.clock import CLOCKS, Clock, Network, Tracer
from minipar.comm.traffic import Traffic
from minipar.comm.transport import Request, Steps
from minipar.errors import CommunicationError, UsageError, print_line

LATE_SECONDS = 30.0  # a wait that takes longer is reported


class Engine:
    """The things that all communicators of one rank share: its clock, its accounts, and the operations under way."""

    def __init__(self, clock: str | Clock, network: Network | None) -> None:
        self.clock = CLOCKS[clock]() if isinstance(clock, str) else clock
        if network is not None and not self.clock.logical:
            raise UsageError("a network prices messages on the clocks cpu and model; give one of them")
        self.network = network or Network()
        self.traffic = Traffic()
        self.tracer = Tracer(self.clock)
        self.busy: dict[Any, None] = {}  # the communicators that have operations under way
        self.timeout = float(os.environ.get("MINIPAR_TIMEOUT", "1800"))

    def progress(self) -> None:
        """Advance all operations as far as possible, without waiting."""
        for comm in tuple(self.busy):
            if comm.queue:  # a callback of another communicator's operation may have emptied it
                comm.queue[-1].advance()  # and those before it


class CountedLink:
    """The `Link` of an operation over the transport of its communicator.

    What it sends is counted as traffic.
    """

    def __init__(self, comm: Any, name: str, algorithm: str, tag: int) -> None:
        self.comm = comm  # a Communicator, whose file imports this one
        self.name = name
        self.algorithm = algorithm
        self.tag = tag
        self.rank = comm.rank
        self.size = comm.size
        self.scratch = comm.scratch
        self.transport = comm.transport
        self.count = comm.traffic.counts.setdefault((name, comm.axis), [0, 0])  # [messages, bytes]

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
        return f"{self.comm.label}, {self.name} {self.algorithm}".rstrip()


class Work:
    """One operation under way, and the handle of its caller.

    A collective waits for its turn in the queue of its communicator. A single message of the user
    (pipelines are made of these) is in no queue. It advances when its caller tests it or waits for
    it, in any order.
    """

    def __init__(self, link: CountedLink, is_message: bool = False) -> None:
        self.link = link
        self.comm = link.comm
        self.is_message = is_message
        self.missing: Request | None = None  # the message that has to complete first
        self.done = False
        self.error: BaseException | None = None  # what has ended the operation early
        self._callbacks: list[Callable[[], object]] = []

    def begin(self, steps: Steps, result: Array | None) -> None:
        """Put a collective into the queue; `advance` posts its messages. (A user's message is posted already.)"""
        self.requests = chain.from_iterable(steps)
        self._result = result
        if self.is_message:
            self.missing = next(self.requests)
            return
        self.comm.queue.append(self)
        self.comm.engine.busy[self.comm] = None

    def test(self) -> bool:
        """Advance the operation if possible, and return True once it is finished."""
        self.advance()
        return self.done

    def wait(self) -> Array:
        """Wait until the operation is finished.

        Return its result: the array, None for a message that was sent.
        """
        self.advance()
        while not self.done:
            self.wait_for_message()
        return self._result

    def wait_for_message(self) -> None:
        """Advance all operations of this rank until the message that blocks this operation has come."""
        work = self.first()
        request = work.missing
        assert request is not None, "an operation that is not finished misses a message"
        start = time.monotonic()
        attempt = 0
        is_late = False
        while work.missing is request:
            self.comm.engine.progress()
            self.link.transport.pause(attempt, request)
            attempt += 1
            self.advance()
            seconds = time.monotonic() - start
            if seconds > LATE_SECONDS and not is_late:
                is_late = True
                # One rank says it: rank 0, or whoever waits for rank 0.
                if 0 in (self.comm.ranks[self.comm.rank], request.peer):
                    print_line(f"minipar: {request.describe()}: waiting for {seconds:.0f} s")
            if seconds > self.comm.engine.timeout:
                limit = f"{self.comm.engine.timeout:g} s (MINIPAR_TIMEOUT)"
                raise CommunicationError(f"{request.describe()}: nothing for {limit}")

    def first(self) -> "Work":
        """Return the operation that has to advance before this one: the oldest of the queue, or a message itself."""
        return self if self.is_message else self.comm.queue[0]

    def advance(self) -> None:
        """Run the operations of the queue, the oldest first, up to this one, as far as messages have arrived.

        An error is raised to whoever runs the operation, and again to its own caller.
        """
        if self.error is not None:
            raise self.error
        while not self.done:
            work = self.first()
            try:
                work.post()
            except BaseException as error:
                work.error = error
                if work in self.comm.queue:  # so that later operations do not raise its error
                    work.leave_queue()
                raise
            if work.missing is not None:
                return

    def post(self) -> None:
        """Post messages until one is `missing`, or the operation is finished."""
        if self.missing is not None and not self.missing.test():
            return
        self.missing = None
        for request in self.requests:
            if not request.test():
                self.missing = request
                return
        self.done = True
        if not self.is_message:
            self.leave_queue()
        if self._callbacks:
            self.call_back()

    def leave_queue(self) -> None:
        """Give the oldest operation's turn to the next one."""
        self.comm.queue.popleft()
        if not self.comm.queue:
            del self.comm.engine.busy[self.comm]

    def then(self, call: Callable[[], object]) -> None:
        """Call `call()` once the operation is finished; what it issues starts no earlier on a logical clock."""
        self._callbacks.append(call)
        if self.done:
            self.call_back()

    def call_back(self) -> None:
        """Call what `then` was given."""
        while self._callbacks:
            self._callbacks.pop(0)()
