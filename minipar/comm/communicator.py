"""Communicator: the operations of the ranks of a group."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from minipar.backend import Array, from_host, is_host, to_host, xp
from minipar.comm.algorithms import GENERATORS, bounds_of, chunks, pairwise_all_to_all, ring_all_gather
from minipar.comm.guards import check_array
from minipar.comm.trace import TimedWork
from minipar.comm.transport import USER_TAGS, Request, Steps
from minipar.comm.work import Stream, Work
from minipar.errors import CommunicationError, UsageError

COMBINE = {"sum": np.add, "max": np.maximum}

ALGORITHMS = {op: (*[name for other, name in GENERATORS if other == op], "mpi") for op, _ in GENERATORS}

FEW_STEPS_BELOW = 256 * 1024  # bytes of the whole array
AUTO = {  # by operation: the algorithm for arrays below that size, and from there on
    "all_reduce": ("recursive_doubling", "ordered"),
    "reduce_scatter": ("recursive_halving", "ordered"),
    "all_gather": ("recursive_doubling", "pairwise"),
}
NOTHING = np.empty(0, np.uint8)  # the array of operations that have none, or change none

Counts = tuple[Sequence[int], Sequence[int]] | None
Result = Any  # the array, or with async_op the Work whose wait() returns it


def choose(op: str, algorithm: str, nbytes: int) -> str:
    """Return the algorithm to run. UsageError for a name that the operation does not have.

    "auto" sends lg p messages where the time per message counts, below FEW_STEPS_BELOW bytes of the whole array. From
    there on it sends the fewest bytes, n(p-1)/p each way, in the fewest rounds of waiting. ("ordered" also keeps the
    rank order, at no cost.) Any other name is obeyed at any size, so DP and ZeRO with "ring" agree bit for bit.
    """
    if algorithm == "auto":
        small, large = AUTO.get(op, (ALGORITHMS[op][0], ALGORITHMS[op][0]))
        return small if nbytes < FEW_STEPS_BELOW else large
    if algorithm not in ALGORITHMS[op]:
        raise UsageError(f'{op}: algorithm "{algorithm}": expected auto, {", ".join(ALGORITHMS[op])}')
    return algorithm


class Communicator(Stream):
    """The ranks of one mesh axis (or of the whole world), seen from one of them.

    rank, size       this rank and the number of ranks, inside the group
    axis             the name under which traffic and trace record the operations
    ranks            the world rank of each member
    traffic, tracer, clock    one each per rank, shared by all communicators split from the same world

    Every rank of the group must call its collectives in the same order, with the same shapes and dtypes. They work on
    contiguous host arrays of any dtype that NumPy can add. Arrays of another module are staged through host memory.
    With `async_op=True` they return a Work at once. Its arrays must be left alone until `work.wait()`. The docstrings
    count the bytes that a rank sends, for n bytes and p ranks (exactly: `traffic.wire_bytes`).
    """

    def progress(self) -> None:
        """Advance outstanding asynchronous work of all this rank's communicators, without waiting."""
        if self.engine.streams:
            now = self.clock.now()
            self.engine.progress()
            self.clock.resume(now)

    def isend(self, array: Array, dest: int, tag: int = 0) -> Work:
        """Start to send a contiguous array, counted as operation "send". Leave it alone until the Work is done."""
        return self._message("send", dest, tag, self._flat(array, "send"))

    def irecv(self, array: Array, source: int, tag: int = 0) -> Work:
        """Start to receive into a contiguous array. `wait()` returns it. A message of another size is an error."""
        return self._message("recv", source, tag, self._room(array, "recv"), array)

    def _message(self, op: str, peer: int, tag: int, host: np.ndarray, array: Array | None = None) -> Work:
        if not 0 <= peer < self.size:
            raise ValueError(f"{self.label}, {op}: rank {peer} is not one of the {self.size} ranks")
        if not 0 <= tag < USER_TAGS:
            raise ValueError(f"{self.label}, {op}: tag {tag} is outside 0..{USER_TAGS - 1}")
        work = self._kind()(self, op, "", tag)
        request = work.isend(host, peer) if array is None else work.irecv(host, peer)
        steps: Iterator[Iterable[Request]] = iter([(request,)])
        if array is not None and type(array) is not np.ndarray:
            steps = _copy_back(steps, host, array)
        return work.start(steps, array)

    def all_reduce(self, x: Array, op: str = "sum", algorithm: str = "auto", async_op: bool = False) -> Result:
        """Replace x, of any shape, by the sum (or the maximum) over all ranks. Return x, or a Work.

        Sent per rank: 2n(p-1)/p bytes, n lg p by recursive_doubling. "ordered" adds in rank order, as one device does.
        """
        flat = self._flat(x, "all_reduce") if self.size > 1 else NOTHING
        return self._run("all_reduce", algorithm, x, flat, async_op, flat, _combine(op))

    def reduce_scatter(
        self, x: Array, out: Array | None = None, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """Set out = chunk r (`chunk_bounds(n, p)[r]`) of the sum of all ranks' x. Return out, or a Work.

        x has n elements and is not changed. Sent per rank: all of x but one chunk, n(p-1)/p bytes.
        """
        flat = self._flat(x, "reduce_scatter")
        out, host = self._output("reduce_scatter", x, out, chunks(flat, self.size)[self.rank].size)
        return self._run("reduce_scatter", algorithm, out, host, async_op, flat, host, _combine(op))

    def all_gather(
        self, chunk: Array, out: Array | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """Set out = all ranks' chunks in rank order. Chunk r must have the size of `chunk_bounds(n, p)[r]`.

        Without `out` the chunks must be equal; the result is a new flat array. `chunk` may be its own part of `out`.
        Sent per rank: n(p-1)/p bytes. Return out, or a Work.
        """
        flat = self._flat(chunk, "all_gather")
        out, host = self._output("all_gather", chunk, out, flat.size * self.size if out is None else out.size)
        own = chunks(host, self.size)[self.rank]
        if flat.size != own.size:
            given = f"{host.size} elements over {self.size} ranks give this rank {own.size}"
            raise CommunicationError(f"{self.label}, all_gather: {given}, but its chunk has {flat.size}")
        own[...] = flat  # NumPy copies nothing where the two are the same memory
        return self._run("all_gather", algorithm, out, host, async_op, host)

    def all_to_all(
        self, x: Array, out: Array | None = None, algorithm: str = "auto", async_op: bool = False, counts: Counts = None
    ) -> Result:
        """Send chunk j of x to rank j; set out = the chunks sent here, in rank order. Return out, or a Work.

        `counts` are (sends, receives), if the chunks of x are not `chunk_bounds`: sends[j] elements for rank j, and
        receives[j] from it. Sent per rank: all of x but its own chunk, n(p-1)/p bytes if chunks are equal.
        """
        flat, r = self._flat(x, "all_to_all"), self.rank
        size, bounds = self.size * chunks(flat, self.size)[r].size, []
        if counts is not None:
            sends, receives = (list(map(int, each)) for each in counts)
            complete = len(sends) == len(receives) == self.size and sends[r] == receives[r]
            if not complete or min(sends + receives) < 0 or sum(sends) != flat.size:
                given = f"counts {sends}, {receives} of {flat.size} elements"
                rule = f"one for each rank, for rank {r} the same; what is sent adds up to the elements"
                raise CommunicationError(f"{self.label}, all_to_all: {given}: expected {rule}")
            bounds, size = [bounds_of(sends), bounds_of(receives)], sum(receives)
        out, host = self._output("all_to_all", x, out, size)
        return self._run("all_to_all", algorithm, out, host, async_op, flat, host, *bounds)

    def broadcast(self, x: Array, root: int = 0, algorithm: str = "auto", async_op: bool = False) -> Result:
        """Copy x of `root` to every rank, in place. Sent: n bytes per child in a binomial tree, n(p-1) in all."""
        if not 0 <= root < self.size:
            raise ValueError(f"{self.label}, broadcast: root {root} is not one of the {self.size} ranks")
        flat = self._flat(x, "broadcast") if self.size > 1 else NOTHING
        return self._run("broadcast", algorithm, x, flat, async_op, flat, root)

    def barrier(self, algorithm: str = "auto") -> None:
        """Return when every rank of the group has called. Sent: ceil(lg p) empty messages."""
        self._run("barrier", algorithm, NOTHING, NOTHING, False)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order. Operation "control": no clock and no trace sees it."""
        return self._gather(data, range(self.size))

    def gather_bytes(self, data: bytes, root: int = 0) -> list[bytes] | None:
        """Return on `root` what `all_gather_bytes` returns everywhere, and None elsewhere."""
        parts = self._gather(data, [root])
        return parts if self.rank == root else None

    def _gather(self, data: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Return every rank's bytes, on `ranks`: an all-to-all in which the others receive nothing."""
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(data)
        self._control(ring_all_gather, lengths)
        sends = [(0, len(data) if rank in ranks else 0) for rank in range(self.size)]
        receives = bounds_of(lengths if self.rank in ranks else 0 * lengths)
        everything = np.empty(receives[-1][1], np.uint8)
        if lengths.any():
            self._control(pairwise_all_to_all, np.frombuffer(data, np.uint8), everything, sends, receives)
        return [part.tobytes() for part in chunks(everything, self.size, receives)]

    def agree(self, error: str | None = None) -> None:
        """Raise the lowest rank's error, if any has one, as UsageError on every rank: none waits for a failed one."""
        with self.engine.patient():  # one rank may have written a large file
            texts = self.all_gather_bytes((error or "").encode())
        if first := next(filter(None, texts), None):
            raise UsageError(first.decode())

    def split(self, color: int | None, axis: str) -> "Communicator | None":
        """Make a group of the ranks that pass the same color, in rank order. None for color None."""
        colors = self.all_gather_bytes(str(color).encode())
        members = [rank for rank in range(self.size) if colors[rank] == colors[self.rank]]
        group = self.row(members, axis)  # of None too: every rank must call `row` as often as the others
        return None if color is None else group

    def row(self, members: list[int], axis: str) -> "Communicator":
        """Make the group of these ranks, this one among them, in this order, without sending anything.

        Every rank must call it as often as the others, and each member with the same list.
        """
        self.rows += 1
        name = f"{self.name}/{self.rows}.{axis}{members[0]}"
        return Communicator(self.transport.group(members, name), axis, parent=self)

    def levels(self, hosts: int, axis: str | None = None) -> tuple["Communicator", "Communicator"]:
        """Cut the ranks into `hosts` groups of neighbours. Make this rank's, and that of the same place in all groups.

        The first may have an axis of its own. UsageError if the groups would not be equal.
        """
        if hosts < 1 or self.size % hosts:
            raise UsageError(f"{self.label}: {self.size} ranks / {hosts} groups is not a whole number")
        near = self.size // hosts
        first, place = self.rank - self.rank % near, self.rank % near
        inside = self.row(list(range(first, first + near)), axis or self.axis)
        return inside, self.row(list(range(place, self.size, near)), self.axis)

    def _run(self, op: str, algorithm: str, x: Array, host: np.ndarray, async_op: bool, *arguments: Any) -> Result:
        """Start an operation with its algorithm's arguments. Its result is x, made in the flat host array `host`."""
        elements, combine = (arguments[0], arguments[-1]) if arguments else (NOTHING, None)
        algorithm = choose(op, algorithm, elements.nbytes)
        if type(combine) is list:  # of the chunks of an all-to-all: each rank has its own number of elements
            elements = elements[:0]
        tag = self.next_tag(op, algorithm, elements, combine)
        work = self._kind()(self, op, algorithm, tag)
        generator = _alone if self.size == 1 else GENERATORS.get((op, algorithm), _native)
        steps = generator(work, *arguments)
        if host is not NOTHING and type(x) is not np.ndarray:
            steps = _copy_back(steps, host, x)
        if not async_op and type(work) is Work and not self.queue:  # no queue: a tenth less for small messages
            return work.run(steps, x)
        work.start(steps, x)
        if not async_op:
            return work.wait()
        caller = sys._getframe(2)  # of the operation's own method
        self.engine.unwaited[work] = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        return work

    def _kind(self) -> type[Work]:
        """Return the kind of an operation: one that takes time and is drawn, or a plain one."""
        return TimedWork if self.clock.logical or self.tracer.enabled else Work

    def _control(self, generator: Callable[..., Steps], *arguments: Any) -> None:
        """Run an operation that no clock and no trace sees."""
        now = self.clock.now()
        work = Work(self, "control", "ring", self.next_tag("control", "ring", NOTHING))
        work.start(generator(work, *arguments), None).wait()
        self.clock.resume(now)

    def _flat(self, x: Array, op: str) -> np.ndarray:
        """Return the values of x as a flat host array: x's own memory, or a copy of a device array."""
        check_array(self.label, op, x)
        if type(x) is np.ndarray:
            if not x.flags.c_contiguous:
                raise ValueError(f"{self.label}, {op}: an array of shape {x.shape} is not contiguous; send a copy")
            return x.ravel()  # a view
        return np.ascontiguousarray(to_host(x)).reshape(-1)

    def _room(self, x: Array, op: str) -> np.ndarray:
        """Return a flat host array for x's new values: x's own memory, or new memory if x is a device array."""
        return self._flat(x, op) if type(x) is np.ndarray else np.empty(x.size, x.dtype)

    def _output(self, op: str, x: Array, out: Array | None, size: int) -> tuple[Array, np.ndarray]:
        """Return the array for a result of `size` elements, and the flat host array of its values."""
        if out is None:
            out = np.empty(size, x.dtype) if is_host(x) else xp.empty(size, dtype=x.dtype)
        elif out.size != size or out.dtype != x.dtype:
            given = f"out has {out.size} elements of {out.dtype}"
            raise CommunicationError(f"{self.label}, {op}: {given}, expected {size} of {x.dtype}")
        return out, self._room(out, op)


def hierarchical_all_reduce(x: Array, inside: Communicator, across: Communicator, algorithm: str = "ring") -> Array:
    """Replace x by the sum over the ranks of both `levels`, each group's s ranks first, then the q groups.

    Sent per rank, with n bytes: 2n(s-1)/s inside and only 2(n/s)(q-1)/q across, in 2(s-1) + 2(q-1) messages. NB: what
    NCCL and Horovod call hierarchical. "ordered" gives the bits of one device that adds in the same nested order.
    """
    chunk = inside.reduce_scatter(x, algorithm=algorithm)
    across.all_reduce(chunk, algorithm=algorithm)
    return inside.all_gather(chunk, out=x, algorithm="pairwise")


def _combine(op: str) -> np.ufunc:
    if op not in COMBINE:
        raise UsageError(f'reduction "{op}": expected one of {", ".join(COMBINE)}')
    return COMBINE[op]


def _native(work: Work, *arguments: Any) -> Steps:
    """Run the library's own collective, algorithm "mpi", when it is the operation's turn."""
    yield (work.transport.native(work.op, work.tag, work, *arguments),)


def _copy_back(steps: Iterator[Iterable[Request]], host: np.ndarray, x: Array) -> Steps:
    """Run `steps` on the staged copy, then copy the result to the device."""
    yield from steps
    x[...] = from_host(host.reshape(x.shape))


def _alone(work: Work, flat: np.ndarray = NOTHING, out: Any = None, *_: Any) -> Steps:
    """Run a collective of one rank: copy the input to the output, where they differ."""
    if isinstance(out, np.ndarray):
        out[...] = flat
    yield ()
