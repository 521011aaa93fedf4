"""Communicator: the operations of the ranks of a group."""

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minipar.backend import Array, from_host, is_host, to_host, xp
from minipar.comm.algorithms import GENERATORS, bounds_of, chunks, pairwise_all_to_all, ring_all_gather
from minipar.comm.guards import check_array, check_counts
from minipar.comm.operation import COMBINE, USER_TAGS, Operation
from minipar.comm.trace import TimedLink, TimedWork
from minipar.comm.transport import Link, Steps
from minipar.comm.work import CountedLink, Stream, Work
from minipar.errors import CommunicationError, UsageError

ALGORITHMS: dict[str, tuple[str, ...]] = {}  # the names of each operation's
for _op, _name in GENERATORS:
    ALGORITHMS[_op] = (*ALGORITHMS.get(_op, ()), _name)

FEW_STEPS_BELOW = 256 * 1024  # bytes of the whole array
AUTO = {  # by operation: the algorithm for arrays below that size, and from there on
    "all_reduce": ("recursive_doubling", "ordered"),
    "reduce_scatter": ("recursive_halving", "ordered"),
    "all_gather": ("recursive_doubling", "pairwise"),
}
NOTHING = np.empty(0, np.uint8)  # the array of operations that have none, or change none
CONTROL = Operation("control", "ring", input=NOTHING, output=NOTHING)

Counts = tuple[Sequence[int], Sequence[int]] | None
Result = Any  # the array, or with async_op the Work whose wait() returns it


def choose(op: str, algorithm: str, nbytes: int) -> str:
    """Return the algorithm to run. UsageError for a name that the operation does not have.

    "auto" is an algorithm of few messages (lg p) below FEW_STEPS_BELOW bytes of the whole array, and
    above it one of few bytes (n(p-1)/p each way) and few waits. Any other name is obeyed at any
    size, so DP and ZeRO with "ring" agree bit for bit.
    """
    if algorithm == "auto":
        first = ALGORITHMS[op][0]
        small, large = AUTO.get(op, (first, first))
        return small if nbytes < FEW_STEPS_BELOW else large
    if algorithm in ALGORITHMS[op]:
        return algorithm
    problem = f'{op}: algorithm "{algorithm}"'
    if algorithm == "mpi":
        problem += " (MPI's own collectives are measured by python -m minipar.bench collectives)"
    raise UsageError(f"{problem}: expected auto, {', '.join(ALGORITHMS[op])}")


def steps_of(link: Link, operation: Operation) -> Steps:
    """Return the messages of an operation: those of its algorithm, or none on a rank that is alone."""
    if link.size == 1:
        if operation.output is not operation.input:
            operation.output[...] = operation.input
        return iter(())
    generator = GENERATORS[operation.name, operation.algorithm]
    match operation.name:
        case "barrier":
            return generator(link)
        case "all_reduce":
            return generator(link, operation.output, operation.combine)
        case "reduce_scatter":
            return generator(link, operation.input, operation.output, operation.combine)
        case "all_gather":
            return generator(link, operation.output)
        case "all_to_all":
            return generator(link, operation.input, operation.output, operation.sends, operation.receives)
        case _:
            return generator(link, operation.output, operation.root)


