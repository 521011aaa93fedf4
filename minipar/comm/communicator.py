"""Communicator: the operations of the ranks of a group."""

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minipar.backend import Array, from_host, is_host, to_host, xp
from minipar.comm.algorithms import ALGORITHMS, bounds_of, chunks, ring_all_gather
from minipar.comm.clock import Clock, Network
from minipar.comm.trace import TimedLink, TimedWork
from minipar.comm.transport import Link, Steps, Transport, to_tag
from minipar.comm.work import Engine, Work
from minipar.errors import CommunicationError, check_divides

FEW_STEPS_BELOW = 256 * 1024  # bytes of the whole array
AUTO = {  # by operation: the algorithm for arrays below that size, and from there on
    "all_reduce": ("recursive_doubling", "ordered"),
    "reduce_scatter": ("recursive_halving", "ordered"),
    "all_gather": ("pairwise", "pairwise"),
    "all_to_all": ("pairwise", "pairwise"),
    "broadcast": ("binomial", "binomial"),
    "barrier": ("dissemination", "dissemination"),
}
COMBINE = {"sum": np.add, "max": np.maximum}
NOTHING = np.empty(0, np.uint8)  # the array of operations that have none, or change none

# What a rank sends to each rank, and receives from it.
Counts = tuple[Sequence[int], Sequence[int]] | None
Result = Any  # the array, or with async_op the Work whose wait() returns it


def choose(op: str, algorithm: str, nbytes: int) -> str:
    """Return the name of the algorithm to run.

    "auto" is an algorithm of few messages (lg p, but for gathers) below FEW_STEPS_BELOW bytes of the
    whole array, and above it one of few bytes (n(p-1)/p each way) and few waits. Any other name is
    obeyed at any size, so DP and ZeRO with "ring" agree bit for bit.
    """
    if algorithm == "auto":
        small, large = AUTO[op]
        return small if nbytes < FEW_STEPS_BELOW else large
    return algorithm


