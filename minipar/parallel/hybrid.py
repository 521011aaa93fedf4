"""Communicators for gradients: one sums on two levels of ranks, one sums in another dtype.

A strategy starts the sum of a bucket's gradients by one call of its GradientComm, which is one of:

- a Communicator, which sums over all its ranks;
- a HybridComm, which sums within a replica of the shards, then over the replicas (hybrid sharding);
- a CastingComm around one of these, which sends and sums values in another dtype, such as bfloat16.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

from numpy.typing import DTypeLike

from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator, Result
from minipar.comm.work import Work
from minipar.memory import hold
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter


class Pending(Protocol):
    """An operation that has started: a Work, or one of the classes below that wrap a Work."""

    def wait(self) -> Array:
        """Wait until the result is there."""


class GradientComm(Protocol):
    """The collectives that a bucket starts. A Communicator has them, and so have the classes below.

    Each call starts one and returns at once.
    """

    rank: int
    size: int

    def all_reduce(self, x: Array, *, algorithm: str, async_op: Literal[True]) -> Pending:
        """Sum x over the ranks, in place."""

    def reduce_scatter(self, x: Array, *, out: Array, algorithm: str, async_op: Literal[True]) -> Pending:
        """Sum x over the ranks, and write this rank's chunk of the sum into `out`."""

    def all_gather(self, chunk: Array, *, out: Array, algorithm: str, async_op: Literal[True]) -> Pending:
        """Gather the chunks of all ranks into `out`."""


class HybridComm:
    """The ranks of one replica of the shards, whose reduce-scatter sums over all replicas.

    The d ranks are q replicas of s = d/q neighbouring ranks each. `inside` has the s ranks of this
    replica; `across` has the q ranks, one of each replica, that hold the same chunk. A
    reduce-scatter of n bytes runs inside; then an all-reduce of this rank's chunk, n/s bytes, runs
    across and sends 2 (n/s)(q-1)/q bytes more. NB: PyTorch's HYBRID_SHARD.
    """

    def __init__(self, comm: Communicator, replicas: int) -> None:
        self.inside, self.across = comm.split_into(replicas)
        self.rank = self.inside.rank
        self.size = self.inside.size

    def all_reduce(self, x: Array, *, algorithm: str, async_op: bool = False) -> Result:
        """Sum x over the ranks of this replica alone: the other replicas hold the same chunks."""
        return self.inside.all_reduce(x, algorithm=algorithm, async_op=async_op)

    def reduce_scatter(self, x: Array, *, out: Array, algorithm: str, async_op: Literal[True]) -> Pending:
        """Start to reduce-scatter x inside; its end starts an all-reduce of `out` across."""
        first = self.inside.reduce_scatter(x, out=out, algorithm=algorithm, async_op=async_op)
        return _TwoSums(first, self.across, out, algorithm)

    def all_gather(self, chunk: Array, *, out: Array, algorithm: str, async_op: Literal[True]) -> Pending:
        """Gather the chunks of this replica into `out`."""
        return self.inside.all_gather(chunk, out=out, algorithm=algorithm, async_op=async_op)


class _TwoSums:
    """A reduce-scatter, followed by an all-reduce of its result. The end of the first starts the second."""

    def __init__(self, first: Work, across: Communicator, chunk: Array, algorithm: str) -> None:
        self.first = first
        self.second: Work | None = None  # None until the first one has ended
        self.start = partial(across.all_reduce, chunk, algorithm=algorithm, async_op=True)
        first.then(self._start_second)

    def _start_second(self) -> None:
        self.second = self.start()

    def wait(self) -> Array:
        self.first.wait()
        assert self.second is not None, "the end of the first sum starts the second one"
        return self.second.wait()


class CastingComm:
    """The ranks of `comm`, over which gradients travel and are summed in `dtype`."""

    def __init__(self, comm: GradientComm, dtype: DTypeLike) -> None:
        self.comm = comm
        self.dtype = dtype
        self.rank = comm.rank
        self.size = comm.size

    def all_reduce(self, x: Array, *, algorithm: str, async_op: Literal[True]) -> Pending:
        """Start to sum x over the ranks; the sum is in x after `wait`."""
        wire = x.astype(self.dtype)
        hold("gradients", wire)  # this copy of all gradients lives until they are summed
        work = self.comm.all_reduce(wire, algorithm=algorithm, async_op=async_op)
        return _CastBack(work, wire, x)

    def reduce_scatter(self, x: Array, *, out: Array, algorithm: str, async_op: Literal[True]) -> Pending:
        """Start to sum x over the ranks; this rank's chunk of the sum is in `out` after `wait`."""
        wire = x.astype(self.dtype)
        chunk = xp.empty(out.shape, dtype=self.dtype)
        hold("buffers", wire, chunk)
        work = self.comm.reduce_scatter(wire, out=chunk, algorithm=algorithm, async_op=async_op)
        return _CastBack(work, chunk, out)

    def all_gather(self, chunk: Array, *, out: Array, algorithm: str, async_op: Literal[True]) -> Pending:
        """Gather parameters, which keep their dtype."""
        return self.comm.all_gather(chunk, out=out, algorithm=algorithm, async_op=async_op)


class _CastBack:
    """A sum in another dtype. `wait` casts its result, `wire`, back into `target`."""

    def __init__(self, work: Pending, wire: Array, target: Array) -> None:
        self.work = work
        self.wire = wire
        self.target = target

    def wait(self) -> Array:
        self.work.wait()
        self.target[...] = self.wire
        return self.target


def in_dtype(comm: GradientComm, dtype: DTypeLike | None, gradient_dtype: DTypeLike) -> GradientComm:
    """Return a communicator that sums gradients in `dtype`; None means their own, `gradient_dtype`."""
    if dtype is None or xp.dtype(dtype) == xp.dtype(gradient_dtype):
        return comm
    return CastingComm(comm, dtype)


def over_shards(comm: Communicator, replicas: int) -> Communicator | HybridComm:
    """Return the ranks that keep one chunk of a bucket each: all of `comm`, or those of this replica."""
    return comm if replicas == 1 else HybridComm(comm, replicas)


def replicas_of_shards(
    comm: Communicator | HybridComm, shards: Sequence[Parameter]
) -> list[tuple[Communicator, Sequence[Parameter]]]:
    """Return the ranks that hold the same shards, and these shards. Without replicas the list is empty."""
    return [(comm.across, shards)] if isinstance(comm, HybridComm) else []


def set_gradient_dtype(model: Module, dtype: DTypeLike | None) -> DTypeLike:
    """Let the model's gradients have `dtype`, by default float32 at least. Return it."""
    if dtype is None:
        dtype = xp.promote_types(model.parameters()[0].dtype, "float32")
    for p in model.parameters():
        for leaf in (p, *p.ties):
            leaf.grad_dtype = dtype
    return dtype
