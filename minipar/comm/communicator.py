"""Communicator: what the ranks of a group can do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.backend import Array
from minipar.comm import gathers, reductions
from minipar.comm.chunks import chunk_bounds
from minipar.comm.engine import Finished
from minipar.comm.group import USER_TAGS, Group, Result, assign, copy_back, nothing
from minipar.comm.link import Steps
from minipar.comm.messages import Message
from minipar.comm.selection import choose
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


class Communicator(Group):
    """The ranks of one mesh axis (or of the whole world), seen from one of them.

    rank, size       this rank and their number, inside the group
    axis             the name under which traffic and trace record what happens here
    ranks            the world rank of each member
    traffic, tracer, clock    one each per rank, shared by all communicators split from the same world

    Collectives must be called by every rank of the group in the same order, with the same shapes and dtypes. They work
    on contiguous arrays of any dtype that NumPy can add, on the host; arrays of another module are staged through
    host memory. With `async_op=True` they return a Work at once; its arrays must be left alone until `work.wait()`.
    """

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
            steps = copy_back(steps, flat, x)
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
            steps = assign(host_out, flat)
        elif algorithm == "mpi":
            steps = self._native(link, flat, host_out, [b - a for a, b in bounds], op)
        else:
            steps = REDUCE_SCATTER[algorithm](link, flat, host_out, combine)
        return self._run(link, copy_back(steps, host_out, out), out, async_op)

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
            steps = nothing()
        elif algorithm == "mpi":
            steps = self._native(link, host_out, [b - a for a, b in bounds])
        else:
            steps = ALL_GATHER[algorithm](link, host_out)
        return self._run(link, copy_back(steps, host_out, out), out, async_op)

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
            steps = assign(host_out, flat)
        elif algorithm == "mpi":
            steps = self._native(link, flat, [b - a for a, b in bounds], host_out, own)
        else:
            steps = gathers.pairwise_all_to_all(link, flat, host_out)
        return self._run(link, copy_back(steps, host_out, out), out, async_op)

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
        return self._run(link, copy_back(steps, flat, x), x, async_op)

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
        return self._among([rank for rank in range(self.size) if colors[rank] == colors[self.rank]], axis)

    def row(self, members: list[int], axis: str) -> Communicator:
        """The group of these ranks, this one among them, in this order. Nothing is sent: every rank must call it as
        often as the others, and each member with the same list.
        """
        self._splits += 1
        return self._among(members, axis)

    def _among(self, members: list[int], axis: str) -> Communicator:
        name = f"{self.name}/{self._splits}.{axis}{members[0]}"
        ranks = [self.ranks[rank] for rank in members]
        return Communicator(self.transport.group(members, name), axis, parent=self, ranks=ranks, name=name)


def _combine(op: str) -> Callable[..., Any]:
    if op not in COMBINE:
        raise UsageError(f'reduction "{op}": expected one of {", ".join(COMBINE)}')
    return COMBINE[op]
