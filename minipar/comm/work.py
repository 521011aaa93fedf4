"""Operations under way: every collective and every message, blocking or asynchronous, is a `Work`.

Collectives on one communicator run in the order in which they were issued (NB: as on an NCCL
stream). A rank that waits advances the collectives of all its communicators, so ranks may issue to
axes in different orders without a deadlock.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from itertools import chain

from minipar.backend import Array
from minipar.comm.clock import CLOCKS, Clock, Network, Tracer
from minipar.comm.transport import Link, Request, Steps, Traffic
from minipar.errors import CommunicationError, print_line

LATE_SECONDS = 30.0  # a wait that takes longer is reported


class Engine:
    """The things that all communicators of one rank share: its clock, its accounts, and the operations under way."""

    def __init__(self, clock: str | Clock, network: Network | None) -> None:
        self.clock = CLOCKS[clock]() if isinstance(clock, str) else clock
        self.network = network or Network()
        self.traffic = Traffic()
        self.tracer = Tracer(self.clock)
        self.queues: list[deque[Work]] = []  # each communicator's
        self.timeout = float(os.environ.get("MINIPAR_TIMEOUT", "1800"))

    def progress(self) -> None:
        """Advance all collectives as far as possible, without waiting."""
        for queue in self.queues:
            if queue:
                queue[-1].advance()  # and those before it


class Work:
    """One operation under way, and the handle of its caller.

    A collective waits for its turn in the queue of its communicator. A single message of the user
    (pipelines are made of these) has a queue of its own. It advances when its caller tests it or
    waits for it, in any order.
    """

    def __init__(self, link: Link, queue: "deque[Work]") -> None:
        self.link = link
        self.comm = link.comm
        self.queue = queue  # the operations that take turns with this one, the oldest first
        self.missing: Request | None = None  # the message that has to complete first
        self.done = False
        self._callbacks: list[Callable[[], object]] = []

    def begin(self, steps: Steps, result: Array | None) -> None:
        """Put the operation into its queue; `advance` posts its messages."""
        self.requests = chain.from_iterable(steps)
        self._result = result
        self.queue.append(self)

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
        """Advance all collectives of this rank until the message that blocks this operation has come."""
        work = self.queue[0]
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
                # Few ranks say it: rank 0, and those that wait for rank 0.
                if 0 in (self.comm.ranks[self.comm.rank], request.peer):
                    print_line(f"minipar: {request.describe()}: waiting for {seconds:.0f} s")
            if seconds > self.comm.engine.timeout:
                limit = f"{self.comm.engine.timeout:g} s (MINIPAR_TIMEOUT)"
                raise CommunicationError(f"{request.describe()}: nothing for {limit}")

    def advance(self) -> None:
        """Run the operations of the queue, the oldest first, up to this one, as far as messages have arrived."""
        while not self.done:
            work = self.queue[0]
            work.post()
            if work.missing is not None:
                return

    def post(self) -> None:
        """Post messages until one is `missing`, or the operation is finished."""
        while self.missing is None or self.missing.test():
            self.missing = next(self.requests, None)
            if self.missing is None:
                self.done = True
                self.queue.popleft()  # the next one's turn
                if self._callbacks:
                    self.call_back()
                return

    def then(self, call: Callable[[], object]) -> None:
        """Call `call()` once the operation is finished; what it issues starts no earlier on a logical clock."""
        self._callbacks.append(call)
        if self.done:
            self.call_back()

    def call_back(self) -> None:
        """Call what `then` was given."""
        while self._callbacks:
            self._callbacks.pop(0)()
