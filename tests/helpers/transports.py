"""Transports that misbehave as a network or a scheduler may, around any other transport, and ranks that run over them.

`Late` delays messages, so that those to different ranks and of different groups overtake one another. `Lossy` loses a
message. `Turns` decides which thread runs.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minipar.comm import ALGORITHMS, chunk_bounds, run_local
from minipar.comm.communicator import Communicator
from minipar.comm.threads import LOOK_SECONDS, ThreadTransport, ThreadWorld
from minipar.comm.transport import Link, Request, Transport
from minipar.errors import CommunicationError

LONGEST_DELAY = 1e-3  # seconds; a message between two threads takes about 20e-6
SAME_CHANCES = 40  # turns


class Wrapped:
    """A transport that does what another one does. Subclasses change something, in the groups made from it too."""

    def __init__(self, inner: Transport) -> None:
        self._wrap(inner)

    def _wrap(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.ranks = inner.rank, inner.size, inner.ranks
        self.name, self.launcher, self.job = inner.name, inner.launcher, inner.job

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        return self.inner.isend(array, dest, tag, owner)

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        return self.inner.irecv(array, source, tag, owner)

    def pause(self, attempt: int, waiting_for: Request) -> None:
        self.inner.pause(attempt, waiting_for)

    def group(self, ranks: Sequence[int], name: str) -> Wrapped:
        other = copy.copy(self)
        other._wrap(self.inner.group(ranks, name))
        return other


OURS = [(op, algorithm) for op in ALGORITHMS for algorithm in ALGORITHMS[op]]


def collective(comm: Communicator, op: str, algorithm: str, n: int, async_op: bool = False) -> Any:
    """Call a collective on n values, whose sum depends on the order of addition. Return its result, or its Work.

    Afterwards its arrays have other values: an operation that is done must not need them, not on another rank either.
    """
    x = np.random.default_rng(comm.rank).standard_normal(n) * 10.0 ** (comm.rank % 5)
    if op == "barrier":
        return comm.barrier(algorithm=algorithm)
    if op == "all_gather":
        start, stop = chunk_bounds(n, comm.size)[comm.rank]
        result = comm.all_gather(x[start:stop], np.zeros(n), algorithm=algorithm, async_op=async_op)
    else:
        result = getattr(comm, op)(x, algorithm=algorithm, async_op=async_op)
    if async_op:
        return result
    values = result.copy()
    for array in (x, result):
        array.fill(np.nan)
    return values


class Done:
    """A request that has nothing to wait for."""

    peer: int | None = None

    def test(self) -> bool:
        return True

    def describe(self) -> str:
        return "nothing"


# ---- messages that arrive late ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Held:
    """A send that begins when it is due."""

    pair: tuple[str, int, int]  # group, source and dest
    number: int  # which send of its rank it is
    due: float
    begin: Callable[[], Request]
    eager: bool
    words: str
    outbox: Outbox
    request: Request | None = None
    peer: int | None = None

    def test(self) -> bool:
        self.outbox.release()
        return self.eager or (self.request is not None and self.request.test())

    def describe(self) -> str:
        return self.words if self.request is None else self.request.describe()


@dataclass(eq=False)
class _Receive:
    """A receive. Testing it is an occasion to send what is due."""

    request: Request
    outbox: Outbox

    @property
    def peer(self) -> int | None:
        return self.request.peer

    def test(self) -> bool:
        self.outbox.release()
        return self.request.test()

    def describe(self) -> str:
        return self.request.describe()


@dataclass
class Outbox:
    """The messages that one rank has sent and that have not left, of all its groups, in a queue for each receiver."""

    queues: dict[tuple[str, int, int], deque[_Held]] = field(default_factory=dict)
    sent: int = 0
    sent_to: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    eager: list[_Held] = field(default_factory=list)  # kept: MPI may still read what an eager send sends
    overtaken: int = 0  # messages that left when an earlier one had not

    def release(self) -> None:
        """Send what is due. A message never overtakes an earlier one of the same group to the same rank."""
        now = time.monotonic()
        while (held := self.next()) is not None and held.due <= now:
            self.queues[held.pair].popleft()
            self.overtaken += any(queue[0].number < held.number for queue in self.queues.values() if queue)
            held.request = held.begin()

    def next(self) -> _Held | None:
        """Return the message that leaves next."""
        return min((queue[0] for queue in self.queues.values() if queue), key=lambda held: held.due, default=None)

    def sleep(self) -> bool:
        """Sleep until the next message is due, and send it. False if there is none."""
        held = self.next()
        if held is not None:
            time.sleep(max(0.0, held.due - time.monotonic()))
            self.release()
        return held is not None


class Late(Wrapped):
    """A transport that holds each message back for a random time.

    The time depends on the seed and on which message of its pair of ranks it is. Some messages are eager, as MPI's
    small ones: the send is done at once, so that a rank runs ahead of those that have not received its messages.
    """

    def __init__(self, inner: Transport, seed: int, longest: float = LONGEST_DELAY) -> None:
        super().__init__(inner)
        self.seed, self.longest = seed, longest
        self.outbox = Outbox()

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        outbox, pair = self.outbox, (self.name, self.rank, dest)
        outbox.sent += 1
        outbox.sent_to[pair] += 1
        chance = random.Random(f"{self.seed} {pair} {outbox.sent_to[pair]}")
        delay, eager = chance.uniform(0, self.longest), chance.random() < 0.5
        array = array.copy() if eager else array
        words = f"{owner.title()}: delayed send to rank {dest} ({array.nbytes} bytes, tag {tag})"
        begin = lambda: self.inner.isend(array, dest, tag, owner)  # noqa: E731
        held = _Held(pair, outbox.sent, time.monotonic() + delay, begin, eager, words, outbox)
        outbox.queues.setdefault(pair, deque()).append(held)
        if eager:
            outbox.eager.append(held)
        outbox.release()
        return held

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        self.outbox.release()
        return _Receive(self.inner.irecv(array, source, tag, owner), self.outbox)

    def pause(self, attempt: int, waiting_for: Request) -> None:
        """Let the other ranks run, no longer than until the next message is due.

        With a message to send this rank is not one that only waits: the inner transport would report a deadlock.
        """
        if not self.outbox.sleep():
            self.inner.pause(attempt, waiting_for)

    def group(self, ranks: Sequence[int], name: str) -> Late:
        """Make a group, over MPI with other ranks that may wait for a message of this one: so send them all first."""
        self.flush()
        return super().group(ranks, name)

    def flush(self) -> None:
        """Send what is left."""
        while self.outbox.sleep():
            pass

    def close(self) -> None:
        """Send what is left, and wait until the eager sends are done."""
        self.flush()
        for held in self.outbox.eager:
            while not held.request.test():
                self.inner.pause(0, held.request)


# ---- a message that is lost ------------------------------------------------------------------------------------------


class Lossy(Wrapped):
    """A transport that loses one message. The sender does not notice.

    `lost`: the group's name, source, dest, and which message of these two ranks in this group (1 is the first).
    """

    def __init__(self, inner: Transport, lost: tuple[str, int, int, int] | None = None) -> None:
        super().__init__(inner)
        self.lost = lost
        self.sent: Counter[tuple[str, int, int]] = Counter()

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        pair = (self.name, self.rank, dest)
        self.sent[pair] += 1
        if (*pair, self.sent[pair]) == self.lost:
            return Done()
        return super().isend(array, dest, tag, owner)


def run_lossy(ranks: int, fn: Callable[..., Any], lost: tuple[str, int, int, int], *args: Any) -> list[Any]:
    """`run_local` with a lost message."""
    return run_local(ranks, lambda comm: fn(Communicator(Lossy(comm.transport, lost)), *args))


def messages_of(ranks: int, fn: Callable[..., Any], *args: Any) -> list[tuple[str, int, int, int]]:
    """Return every message of a program: group, source, dest and number, as `Lossy` takes them."""

    def rank(comm: Communicator) -> Counter[tuple[str, int, int]]:
        lossy = Lossy(comm.transport)
        fn(Communicator(lossy), *args)
        return lossy.sent

    sent = [item for counts in run_local(ranks, rank) for item in counts.items()]
    return [(*pair, number + 1) for pair, count in sent for number in range(count)]


# ---- an order of the threads -----------------------------------------------------------------------------------------


class Schedule:
    """A random order of the ranks of `run_local`, which its seed determines. One rank runs at a time.

    A rank hands its turn on whenever it has posted half of a message, and when it pauses. After a pause it gets no turn
    until another rank has posted half of a message between the two: nothing it waits for can be done before. With equal
    chances all ranks would advance together; so each has a chance of its own, and after SAME_CHANCES turns another.
    """

    def __init__(self, ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.turns = [threading.Lock() for _ in range(ranks)]  # a rank has its turn when it can acquire its lock
        for turn in self.turns:
            turn.acquire()
        self.active = set(range(ranks))  # those that have not returned
        self.waiting: set[int] = set()
        self.news: set[int] = set()  # ranks for which another one has posted since they last paused
        self.all_ready = threading.Barrier(ranks, action=self.hand_on)
        self.order: list[int] = []  # of the ranks, turn by turn

    def hand_on(self) -> None:
        """Draw the rank that has the next turn."""
        if len(self.order) % SAME_CHANCES == 0:
            self.chances = [10.0 ** self.random.uniform(-3, 0) for _ in self.turns]
        ready = sorted(self.active - self.waiting or self.active)
        (rank,) = self.random.choices(ready, [self.chances[rank] for rank in ready])
        self.order.append(rank)
        self.turns[rank].release()

    def take(self, rank: int, world: ThreadWorld) -> None:
        """Wait for this rank's turn. A rank that has failed never hands its turn on: then leave."""
        while not self.turns[rank].acquire(timeout=LOOK_SECONDS):
            if world.failure is not None:
                raise CommunicationError("another rank has failed")

    def end(self, rank: int) -> None:
        """Hand this rank's last turn on."""
        self.active.discard(rank)
        if self.active:
            self.hand_on()


