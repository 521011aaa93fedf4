"""Hybrid sharding: a communicator in two levels, which data parallelism and ZeRO take as any other.

Seams of the core: the communicator, over whose `chunk_comm` a strategy cuts its buckets.
"""

from functools import partial
from typing import Any

from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.errors import check_divides


class HybridComm:
    """All d ranks of `comm`, whose reduce-scatter leaves each chunk on `replicas` of them.

        zero = mp.shard(model, HybridComm(world, replicas=2), stage)

    The d ranks are q replicas of s = d/q neighbouring ranks each. `chunk_comm` has the s ranks of
    this rank's replica; `across` has the q ranks, one of each replica, that hold the same chunk. A
    reduce-scatter of n bytes runs inside the replica; then an all-reduce of this rank's chunk, n/s
    bytes, runs across and sends 2 (n/s)(q-1)/q bytes more. A gather of parameters stays inside.
    UsageError if q does not divide d. NB: PyTorch's HYBRID_SHARD.
    """

    def __init__(self, comm: Communicator, replicas: int) -> None:
        check_divides(
            "ranks/replicas", comm.size, replicas, "each replica of the shards has as many ranks"
        )
        self.comm = comm
        self.chunk_comm, self.across = comm.split_into(replicas)

    def __getattr__(self, name: str) -> Any:
        """Return what all ranks have, such as `size` and `all_reduce`: the communicator's own."""
        return getattr(self.comm, name)

    def reduce_scatter(
        self, x: Array, *, out: Array, algorithm: str, async_op: bool = False
    ) -> "_TwoSums":
        """Start to reduce-scatter x inside; its end starts an all-reduce of `out` across."""
        first = self.chunk_comm.reduce_scatter(x, out=out, algorithm=algorithm, async_op=True)
        return _TwoSums(first, self.across, out, algorithm)

    def all_gather(self, chunk: Array, *, out: Array, algorithm: str, async_op: bool = False) -> Any:
        """Gather the chunks of this replica into `out`."""
        return self.chunk_comm.all_gather(chunk, out=out, algorithm=algorithm, async_op=async_op)


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
        """Wait until the result is there."""
        self.first.wait()
        assert self.second is not None, "the end of the first sum starts the second one"
        return self.second.wait()