class Communicator(Stream):
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

    @property
    def chunk_comm(self) -> "Communicator":
        """The ranks over which ZeRO cuts a bucket into chunks: these. A communicator in two levels has others."""
        return self

    def progress(self) -> None:
        """Advance outstanding asynchronous work of all this rank's communicators, without waiting."""
        if self.engine.streams:
            now = self.clock.now()
            self.engine.progress()
            self.clock.resume(now)

    def isend(self, array: Array, dest: int, tag: int = 0) -> Work:
        """Start to send a contiguous array, counted as operation "send".

        Leave it alone until the Work is done.
        """
        host = self._flat(array, "send")
        work = self._message("send", dest, tag)
        work.begin(iter([(work.link.isend(host, dest),)]), None)
        return work

    def irecv(self, array: Array, source: int, tag: int = 0) -> Work:
        """Start to receive into a contiguous array.

        `wait()` returns it. A message of another size is an error.
        """
        host = self._room(array, "recv")
        work = self._message("recv", source, tag)
        work.begin(iter([(work.link.irecv(host, source),)]), array)
        if type(array) is not np.ndarray:
            work.then(partial(_copy_back, host, array))
        return work

    def _message(self, name: str, peer: int, tag: int) -> Work:
        """Return the Work of one message between users."""
        if not 0 <= peer < self.size:
            raise ValueError(f"{self.label}, {name}: rank {peer} is not one of the {self.size} ranks")
        if not 0 <= tag < USER_TAGS:
            raise ValueError(f"{self.label}, {name}: tag {tag} is outside 0..{USER_TAGS - 1}")
        return self._work(name, "", tag, is_message=True)

    def all_reduce(
        self, x: Array, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """Replace x, of any shape, by the sum (or the maximum) over all ranks. Return x, or a Work.

        Sent per rank: 2n(p-1)/p bytes, n lg p by recursive_doubling. "ordered" adds in rank order,
        as one device does.
        """
        flat = self._flat(x, "all_reduce") if self.size > 1 else NOTHING
        operation = Operation("all_reduce", algorithm, input=flat, output=flat, combine=_combine(op))
        return self._issue(operation, x, async_op)

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
        flat = self._flat(x, "reduce_scatter")
        out, host = self._output("reduce_scatter", x, out, chunks(flat, self.size)[self.rank].size)
        operation = Operation("reduce_scatter", algorithm, input=flat, output=host, combine=_combine(op))
        return self._issue(operation, out, async_op)

    def all_gather(
        self, chunk: Array, out: Array | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """Set out = all ranks' chunks in rank order.

        Chunk r must have the size of `chunk_bounds(n, p)[r]`.

        Without `out` the chunks must be equal; the result is a new flat array. `chunk` may be its
        own part of `out`. Sent per rank: n(p-1)/p bytes. Return out, or a Work.
        """
        flat = self._flat(chunk, "all_gather")
        size = flat.size * self.size if out is None else out.size
        out, host = self._output("all_gather", chunk, out, size)
        own = chunks(host, self.size)[self.rank]
        if flat.size != own.size:
            given = f"{host.size} elements over {self.size} ranks give this rank {own.size}"
            raise CommunicationError(f"{self.label}, all_gather: {given}, but its chunk has {flat.size}")
        own[...] = flat  # NumPy copies nothing where the two are the same memory
        operation = Operation("all_gather", algorithm, input=host, output=host)
        return self._issue(operation, out, async_op)

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
        flat = self._flat(x, "all_to_all")
        sends = None
        receives = None
        size = self.size * chunks(flat, self.size)[self.rank].size
        if counts is not None:
            check_counts(self.label, self.rank, self.size, counts, flat.size)
            sends = bounds_of(counts[0])
            receives = bounds_of(counts[1])
            size = receives[-1][1]
        out, host = self._output("all_to_all", x, out, size)
        operation = Operation(
            "all_to_all", algorithm, input=flat, output=host, sends=sends, receives=receives
        )
        return self._issue(operation, out, async_op)

    def broadcast(self, x: Array, root: int = 0, algorithm: str = "auto", async_op: bool = False) -> Result:
        """Copy x of `root` to every rank, in place.

        Sent: n bytes per child in a binomial tree, n(p-1) in all.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"{self.label}, broadcast: root {root} is not one of the {self.size} ranks")
        flat = self._flat(x, "broadcast") if self.size > 1 else NOTHING
        operation = Operation("broadcast", algorithm, input=flat, output=flat, root=root)
        return self._issue(operation, x, async_op)

    def barrier(self, algorithm: str = "auto") -> None:
        """Return when every rank of the group has called. Sent: ceil(lg p) empty messages."""
        operation = Operation("barrier", algorithm, input=NOTHING, output=NOTHING)
        self._issue(operation, None, async_op=False)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order.

        Operation "control": no clock and no trace sees it.
        """
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
        for text in texts:
            if text:
                raise UsageError(text.decode())

    def split(self, color: int | None, axis: str) -> "Communicator | None":
        """Make a group of the ranks that pass the same color, in rank order.

        None for color None.
        """
        colors = self.all_gather_bytes(str(color).encode())
        members = [rank for rank in range(self.size) if colors[rank] == colors[self.rank]]
        group = self.row(members, axis)  # Also for None, because every rank must call `row` as often.
        return None if color is None else group

    def row(self, members: list[int], axis: str) -> "Communicator":
        """Make the group of these ranks, this one among them, in this order, without sending anything.

        Every rank must call it as often as the others, and each member with the same list.
        """
        self.rows += 1
        name = f"{self.name}/{self.rows}.{axis}{members[0]}"
        return Communicator(self.transport.group(members, name), axis, parent=self)

    def levels(self, hosts: int, axis: str | None = None) -> tuple["Communicator", "Communicator"]:
        """Cut the ranks into `hosts` groups of neighbours.

        Make this rank's, and the ranks with the same local rank in all groups.

        The first may have an axis of its own. UsageError if the groups would not be equal.
        """
        if hosts < 1 or self.size % hosts:
            raise UsageError(f"{self.label}: {self.size} ranks / {hosts} groups is not a whole number")
        near = self.size // hosts
        local_rank = self.rank % near
        first = self.rank - local_rank
        inside = self.row(list(range(first, first + near)), axis or self.axis)
        return inside, self.row(list(range(local_rank, self.size, near)), self.axis)

    def _issue(self, operation: Operation, result: Array | None, async_op: bool) -> Result:
        """Put an operation into the queue. Return its Work, or wait for it and return its result.

        Its algorithm may still be "auto". `result` is the output, or the device array for the
        output's values.
        """
        operation.algorithm = choose(operation.name, operation.algorithm, operation.input.nbytes)
        work = self._work(operation.name, operation.algorithm, self.next_tag(operation))
        work.begin(steps_of(work.link, operation), result)
        if type(result) is not np.ndarray and operation.output is not NOTHING:
            work.then(partial(_copy_back, operation.output, result))
        if not async_op:
            return work.wait()
        self.engine.unwaited[work] = _calling_line()
        work.drive(to_end=False)
        return work

    def _work(self, name: str, algorithm: str, tag: int, is_message: bool = False) -> Work:
        """Make the Work of an operation or a message.

        It is a TimedWork on a logical clock, or while a trace is recorded.
        """
        link = CountedLink(self, name, algorithm, tag)
        if self.clock.logical or self.tracer.enabled:
            return TimedWork(TimedLink(link, is_message))
        return Work(self, link, is_message)

    def _control(self, generator: Callable[..., Steps], *arguments: Any) -> None:
        """Run an operation that no clock and no trace sees."""
        now = self.clock.now()
        work = Work(self, CountedLink(self, "control", "ring", self.next_tag(CONTROL)))
        work.begin(generator(work.link, *arguments), None)
        work.wait()
        self.clock.resume(now)

    def _flat(self, x: Array, op: str) -> np.ndarray:
        """Return the values of x as a flat host array: x's own memory, or a copy of a device array."""
        check_array(self.label, op, x)
        if type(x) is np.ndarray:
            if not x.flags.c_contiguous:
                raise ValueError(
                    f"{self.label}, {op}: an array of shape {x.shape} is not contiguous; send a copy"
                )
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


def _combine(op: str) -> np.ufunc:
    if op not in COMBINE:
        raise UsageError(f'reduction "{op}": expected one of {", ".join(COMBINE)}')
    return COMBINE[op]


def _copy_back(host: np.ndarray, x: Array) -> None:
    """Copy a result to the device."""
    x[...] = from_host(host.reshape(x.shape))


def _calling_line() -> str:
    """Return the line outside of this package that called the operation."""
    for frame, line in traceback.walk_stack(None):
        if not frame.f_globals["__name__"].startswith("minipar.comm."):
            return f"{frame.f_code.co_filename}:{line}"
    raise AssertionError("some program has called it")
