"""Sums in another dtype: a communicator that casts, which data parallelism and ZeRO take as any other.

Seams of the core: the communicator.
"""

from typing import Any

from numpy.typing import DTypeLike

from minipar.backend import Array, xp
from minipar.memory import hold


class CastingComm:
    """The ranks of `comm`, over which float32 gradients travel and are summed in `dtype`, such as bfloat16.

        zero = mp.shard(model, CastingComm(world, "bfloat16"), stage)

    `comm` is a Communicator or a HybridComm. Arrays of other dtypes, such as the float64 sums of
    losses and norms, travel as they are, and so do parameters.
    """

    def __init__(self, comm: Any, dtype: DTypeLike) -> None:
        self.comm = comm
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        """Return what is not cast, such as `size` and `all_gather`: the communicator's own."""
        return getattr(self.comm, name)

    def all_reduce(self, x: Array, *, algorithm: str, async_op: bool = False) -> Any:
        """Sum x over the ranks, in place."""
        if x.dtype != "float32":
            return self.comm.all_reduce(x, algorithm=algorithm, async_op=async_op)
        wire = x.astype(self.dtype)
        hold("gradients", wire)  # this copy of all gradients lives until they are summed
        work = _CastBack(self.comm.all_reduce(wire, algorithm=algorithm, async_op=True), wire, x)
        return work if async_op else work.wait()

    def reduce_scatter(self, x: Array, *, out: Array, algorithm: str, async_op: bool = False) -> Any:
        """Sum x over the ranks, and write this rank's chunk of the sum into `out`."""
        if x.dtype != "float32":
            return self.comm.reduce_scatter(x, out=out, algorithm=algorithm, async_op=async_op)
        wire = x.astype(self.dtype)
        chunk = xp.empty(out.shape, dtype=self.dtype)
        hold("buffers", wire, chunk)
        work = self.comm.reduce_scatter(wire, out=chunk, algorithm=algorithm, async_op=True)
        back = _CastBack(work, chunk, out)
        return back if async_op else back.wait()


class _CastBack:
    """A sum in another dtype. `wait` casts its result, `wire`, back into `target`."""

    def __init__(self, work: Any, wire: Array, target: Array) -> None:
        self.work = work
        self.wire = wire
        self.target = target

    def wait(self) -> Array:
        """Wait until the result is there, in the gradients' own dtype."""
        self.work.wait()
        self.target[...] = self.wire
        return self.target
