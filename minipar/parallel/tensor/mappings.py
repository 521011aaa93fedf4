"""The mappings at the border between what every tensor-parallel rank holds whole and what each holds a part of.

Each is an autograd Function whose backward is the adjoint of its forward: where forward sums over ranks, backward
copies; where forward copies, backward sums. t ranks, an activation of n = B*T*h elements.

    mapping          forward          backward         elements sent per rank    in Megatron-LM
    copy_to          nothing          all-reduce       2n(t-1)/t, backward       f, copy_to_tensor_model_parallel_region
    reduce_from      all-reduce       nothing          2n(t-1)/t, forward        g, reduce_from_...
    scatter_to       own part         all-gather       n(t-1)/t, backward        scatter_to_...
    gather_from      all-gather       own part         n(t-1)/t, forward         gather_from_...
    all_gather       all-gather       reduce-scatter   n(t-1)/t each way         gather_from_sequence_parallel_region
    reduce_scatter   reduce-scatter   all-gather       n(t-1)/t each way         reduce_scatter_to_sequence_...

Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipar.autograd import Function, Tensor
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.parallel.placement import Shard

# A gather adds nothing, so its algorithm is not a matter of bits: the one that goes with the reduction.
GATHER = {"ring": "ring", "ordered": "pairwise"}


class TensorGroup:
    """The ranks that share each layer: their communicator and the algorithm ("ring" or "ordered") of their sums."""

    def __init__(self, comm: Communicator, reduction: str = "ring") -> None:
        self.comm, self.reduction = comm, reduction
        self.rank, self.size = comm.rank, comm.size

    @staticmethod
    def of(group: Communicator | TensorGroup) -> TensorGroup:
        """Return a TensorGroup of a communicator (with ring sums), or the group itself."""
        return group if isinstance(group, TensorGroup) else TensorGroup(group)

    def shard(self, dim: int, size: int, groups: int = 1) -> Shard:
        """Return the placement of a parameter of which each rank holds a part along `dim`, `size` long in all."""
        return Shard(self.rank, self.size, dim, size, groups)

    def sum(self, x: Array) -> Array:
        """A new array: x summed over the ranks."""
        return self.start_sum(x)()

    def start_sum(self, x: Array) -> Callable[[], Array]:
        """Start `sum`; the call that is returned waits for it."""
        return self.comm.all_reduce(xp.array(x, order="C"), algorithm=self.reduction, async_op=True).wait

    def part(self, x: Array, dim: int) -> Array:
        """This rank's part of x, a view; `dim` must divide."""
        size = x.shape[dim] // self.size
        return x[(slice(None),) * dim + (slice(self.rank * size, (self.rank + 1) * size),)]

    def gather(self, x: Array, dim: int) -> Array:
        """All ranks' parts, of one shape, joined along `dim`."""
        parts = self.comm.all_gather(xp.ascontiguousarray(x), algorithm=GATHER[self.reduction])
        return xp.concatenate(list(parts.reshape(self.size, *x.shape)), axis=dim)

    def sum_part(self, x: Array, dim: int) -> Array:
        """This rank's part, along `dim`, of the sum of x over the ranks."""
        return self.start_sum_part(x, dim)()

    def start_sum_part(self, x: Array, dim: int) -> Callable[[], Array]:
        """Start `sum_part`; the call that is returned waits for it."""
        parts = xp.stack(xp.split(x, self.size, axis=dim))  # each part contiguous, one after the other
        work = self.comm.reduce_scatter(parts, algorithm=self.reduction, async_op=True)
        return lambda: work.wait().reshape(parts.shape[1:])


class _CopyTo(Function):
    def forward(self, x: Array, group: TensorGroup) -> Array:
        self.group = group
        return x

    def backward(self, grad: Array) -> Any:
        return self.group.sum(grad), None


class _ReduceFrom(Function):
    def forward(self, x: Array, group: TensorGroup) -> Array:
        return group.sum(x)

    def backward(self, grad: Array) -> Any:
        return grad, None


class _ScatterTo(Function):
    def forward(self, x: Array, group: TensorGroup, dim: int) -> Array:
        self.group, self.dim = group, dim
        return group.part(x, dim).copy()

    def backward(self, grad: Array) -> Any:
        return self.group.gather(grad, self.dim), None, None


class _GatherFrom(Function):
    def forward(self, x: Array, group: TensorGroup, dim: int) -> Array:
        self.group, self.dim = group, dim
        return group.gather(x, dim)

    def backward(self, grad: Array) -> Any:
        return self.group.part(grad, self.dim), None, None


class _AllGather(Function):
    def forward(self, x: Array, group: TensorGroup, dim: int) -> Array:
        self.group, self.dim = group, dim
        return group.gather(x, dim)

    def backward(self, grad: Array) -> Any:
        return self.group.sum_part(grad, self.dim), None, None


class _ReduceScatter(Function):
    def forward(self, x: Array, group: TensorGroup, dim: int) -> Array:
        self.group, self.dim = group, dim
        return group.sum_part(x, dim)

    def backward(self, grad: Array) -> Any:
        return self.group.gather(grad, self.dim), None, None


def copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    """The same x on every rank, about to be used differently by each: the gradient is the sum of the ranks'."""
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    """Each rank's partial result -> the sum, on every rank."""
    return _ReduceFrom.apply(x, group)


def scatter_to(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """The same x on every rank -> this rank's part along `dim`."""
    return _ScatterTo.apply(x, group, dim)


def gather_from(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's part -> the whole, to be used alike by every rank."""
    return _GatherFrom.apply(x, group, dim)


def all_gather(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's part -> the whole, to be used differently by each: `gather_from` and `copy_to` in one."""
    return _AllGather.apply(x, group, dim)


def reduce_scatter(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Each rank's partial result -> this rank's part of the sum: `reduce_from` and `scatter_to` in one."""
    return _ReduceScatter.apply(x, group, dim)
