"""The two verbs between threads of one process: for notebooks, for fast tests, and for many simulated ranks.

A send is matched with its receive under one lock, and whoever comes second copies the numbers, so a send is done only
when it has been received: code that would deadlock on a large MPI message deadlocks here too, and is told so, because
here one can see that every rank waits and that nothing is on its way.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minipar.comm.clock import Clock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.transport import Owner, Request, Waitable, message_size_error
from minipar.errors import CommunicationError, UsageError

LOOK_SECONDS = 0.05  # between two looks at the watch by a rank that waits; a message wakes it at once
RELEASE_SECONDS = 10.0  # how long a failed run waits for ranks that compute and have not noticed yet


class _Released(BaseException):
    """Raised inside a rank because another one has failed; not a failure of its own."""


class _Message:
    """One half of a message (a send or a receive), and the request for it."""

    __slots__ = ("arrived", "array", "direction", "done", "owner", "peer", "tag", "world_rank")

    def __init__(self, array: np.ndarray, direction: str, peer: int, tag: int, owner: Owner, world_rank: int) -> None:
        self.array = array
        self.direction = direction
        self.peer = peer
        self.tag = tag
        self.owner = owner
        self.world_rank = world_rank
        self.done = False
        self.arrived = -1

    def test(self) -> bool:
        if self.done and self.arrived not in (-1, self.array.nbytes):
            arrived = str(self.arrived)
            raise CommunicationError(message_size_error(self.owner, self.array.nbytes, arrived, self.peer, self.tag))
        return self.done

    def linger(self) -> bool:
        return self.test()  # pausing is better: delivery wakes this thread

    def describe(self) -> str:
        return f"{self.owner.title()}: {self.direction} rank {self.peer} ({self.array.nbytes} bytes, tag {self.tag})"


class LocalWorld:
    """What the threads share: unmatched messages, who waits for what, and the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.unmatched: dict[tuple[str, int, int, int], deque[_Message]] = {}
        self.wake = [threading.Condition(self.lock) for _ in range(size)]
        self.news = [False] * size  # a message of this rank was delivered since it last paused
        self.waiting: list[Waitable | None] = [None] * size
        self.finished = [False] * size
        self.delivered = 0  # messages
        self.idle = 0  # ranks that have returned, or wait and have no news
        self.failure: BaseException | None = None

    def post(self, key: tuple[str, int, int, int], message: _Message) -> None:
        """Deliver `message` if its other half is here already, else leave it for the other half to find."""
        with self.lock:
            if self.failure is not None:
                raise _Released
            queue = self.unmatched.get(key)
            if queue is None:
                self.unmatched[key] = deque((message,))
                return
            if queue[0].direction == message.direction:
                queue.append(message)
                return
            other = queue.popleft()
            if not queue:
                del self.unmatched[key]
            self.delivered += 1
            send, receive = (message, other) if message.direction == "send to" else (other, message)
            receive.arrived = send.array.nbytes
            if receive.arrived == receive.array.nbytes:
                receive.array.view(np.uint8)[...] = send.array.view(np.uint8)
            for half in (send, receive):
                half.done = True
                rank = half.world_rank
                if self.waiting[rank] is not None:
                    self.idle -= not self.news[rank]
                    self.wake[rank].notify()
                self.news[rank] = True

    def pause(self, rank: int, waiting_for: Waitable) -> None:
        """Sleep until one of this rank's messages has been delivered, or a moment has passed."""
        with self.lock:
            if not self.news[rank] and self.failure is None:
                self.waiting[rank] = waiting_for
                self.idle += 1
                if self.idle == self.size:
                    self.waiting[rank] = None
                    raise CommunicationError(self._deadlock(rank, waiting_for))
                self.wake[rank].wait(timeout=LOOK_SECONDS)
                self.waiting[rank] = None
                self.idle -= not self.news[rank]
            self.news[rank] = False
            if self.failure is not None:
                raise _Released

    def finish(self, rank: int) -> None:
        """This rank has returned. If all others wait, nobody is left to send: one of them is woken to say so."""
        with self.lock:
            self.finished[rank] = True
            self.idle += 1
            if self.idle == self.size:
                for other in range(self.size):
                    if not self.finished[other]:
                        self.wake[other].notify()
                        break

    def fail(self, failure: BaseException) -> bool:
        """Record a failure and release everyone. True if it is the first."""
        with self.lock:
            first = self.failure is None
            if first:
                self.failure = failure
            for condition in self.wake:
                condition.notify_all()
            return first

    def _deadlock(self, rank: int, waiting_for: Waitable) -> str:
        lines = ["every rank waits and no message is on its way:"]
        for other in range(self.size):
            what = waiting_for if other == rank else self.waiting[other]
            lines.append(f"  rank {other} has returned" if what is None else f"  {what.describe()}")
        return "\n".join(lines)