class Turns(Wrapped):
    """A transport between threads that run in the order of a `Schedule`."""

    def __init__(self, inner: ThreadTransport, schedule: Schedule) -> None:
        super().__init__(inner)
        self.schedule = schedule

    def isend(self, array: np.ndarray, dest: int, tag: int, owner: Link) -> Request:
        return self._posted(super().isend(array, dest, tag, owner), dest)

    def irecv(self, array: np.ndarray, source: int, tag: int, owner: Link) -> Request:
        return self._posted(super().irecv(array, source, tag, owner), source)

    def _posted(self, request: Request, peer: int) -> Request:
        self.schedule.waiting.discard(self.inner.ranks[peer])
        self.schedule.news.add(self.inner.ranks[peer])
        self._yield()
        return request

    def pause(self, attempt: int, waiting_for: Request) -> None:
        schedule, rank = self.schedule, self.inner.ranks[self.rank]
        if rank in schedule.news:  # perhaps after the test that led to this pause
            schedule.news.discard(rank)
        else:
            schedule.waiting.add(rank)
        if schedule.active <= schedule.waiting:
            raise CommunicationError(f"every rank waits. {waiting_for.describe()}")
        self._yield()

    def _yield(self) -> None:
        self.schedule.hand_on()
        self.schedule.take(self.inner.ranks[self.rank], self.inner.world)


def run_in_turns(ranks: int, fn: Callable[..., Any], seed: int, *args: Any) -> tuple[list[Any], list[int]]:
    """`run_local` in a random order of its ranks. Returns the ranks' values, and the order, turn by turn."""
    schedule = Schedule(ranks, seed)

    def rank(comm: Communicator) -> Any:
        schedule.all_ready.wait()
        schedule.take(comm.rank, comm.transport.world)
        result = fn(Communicator(Turns(comm.transport, schedule)), *args)
        schedule.end(comm.rank)
        return result

    return run_local(ranks, rank), schedule.order


def hierarchical_all_reduce(x, inside, across, algorithm="ring"):
    """Replace x by the sum over the ranks of both groups, `inside`'s first."""
    chunk = inside.reduce_scatter(x, algorithm=algorithm)
    across.all_reduce(chunk, algorithm=algorithm)
    return inside.all_gather(chunk, out=x, algorithm="pairwise")
