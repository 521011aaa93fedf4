"""Driving the generators: at once, or as asynchronous Work that advances whenever this rank is in a communication call.

Operations on one communicator run in the order in which they were issued (NB: as on an NCCL stream). While a rank waits
for anything, it advances the outstanding work of all its communicators, so ranks may issue to different axes in
different orders without a deadlock.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from minipar.comm.link import Link, Steps, WatchedLink
from minipar.comm.transport import Request, Transport, Waitable
from minipar.errors import CommunicationError, UsageError

CHECK_EVERY = 16  # unsuccessful tests between two looks at the watch


def _timeout() -> float:
    text = os.environ.get("MINIPAR_TIMEOUT", "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds <= 0:
        raise UsageError(f"MINIPAR_TIMEOUT={text}: expected a positive number of seconds")
    return seconds


class Engine:
    """One per rank, shared by all its communicators."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.streams: list[Stream] = []  # those with work under way
        self.timeout = _timeout()

    def drive(self, steps: Steps) -> None:
        """Run an operation to its end."""
        for requests in steps:
            for request in requests:  # as `finish`, written out: this is the inner loop of every collective
                if self.streams or not request.linger():
                    self.wait(request)

    def finish(self, request: Request) -> None:
        """Wait for a message: in the shortest way if no other work is outstanding."""
        if self.streams or not request.linger():
            self.wait(request)

    def wait(self, request: Waitable) -> None:
        """Wait politely until `request` is done, and advance every outstanding Work meanwhile.

        CommunicationError after MINIPAR_TIMEOUT seconds (default 1800).
        """
        pause = self.transport.pause
        attempt = 0
        deadline = 0.0
        while not request.test():
            if self.streams:
                self.progress()
            pause(attempt, request)
            attempt += 1
            if attempt % CHECK_EVERY == 0:
                now = time.monotonic()
                if not deadline:
                    deadline = now + self.timeout
                elif now > deadline:
                    raise CommunicationError(f"{request.describe()}: nothing for {self.timeout:g} s (MINIPAR_TIMEOUT)")

    def progress(self) -> None:
        """Advance what can be advanced, without waiting."""
        for stream in tuple(self.streams):
            stream.advance()


class Stream:
    """The operations issued on one communicator and not finished, oldest first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.queue: deque[Work] = deque()

    def add(self, work: Work) -> None:
        if not self.queue:
            self.engine.streams.append(self)
        self.queue.append(work)
        if self.queue[0] is work:
            self.advance()

    def advance(self) -> None:
        """Advance the oldest operation, and the next one when it is finished."""
        while self.queue and self.queue[0].advance():
            self.queue.popleft()
            if not self.queue:
                self.engine.streams.remove(self)


class Work:
    """An operation under way. `wait()` gives its result; until then its arrays belong to it."""

    def __init__(self, stream: Stream, link: Link, steps: Steps, result: Any) -> None:
        self._stream = stream
        self.owner = link
        self._steps = steps
        self._result = result
        self._pending: deque[Request] = deque()
        self.done = False

    def advance(self) -> bool:
        """Go on until a message is missing. True when the operation is finished. (Called when its turn has come.)"""
        pending = self._pending
        while True:
            while pending:
                if not pending[0].test():
                    return False
                pending.popleft()
            try:
                pending.extend(next(self._steps))
            except StopIteration:
                self.done = True
                return True

    def test(self) -> bool:
        """True once it is finished; advances it if it can."""
        if not self.done:
            self._stream.advance()
        return self.done

    def wait(self) -> Any:
        """Wait politely until the operation is finished; return its result."""
        link = self.owner
        if isinstance(link, WatchedLink):
            clock = link.comm.clock
            now = clock.now()
            self._finish()
            clock.resume(max(now, link.time))
        else:
            self._finish()
        return self._result

    def _finish(self) -> None:
        if not self.done:
            self._stream.engine.wait(self)

    def describe(self) -> str:
        if self._pending:
            return self._pending[0].describe()
        return f"{self.owner.title()}: its turn, after the operations issued before it"


class Finished:
    """A Work that had nothing to do: one rank."""

    done = True

    def __init__(self, result: Any) -> None:
        self._result = result

    def test(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._result


def then(steps: Steps, finish: Callable[[], None]) -> Steps:
    """`steps`, and `finish()` after the last."""
    yield from steps
    finish()