class Communicator:
    """The ranks of one mesh axis (or of the whole world), seen from one of them.

    rank, size       this rank and the number of ranks, inside the group
    axis             the name under which traffic and trace record the operations
    ranks            the world rank of each member
    traffic, tracer, clock    one each per rank, shared by all communicators split from the same world

    Every rank of the group must call its collectives in the same order, with the same shapes and
    dtypes. They work on contiguous host arrays of any dtype that NumPy can add. Arrays of another
    module are staged through host memory. With `async_op=True` they return a Work at once. Its
    arrays must be left alone until `work.wait()`. The docstrings count the bytes that a rank sends,
    for n bytes and p ranks (exactly: `traffic.wire_bytes`).
    """

    def __init__(
        self,
        transport: Transport,
        axis: str = "world",
        *,
        clock: str | Clock = "wall",
        network: Network | None = None,
        parent: "Communicator | None" = None,
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.ranks = transport.ranks
        self.axis = axis
        self.name = transport.name
        axis_rank = "" if axis == "world" else f" ({axis} rank {self.rank})"
        self.label = f"rank {self.ranks[self.rank]}{axis_rank}"  # in error messages
        self.engine: Engine = Engine(clock, network) if parent is None else parent.engine
        self.clock = self.engine.clock
        self.traffic = self.engine.traffic
        self.tracer = self.engine.tracer
        self.queue: deque[Work] = deque()  # the collectives that are not finished, the oldest first
        self.engine.queues.append(self.queue)
        self.operations = 0  # collectives issued
        self.groups = 0  # made of this one
        self.end = 0.0  # when the last operation ended, on a logical clock
        self.port = 0.0  # when its last message had left
        self.messages: Counter[str] = Counter()  # so far, by their ends, in a trace

    @property
    def chunk_comm(self) -> "Communicator":
        """The ranks over which ZeRO cuts a bucket into chunks: these. A communicator in two levels has others."""
        return self

    def progress(self) -> None:
        """Advance outstanding asynchronous work of all this rank's communicators, without waiting."""
        now = self.clock.now()
        self.engine.progress()
        self.clock.resume(now)

    def isend(self, array: Array, dest: int, tag: int = 0) -> Work:
        """Start to send a contiguous array, counted as operation "send".

        Leave it alone until the Work is done.
        """
        work = self._message("send", dest, tag)
        work.begin(iter([(work.link.isend(_flat(array), dest),)]), None)
        return work

    def irecv(self, array: Array, source: int, tag: int = 0) -> Work:
        """Start to receive into a contiguous array.

        `wait()` returns it. A message of another size is an error.
        """
        host = _room(array)
        work = self._message("recv", source, tag)
        work.begin(iter([(work.link.irecv(host, source),)]), array)
        if not is_host(array):
            work.then(partial(_copy_back, host, array))
        return work

    def _message(self, name: str, peer: int, tag: int) -> Work:
        """Return the Work of one message between users, which has a queue of its own."""
        self._check_rank(name, peer)
        return self._work(name, "", tag, deque())

    def _check_rank(self, name: str, rank: int) -> None:
        """Raise ValueError for a rank that the group does not have: -1, or one counted in the whole world."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.label}, {name}: rank {rank} is not one of the {self.size} ranks")

    def all_reduce(
        self, x: Array, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """Replace x, of any shape, by the sum (or the maximum) over all ranks. Return x, or a Work.

        Sent per rank: 2n(p-1)/p bytes, n lg p by recursive_doubling. "ordered" adds in rank order,
        as one device does.
        """
        flat = _flat(x) if self.size > 1 else NOTHING
        return self._issue("all_reduce", algorithm, (flat, COMBINE[op]), flat, x, async_op)

    def reduce_scatter(
        self,
        x: Array,
        out: Array | None = None,
        op: str = "sum",
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Result:
        """Set out = chunk r (`chunk_bounds(n, p)[r]`) of the sum of all ranks' x.

        Return out, or a Work.

        x has n elements and is not changed. Sent per rank: all of x but one chunk, n(p-1)/p bytes.
        """
        flat = _flat(x)
        out = _new(x, chunks(flat, self.size)[self.rank].size) if out is None else out
        host = _room(out)
        return self._issue("reduce_scatter", algorithm, (flat, host, COMBINE[op]), host, out, async_op)

    def all_gather(
        self, chunk: Array, out: Array | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """Set out = all ranks' chunks in rank order.

        Chunk r must have the size of `chunk_bounds(n, p)[r]`.

        Without `out` the chunks must be equal; the result is a new flat array. `chunk` may be its
        own part of `out`. Sent per rank: n(p-1)/p bytes. Return out, or a Work.
        """
        flat = _flat(chunk)
        out = _new(chunk, self.size * flat.size) if out is None else out
        host = _room(out)
        chunks(host, self.size)[self.rank][...] = flat  # copies nothing where the two are the same memory
        return self._issue("all_gather", algorithm, (host,), host, out, async_op)

    def all_to_all(
        self,
        x: Array,
        out: Array | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        counts: Counts = None,
    ) -> Result:
        """Send chunk j of x to rank j; set out = the chunks sent here, in rank order.

        Return out, or a Work.

        `counts` are (sends, receives), if the chunks of x are not `chunk_bounds`: sends[j] elements
        for rank j, and receives[j] from it. Sent per rank: all of x but its own chunk, n(p-1)/p
        bytes if chunks are equal.
        """
        flat = _flat(x)
        if counts is None:
            sizes = [chunk.size for chunk in chunks(flat, self.size)]
            counts = (sizes, [sizes[self.rank]] * self.size)
        sends, receives = map(bounds_of, counts)
        if sends[-1][1] != flat.size:
            given = f"counts of {sends[-1][1]} elements, but the array has {flat.size}"
            raise CommunicationError(f"{self.label}, all_to_all: {given}")
        out = _new(x, receives[-1][1]) if out is None else out
        host = _room(out)
        return self._issue("all_to_all", algorithm, (flat, host, sends, receives), host, out, async_op)

    def broadcast(
        self, x: Array, root: int = 0, algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """Copy x of `root` to every rank, in place.

        Sent: n bytes per child in a binomial tree, n(p-1) in all.
        """
        self._check_rank("broadcast", root)
        flat = _flat(x) if self.size > 1 else NOTHING
        return self._issue("broadcast", algorithm, (flat, root), flat, x, async_op)

    def barrier(self, algorithm: str = "auto") -> None:
        """Return when every rank of the group has called. Sent: ceil(lg p) empty messages."""
        self._issue("barrier", algorithm, (), NOTHING, None, async_op=False)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order.

        No clock, no trace and no account sees it. Shorter ones are padded on the way.
        """
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(data)
        self._gather(lengths)
        rows = np.zeros((self.size, lengths.max()), np.uint8)
        rows[self.rank, : len(data)] = np.frombuffer(data, np.uint8)
        self._gather(rows.reshape(-1))
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def new_group(self, members: Sequence[int], axis: str) -> "Communicator":
        """Make the group of these ranks, this one among them, in this order, without sending anything.

        Every rank must call it as often as the others, and each member with the same list.
        """
        self.groups += 1
        name = f"{self.name}/{self.groups}.{axis}{members[0]}"
        return Communicator(self.transport.group(members, name), axis, parent=self)

    def split_into(self, groups: int, axis: str | None = None) -> tuple["Communicator", "Communicator"]:
        """Cut the ranks into equal groups of neighbours, such as those of one host.

        Make this rank's group, which may have an axis of its own, and the group of the ranks that
        have the same place in theirs. UsageError if the groups would not be equal.
        """
        check_divides(f"{self.axis}/groups", self.size, groups, "all groups have the same size")
        near = self.size // groups
        place = self.rank % near
        first = self.rank - place
        inside = self.new_group(range(first, first + near), axis or self.axis)
        return inside, self.new_group(range(place, self.size, near), self.axis)

    def _issue(
        self,
        name: str,
        algorithm: str,
        arguments: tuple[Any, ...],
        host: np.ndarray,
        result: Array | None,
        async_op: bool,
    ) -> Result:
        """Put an operation into the queue. Return its Work, or wait for it and return `result`.

        `arguments` are those of the algorithm after its link, first the array that is sent. `host`
        gets the result's values; they are copied to `result` if this is an array on the device.
        """
        sent = arguments[0] if arguments else NOTHING
        algorithm = choose(name, algorithm, sent.nbytes)
        work = self._work(name, algorithm, self._next_tag(name, sent), self.queue)
        steps: Steps = iter(())
        if self.size > 1:
            steps = ALGORITHMS[name][algorithm](work.link, *arguments)
        else:
            host[...] = sent
        work.begin(steps, result)
        if not is_host(result) and host is not NOTHING:
            work.then(partial(_copy_back, host, result))
        if not async_op:
            return work.wait()
        work.advance()  # posts the first messages
        return work

    def _next_tag(self, name: str, sent: np.ndarray) -> int:
        """Return the tag of the next operation. (To an all-to-all each rank may bring its own number of elements.)"""
        self.operations += 1
        elements = 0 if name == "all_to_all" else sent.size
        return to_tag(name, sent.dtype, elements, self.operations)

    def _work(self, name: str, algorithm: str, tag: int, queue: deque[Work]) -> Work:
        """Make the Work of an operation or a message.

        It is a TimedWork on a logical clock, or while a trace is recorded.
        """
        if self.clock.logical or self.tracer.enabled:
            return TimedWork(TimedLink(self, name, algorithm, tag), queue)
        return Work(Link(self, name, algorithm, tag), queue)

    def _gather(self, x: np.ndarray) -> None:
        """Gather x on every rank, in place, in an operation that no clock, no trace and no account sees."""
        now = self.clock.now()
        link = Link(self, "control", "ring", self._next_tag("control", NOTHING))
        link.count = [0, 0]  # in no account
        work = Work(link, self.queue)
        work.begin(ring_all_gather(link, x), None)
        work.wait()
        self.clock.resume(now)


def _flat(x: Array) -> np.ndarray:
    """Return the values of x as a flat host array: x's own memory, or a copy of a device array.

    ValueError for an array of NumPy whose values do not lie one after another.
    """
    if is_host(x):
        return x.reshape(-1, copy=False)
    return np.ascontiguousarray(to_host(x)).reshape(-1)


def _room(x: Array) -> np.ndarray:
    """Return a flat host array for x's new values: x's own memory, or new memory if x is a device array."""
    return _flat(x) if is_host(x) else np.empty(x.size, x.dtype)


def _new(x: Array, size: int) -> Array:
    """Return a new array of `size` elements, on the host or the device, like x."""
    return np.empty(size, x.dtype) if is_host(x) else xp.empty(size, dtype=x.dtype)


def _copy_back(host: np.ndarray, x: Array) -> None:
    """Copy a result to the device."""
    x[...] = from_host(host.reshape(x.shape))
