"""Point-to-point messages as a user sees them: `wait()` and `test()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minipar import backend
from minipar.backend import Array
from minipar.comm.link import Link, WatchedLink
from minipar.comm.transport import Request

if TYPE_CHECKING:
    from minipar.comm.group import Group


class Message:
    """A message under way, sent or received by the user (pipelines are made of these)."""

    __slots__ = ("array", "done", "host", "link", "request")

    def __init__(self, link: Link, request: Request, host: np.ndarray, array: Array | None) -> None:
        self.link = link
        self.request = request
        self.host = host
        self.array = array  # where a received message belongs; None for one going out
        self.done = False

    @classmethod
    def send(cls, comm: Group, host: np.ndarray, dest: int, tag: int) -> Message:
        link = cls._link(comm, "send", comm.rank, dest, tag)
        request = link.isend(host, dest, 0)
        if isinstance(link, WatchedLink):
            link.time = link.called if comm.clock.logical else comm.clock.now()
            link.record()
            comm.clock.resume(link.called)
        return cls(link, request, host, None)

    @classmethod
    def receive(cls, comm: Group, host: np.ndarray, source: int, tag: int, array: Array) -> Message:
        link = cls._link(comm, "recv", source, comm.rank, tag)
        request = link.irecv(host, source, 0)
        if isinstance(link, WatchedLink):
            comm.clock.resume(link.called)
        return cls(link, request, host, array)

    @staticmethod
    def _link(comm: Group, op: str, source: int, dest: int, tag: int) -> Link:
        if not (comm.clock.logical or comm.tracer.enabled):
            return Link(comm, op, "", tag, 0)
        key = (source, dest, tag)
        number = comm.message_numbers[key] = comm.message_numbers.get(key, 0) + 1
        return WatchedLink(comm, op, "", tag, -number)

    def test(self) -> bool:
        """True once the message is through; never waits."""
        if not self.done:
            now = self.link.comm.clock.now()
            if self.request.test():
                self._settle(now)
        return self.done

    def wait(self) -> Array | None:
        """Wait politely until the message is through. Returns the array received, None for a send."""
        if not self.done:
            now = self.link.comm.clock.now()
            self.link.comm.engine.finish(self.request)
            self._settle(now)
        return self.array

    def _settle(self, now: float) -> None:
        """The message is through: on a logical clock the receiver continues no earlier than it arrived."""
        self.done = True
        link = self.link
        if self.array is not None and not backend.is_host(self.array):
            self.array[...] = backend.from_host(self.host.reshape(self.array.shape))
        if isinstance(link, WatchedLink):
            if self.array is not None:
                link.started = link.time = now
                link.settle((self.request,))
                link.record()
            link.comm.clock.resume(max(now, link.time))

    def describe(self) -> str:
        return self.request.describe()
