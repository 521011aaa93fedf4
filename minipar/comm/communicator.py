"""Communicator: a rank's place in a group, and what the group can do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minipar import backend
from minipar.backend import Array
from minipar.comm import gathers, reductions
from minipar.comm.chunks import chunk_bounds
from minipar.comm.clock import Clock, Network, make_clock
from minipar.comm.engine import Engine, Finished, Stream, Work, then
from minipar.comm.link import Link, Steps, WatchedLink
from minipar.comm.messages import Message
from minipar.comm.selection import choose
from minipar.comm.trace import Tracer
from minipar.comm.traffic import Traffic
from minipar.comm.transport import Transport
from minipar.errors import CommunicationError, UsageError

COMBINE = {"sum": np.add, "max": np.maximum}

ALL_REDUCE = {
    "ring": reductions.ring_all_reduce,
    "recursive_doubling": reductions.recursive_doubling_all_reduce,
    "recursive_halving": reductions.recursive_halving_all_reduce,
    "ordered": reductions.ordered_all_reduce,
}
REDUCE_SCATTER = {
    "ring": reductions.ring_reduce_scatter,
    "recursive_halving": reductions.recursive_halving_reduce_scatter,
    "ordered": reductions.ordered_reduce_scatter,
}
ALL_GATHER = {
    "ring": gathers.ring_all_gather,
    "recursive_doubling": gathers.recursive_doubling_all_gather,
    "pairwise": gathers.pairwise_all_gather,
}

# Tags. The user's are 0..USER_TAGS-1. Each operation takes a run of tags of its own, one per step; after TAGS of them
# the numbers come round again, long after the messages that used them have arrived.
USER_TAGS = 1 << 16
TAGS = 1 << 20

Result = Any  # the array, or with async_op the Work whose wait() returns it


class Communicator:
    """The ranks of one mesh axis (or of the whole world), seen from one of them.

    rank, size       this rank and their number, inside the group
    axis             the name under which traffic and trace record what happens here
    ranks            the world rank of each member
    traffic, tracer, clock    one each per rank, shared by all communicators split from the same world

    Collectives must be called by every rank of the group in the same order, with the same shapes and dtypes. They work
    on contiguous arrays of any dtype that NumPy can add, on the host; arrays of another module are staged through
    host memory. With `async_op=True` they return a Work at once; its arrays must be left alone until `work.wait()`.
    """

    def __init__(
        self,
        transport: Transport,
        axis: str = "world",
        *,
        clock: str | Clock | None = None,
        network: Network | None = None,
        parent: Communicator | None = None,
        ranks: list[int] | None = None,
        name: str = "world",
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.axis = axis
        self.name = name  # the same on every member, and no other group's
        self.ranks = list(range(self.size)) if ranks is None else ranks
        if parent is None:
            self.engine = Engine(transport)
            self.clock: Clock = make_clock(clock)
            self.network = network or Network()
            self.traffic = Traffic()
            self.tracer = Tracer(self.clock)
        else:
            self.engine = parent.engine
            self.clock = parent.clock
            self.network = parent.network
            self.traffic = parent.traffic
            self.tracer = parent.tracer
        self.stream_time = 0.0  # when the last operation here ended, on a logical clock
        self.message_numbers: dict[tuple[int, int, int], int] = {}  # for the arrows of a trace
        self._stream = Stream(self.engine)
        self._operations = 0
        self._steps_per_operation = 2 * self.size + 8
        self._splits = 0
        self._room = np.empty(0, np.uint8)
        self._scratch: dict[tuple[int, np.dtype], np.ndarray] = {}

    # -- two verbs ------------------------------------------------------------------------------------------------

    def isend(self, array: Array, dest: int, tag: int = 0) -> Message:
        """Start to send a contiguous array to a rank of the group; leave it alone until the Message is done.

        On the wire: array.nbytes bytes, counted as operation "send". Device arrays are copied to the host first.
        """
        host = self._point_to_point("send", array, dest, tag)
        return Message.send(self, host, dest, tag)

    def irecv(self, array: Array, source: int, tag: int = 0) -> Message:
        """Start to receive into a contiguous array; `wait()` returns it. A message of another size is an error."""
        host = self._point_to_point("recv", array, source, tag)
        return Message.receive(self, host, source, tag, array)

    def _point_to_point(self, op: str, array: Array, peer: int, tag: int) -> np.ndarray:
        if not 0 <= peer < self.size:
            raise ValueError(f"{self.title()}, {op}: rank {peer} is not one of the {self.size} ranks")
        if not 0 <= tag < USER_TAGS:
            raise ValueError(f"{self.title()}, {op}: tag {tag} is outside 0..{USER_TAGS - 1}")
        return self._flat(array, op)

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, x: Array, op: str = "sum", algorithm: str = "auto", async_op: bool = False) -> Result:
        """x becomes the sum (or the maximum) over all ranks, in place, any shape; returns x, or a Work.

        Sent per rank: 2n(p-1)/p bytes (ring, ordered, recursive_halving), n lg p (recursive_doubling); exactly, in
        `volume.wire_bytes`. "ordered" adds in rank order 0..p-1, as one device that accumulates would.
        """
        algorithm = choose("all_reduce", algorithm, x.nbytes)
        combine = _combine(op)
        if self.size == 1:
            return Finished(x) if async_op else x
        flat = self._flat(x, "all_reduce")
        link = self._link("all_reduce", algorithm)
        if algorithm == "mpi":
            steps = self._native(link, flat, op)
        else:
            steps = ALL_REDUCE[algorithm](link, flat, combine)
        if type(x) is not np.ndarray:
            steps = _copy_back(steps, flat, x)
        return self._run(link, steps, x, async_op)

    def reduce_scatter(
        self, x: Array, out: Array | None = None, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """out = chunk r (`chunk_bounds(n, p)[r]`) of the sum of all ranks' x; x, n elements, is left as it was.

        Sent per rank: all of x but one chunk, n(p-1)/p bytes. Returns out, or a Work.
        """
        algorithm = choose("reduce_scatter", algorithm, x.nbytes)
        combine = _combine(op)
        flat = self._flat(x, "reduce_scatter")
        bounds = chunk_bounds(flat.size, self.size)
        start, stop = bounds[self.rank]
        out, host_out = self._output("reduce_scatter", x, out, stop - start)
        link = self._link("reduce_scatter", algorithm)
        if self.size == 1:
            steps = _assign(host_out, flat)
        elif algorithm == "mpi":
            steps = self._native(link, flat, host_out, [b - a for a, b in bounds], op)
        else:
            steps = REDUCE_SCATTER[algorithm](link, flat, host_out, combine)
        return self._run(link, _copy_back(steps, host_out, out), out, async_op)

    def all_gather(
        self, chunk: Array, out: Array | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Result:
        """out = all ranks' chunks, one after the other; chunk r must have the size of `chunk_bounds(n, p)[r]`.

        Without `out` the chunks must be equal, and the result is a new flat array of p*chunk.size elements. `chunk` may
        be its own place in `out`. Sent per rank: n(p-1)/p bytes. Returns out, or a Work.
        """
        flat = self._flat(chunk, "all_gather")
        out, host_out = self._output("all_gather", chunk, out, flat.size * self.size if out is None else None)
        algorithm = choose("all_gather", algorithm, host_out.nbytes)
        bounds = chunk_bounds(host_out.size, self.size)
        start, stop = bounds[self.rank]
        if flat.size != stop - start:
            raise CommunicationError(
                f"{self.title()}, all_gather: {host_out.size} elements over {self.size} ranks give this rank "
                f"{stop - start}, but its chunk has {flat.size}"
            )
        own = host_out[start:stop]
        if own.__array_interface__["data"] != flat.__array_interface__["data"]:
            own[...] = flat
        link = self._link("all_gather", algorithm)
        steps: Steps
        if self.size == 1:
            steps = _nothing()
        elif algorithm == "mpi":
            steps = self._native(link, host_out, [b - a for a, b in bounds])
        else:
            steps = ALL_GATHER[algorithm](link, host_out)
        return self._run(link, _copy_back(steps, host_out, out), out, async_op)

    def all_to_all(self, x: Array, out: Array | None = None, algorithm: str = "auto", async_op: bool = False) -> Result:
        """Chunk j of x goes to rank j; out holds in rank order what each rank sent here: p chunks of this rank's size.

        Sent per rank: all of x but the own chunk, n(p-1)/p bytes. Returns out, or a Work.
        """
        algorithm = choose("all_to_all", algorithm, x.nbytes)
        flat = self._flat(x, "all_to_all")
        bounds = chunk_bounds(flat.size, self.size)
        own = bounds[self.rank][1] - bounds[self.rank][0]
        out, host_out = self._output("all_to_all", x, out, self.size * own)
        link = self._link("all_to_all", algorithm)
        if self.size == 1:
            steps = _assign(host_out, flat)
        elif algorithm == "mpi":
            steps = self._native(link, flat, [b - a for a, b in bounds], host_out, own)
        else:
            steps = gathers.pairwise_all_to_all(link, flat, host_out)
        return self._run(link, _copy_back(steps, host_out, out), out, async_op)

    def broadcast(self, x: Array, root: int = 0, algorithm: str = "auto", async_op: bool = False) -> Result:
        """x of `root` to every rank, in place. Sent: up to lg p times n bytes by the root, n(p-1) in all."""
        algorithm = choose("broadcast", algorithm, x.nbytes)
        if not 0 <= root < self.size:
            raise ValueError(f"{self.title()}, broadcast: root {root} is not one of the {self.size} ranks")
        if self.size == 1:
            return Finished(x) if async_op else x
        flat = self._flat(x, "broadcast")
        link = self._link("broadcast", algorithm)
        if algorithm == "mpi":
            steps = self._native(link, flat, root)
        else:
            steps = gathers.binomial_broadcast(link, flat, root)
        return self._run(link, _copy_back(steps, flat, x), x, async_op)

    def barrier(self, algorithm: str = "auto") -> None:
        """Return when every rank of the group has come here. ceil(lg p) empty messages."""
        algorithm = choose("barrier", algorithm, 0)
        if self.size > 1:
            link = self._link("barrier", algorithm)
            steps = self._native(link) if algorithm == "mpi" else gathers.dissemination_barrier(link)
            self._run(link, steps, None, False)

    # -- control data: small, and outside the clocks and the trace --------------------------------------------------

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank. Counted as operation "control"."""
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(data)
        self._control(lambda link: gathers.ring_all_gather(link, lengths))
        stops = np.cumsum(lengths)
        bounds = [(int(stop - length), int(stop)) for stop, length in zip(stops, lengths, strict=True)]
        everything = np.empty(int(lengths.sum()), np.uint8)
        everything[slice(*bounds[self.rank])] = np.frombuffer(data, np.uint8)
        self._control(lambda link: gathers.ring_all_gather(link, everything, bounds))
        return [everything[start:stop].tobytes() for start, stop in bounds]

    def gather_bytes(self, data: bytes, root: int = 0) -> list[bytes] | None:
        """Every rank's bytes on `root`, in rank order; None elsewhere. Counted as operation "control"."""
        lengths = [int(length) for length in self.all_gather_bytes(str(len(data)).encode())]
        rooms = [np.empty(length, np.uint8) for length in lengths]
        rooms[self.rank][...] = np.frombuffer(data, np.uint8)
        self._control(lambda link: gathers.gather(link, rooms, root))
        return [room.tobytes() for room in rooms] if self.rank == root else None

    def agree(self, error: str | None = None) -> None:
        """If any rank of the group passes an error, every rank raises it as UsageError: the lowest rank's, once.

        For checks that one rank alone can fail (a file that only one host lacks): raising there alone would leave the
        others waiting.
        """
        for text in self.all_gather_bytes((error or "").encode()):
            if text:
                raise UsageError(text.decode())

    def split(self, color: int | None, axis: str) -> Communicator | None:
        """The ranks that pass the same color become a group of their own, in rank order. None for color None."""
        self._splits += 1
        colors = self.all_gather_bytes(str(color).encode())
        if color is None:
            return None
        members = [rank for rank in range(self.size) if colors[rank] == colors[self.rank]]
        name = f"{self.name}/{self._splits}.{axis}{color}"
        ranks = [self.ranks[rank] for rank in members]
        return Communicator(self.transport.group(members, name), axis, parent=self, ranks=ranks, name=name)

    def progress(self) -> None:
        """Advance outstanding asynchronous work of all this rank's communicators, without waiting."""
        if self.engine.streams:
            now = self.clock.now()
            self.engine.progress()
            self.clock.resume(now)

    def abort(self, code: int = 1) -> None:
        """End every rank of the job now."""
        self.transport.abort(code)

    # -- machinery ------------------------------------------------------------------------------------------------

    def title(self) -> str:
        """This rank, for error messages."""
        if self.axis == "world":
            return f"rank {self.rank}"
        return f"rank {self.rank} of axis {self.axis} (world rank {self.ranks[self.rank]})"

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Room for `count` elements. There is one such room: operations on a communicator run one after the other."""
        key = (count, dtype)
        found = self._scratch.get(key)
        if found is None:
            nbytes = count * dtype.itemsize
            if nbytes > self._room.nbytes or len(self._scratch) >= 64:
                self._room = np.empty(max(nbytes, self._room.nbytes), np.uint8)
                self._scratch.clear()
            found = self._scratch[key] = self._room[:nbytes].view(dtype)
        return found

    def _link(self, op: str, algorithm: str) -> Link:
        self._operations = number = self._operations + 1
        tag = USER_TAGS + number * self._steps_per_operation % TAGS
        if self.clock.logical or self.tracer.enabled:
            return WatchedLink(self, op, algorithm, tag, number)
        return Link(self, op, algorithm, tag, number)

    def _run(self, link: Link, steps: Steps, result: Any, async_op: bool) -> Result:
        if isinstance(link, WatchedLink):
            steps = link.follow(steps)
        if async_op or self._stream.queue:
            work = Work(self._stream, link, steps, result)
            self._stream.add(work)
            if not async_op:
                return work.wait()
            if isinstance(link, WatchedLink):
                self.clock.resume(link.called)
            return work
        if isinstance(link, WatchedLink):
            self.engine.drive(steps)
            self.clock.resume(max(link.called, link.time))
        else:
            link.alone = not self.engine.streams
            self.engine.drive(steps)
        return result

    def _control(self, make: Callable[[Link], Steps]) -> None:
        """Run steps that no clock and no trace sees."""
        if self.size == 1:
            return
        now = self.clock.now()
        self._operations = number = self._operations + 1
        tag = USER_TAGS + number * self._steps_per_operation % TAGS
        link = Link(self, "control", "ring", tag, number)
        work = Work(self._stream, link, make(link), None)
        self._stream.add(work)
        work.wait()
        self.clock.resume(now)

    def _native(self, link: Link, *arguments: Any) -> Steps:
        """The library's own collective as an algorithm of one step."""
        request = self.transport.native(link.op, link, *arguments)
        yield (request,)

    def _flat(self, x: Array, op: str) -> np.ndarray:
        """The numbers of x as a flat host array: x's own memory, or for a device array a copy."""
        if type(x) is np.ndarray:
            if not x.flags.c_contiguous:
                raise ValueError(f"{self.title()}, {op}: an array of shape {x.shape} is not contiguous; send a copy")
            return x.reshape(-1)
        return np.ascontiguousarray(backend.to_host(x)).reshape(-1)

    def _output(self, op: str, x: Array, out: Array | None, size: int | None) -> tuple[Array, np.ndarray]:
        """The array for a result and the flat host array behind it; `size` elements are expected (None: any number)."""
        if out is None:
            assert size is not None
            out = np.empty(size, x.dtype) if backend.is_host(x) else backend.xp.empty(size, dtype=x.dtype)
        elif (size is not None and out.size != size) or out.dtype != x.dtype:
            raise CommunicationError(
                f"{self.title()}, {op}: out has {out.size} elements of {out.dtype}, expected {size} of {x.dtype}"
            )
        return out, self._flat(out, op)


def _combine(op: str) -> Callable[..., Any]:
    if op not in COMBINE:
        raise UsageError(f'reduction "{op}": expected one of {", ".join(COMBINE)}')
    return COMBINE[op]


def _copy_back(steps: Steps, host: np.ndarray, x: Array) -> Steps:
    """`steps` on the staged copy, then the copy back to the device; `steps` alone when x is a host array."""
    if backend.is_host(x):
        return steps

    def copy() -> None:
        x[...] = backend.from_host(host.reshape(x.shape))

    return then(steps, copy)


def _nothing() -> Steps:
    yield ()


def _assign(out: np.ndarray, x: np.ndarray) -> Steps:
    out[...] = x
    yield ()
