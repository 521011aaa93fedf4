"""isend and irecv between threads of one process: for notebooks and for fast tests.

A send is matched with its receive under one lock, and the second of the two copies the values. So a
send is done only when it has been received, and code that would deadlock on a large MPI message
deadlocks here too. The threads know when every rank waits and no message is under way, and report
it as an error.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar.backend import Value, this_rank
from minipar.comm.clock import Clock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.transport import USER_TAGS, Link, Request, has_returned
from minipar.errors import CommunicationError, print_line
from minipar.process import one_blas_thread

LOOK_SECONDS = 0.05  # between two looks at the clock by a rank that waits; a message wakes it at once
RELEASE_SECONDS = 10.0  # how long a failed run waits for ranks that are still computing


class _Released(BaseException):
    """An exception that ends a rank because another one has failed."""


@dataclass(eq=False)
class _Message(Request):
    """One half of a message."""

    array: np.ndarray
    world_rank: int  # whose half it is
    done: bool = False
    arrived: tuple[int, int] | None = None  # the bytes and the tag of the send, at a receive that is done

    def test(self) -> bool:
        if self.arrived is not None:
            self.check(*self.arrived)
        return self.done


class ThreadWorld:
    """The state that the threads share: unmatched messages, what each rank waits for, and the first failure."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.unmatched: dict[tuple[str, int, int, int], deque[_Message]] = {}
        self.wake = [threading.Condition(self.lock) for _ in range(size)]
        self.news = [False] * size  # a message of this rank was delivered since it last paused
        # The ranks that wait without news, and for what; None: the rank has returned.
        self.idle: dict[int, Request | None] = {}
        self.failure: BaseException | None = None

    def post(self, key: tuple[str, int, int, int], message: _Message) -> Request:
        """Deliver `message` if its other half has been posted, else keep it until then; return it."""
        with self.lock:
            if self.failure is not None:
                raise _Released
            queue = self.unmatched.setdefault(key, deque())
            if not queue or queue[0].direction == message.direction:
                queue.append(message)
                return message
            other = queue.popleft()
            if not queue:
                del self.unmatched[key]
            send, receive = (message, other) if message.direction == "send to" else (other, message)
            receive.arrived = (send.nbytes, send.tag)
            if receive.arrived == (receive.nbytes, receive.tag):
                receive.array.view(np.uint8)[...] = send.array.view(np.uint8)
            for half in (send, receive):
                # The half's rank may free the array once it sees `done`, while this thread still has the message.
                del half.array
                half.done = True
                rank = half.world_rank
                self.news[rank] = True
                if self.idle.get(rank) is not None:
                    del self.idle[rank]
                    self.wake[rank].notify()
            return message

    def pause(self, rank: int, waiting_for: Request) -> None:
        """Sleep until one of this rank's messages has been delivered, or LOOK_SECONDS have passed."""
        with self.lock:
            if not self.news[rank] and self.failure is None:
                self.idle[rank] = waiting_for
                if len(self.idle) == len(self.wake):
                    raise CommunicationError(self._deadlock())
                self.wake[rank].wait(timeout=LOOK_SECONDS)
                self.idle.pop(rank, None)
            self.news[rank] = False
            if self.failure is not None:
                raise _Released

    def fail(self, failure: BaseException) -> bool:
        """Record a failure and release all ranks. Return True if it is the first."""
        with self.lock:
            self.failure = self.failure or failure
            for condition in self.wake:
                condition.notify_all()
            return self.failure is failure

    def _deadlock(self) -> str:
        lines = ["every rank waits and no message is on its way:"]
        for rank, request in sorted(self.idle.items()):
            lines.append(has_returned(rank) if request is None else request.describe())
        return "\n  ".join(lines)


class ThreadTransport:
    """The ranks of one group of threads. (Its methods' docstrings are in transport.Transport.)"""

    launcher = "this process"
    job = None  # `run_local` ends the threads together

    def __init__(self, world: ThreadWorld, ranks: Sequence[int], rank: int, name: str = "world") -> None:
        self.world = world
        self.rank = rank
        self.name = name
        self.ranks = list(ranks)  # their threads' numbers
        self.size = len(ranks)

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        return self._post("send to", array, dest, tag, owner)

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        return self._post("receive from", array, source, tag, owner)

    def _post(self, direction: str, array: np.ndarray, rank: int, tag: int, owner: Link) -> Request:
        """Post half of a message: a user's is matched by its tag, a collective's by its order."""
        me = self.ranks[self.rank]
        peer = self.ranks[rank]
        ends = (me, peer) if direction == "send to" else (peer, me)
        key = (self.name, *ends, tag if tag < USER_TAGS else -1)
        return self.world.post(key, _Message(owner, direction, peer, array.nbytes, tag, array, me))

    def pause(self, attempt: int, waiting_for: Request) -> None:
        self.world.pause(self.ranks[self.rank], waiting_for)

    def group(self, ranks: Sequence[int], name: str) -> "ThreadTransport":
        members = [self.ranks[rank] for rank in ranks]
        return ThreadTransport(self.world, members, members.index(self.ranks[self.rank]), name)


def run_local(
    ranks: int,
    fn: Callable[..., Value],
    *args: object,
    clock: str | Callable[[], Clock] = "wall",
    network: Network | None = None,
    **kwargs: object,
) -> list[Value]:
    """Run `fn(comm, *args, **kwargs)` on `ranks` threads, each with its own Communicator.

    Return the ranks' values.

    `clock` is "wall", "cpu", "model", or a function that makes a rank's clock. `network` prices
    messages on logical clocks. The first exception in time is raised here, with a note that names
    its rank, and the other ranks are released at once. If every rank waits and no message can come,
    CommunicationError lists what each one waits for. A rank that calls `sys.exit()` has returned;
    with an error, its SystemExit is raised here. Meanwhile BLAS has one thread in this process, as
    on every rank.
    """
    world = ThreadWorld(ranks)
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            this_rank.rank = rank
            transport = ThreadTransport(world, range(ranks), rank)
            comm = Communicator(transport, clock=clock() if callable(clock) else clock, network=network)
            try:
                results[rank] = fn(comm, *args, **kwargs)
            except SystemExit as leaving:
                if leaving.code:
                    raise
            with world.lock:
                # If all others wait, the next of them to look reports the deadlock.
                world.idle[rank] = None
        except _Released:
            pass
        except BaseException as error:
            if world.fail(error):
                error.add_note(f"on rank {rank}")
                if isinstance(error, SystemExit):
                    print_line(f"minipar: rank {rank} exits with {error.code!r}")

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True
        )
        for rank in range(ranks)
    ]
    with one_blas_thread():
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


def serial() -> Communicator:
    """Return a world of one rank in the calling thread: the same program on one device."""
    return Communicator(ThreadTransport(ThreadWorld(1), [0], 0))