class LocalTransport:
    """The ranks of one group of threads."""

    launcher = "run_local"

    def __init__(self, world: LocalWorld, ranks: Sequence[int], rank: int, name: str = "world") -> None:
        self.world = world
        self.ranks = list(ranks)  # group rank -> thread number
        self.rank = rank
        self.size = len(self.ranks)
        self.name = name

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Owner) -> Request:
        me = self.ranks[self.rank]
        message = _Message(array, "send to", dest, tag, owner, me)
        self.world.post((self.name, me, self.ranks[dest], tag), message)
        return message

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Owner) -> Request:
        me = self.ranks[self.rank]
        message = _Message(array, "receive from", source, tag, owner, me)
        self.world.post((self.name, self.ranks[source], me, tag), message)
        return message

    def exchange(
        self, sent: np.ndarray, dest: int, received: np.ndarray, source: int, tag: int, owner: Owner
    ) -> tuple[Request, ...]:
        outgoing = self.isend(sent, dest, tag, owner)
        return self.irecv(received, source, tag, owner), outgoing

    def pause(self, attempt: int, waiting_for: Waitable) -> None:
        self.world.pause(self.ranks[self.rank], waiting_for)

    def group(self, ranks: Sequence[int], name: str) -> LocalTransport:
        members = [self.ranks[rank] for rank in ranks]
        return LocalTransport(self.world, members, members.index(self.ranks[self.rank]), name)

    def native(self, op: str, *arguments: Any) -> Request:
        raise UsageError(f'algorithm="mpi": {op} over threads has no MPI to call; start the program with mpirun')

    def abort(self, code: int) -> None:
        self.world.fail(CommunicationError(f"rank {self.ranks[self.rank]} aborted the run with code {code}"))
        raise _Released


def run_local(
    ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    clock: str | Callable[[], Clock] | None = None,
    network: Network | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(comm, *args, **kwargs)` on `ranks` threads, each with its own Communicator; return each rank's value.

    `clock` is "wall" (default), "cpu", "model", or what makes each rank's; `network` prices messages on logical clocks.
    The first exception in time is raised here, with a note that names its rank, and the other ranks are released at
    once. If every rank waits and no message can come, CommunicationError says what each one waits for.
    """
    if ranks < 1:
        raise UsageError(f"run_local needs at least 1 rank, not {ranks}")
    world = LocalWorld(ranks)
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            transport = LocalTransport(world, range(ranks), rank)
            comm = Communicator(transport, clock=clock() if callable(clock) else clock, network=network)
            results[rank] = fn(comm, *args, **kwargs)
            world.finish(rank)
        except _Released:
            pass
        except BaseException as error:
            if world.fail(error):
                error.add_note(f"on rank {rank}")

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and world.failure is None:
                thread.join(0.5)
    except BaseException as interruption:  # Ctrl-C arrives in this thread only
        world.fail(interruption)
    if world.failure is not None:
        for thread in threads:
            thread.join(RELEASE_SECONDS)
        raise world.failure
    return results


def serial(clock: str | Clock | None = None, network: Network | None = None) -> Communicator:
    """A world of one rank in the calling thread: the same program on one device."""
    return Communicator(LocalTransport(LocalWorld(1), [0], 0), clock=clock, network=network)
