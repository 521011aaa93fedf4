"""The communication of tensor and sequence parallelism: four mappings between what ranks share and what each rank has.

The ranks of a TensorGroup compute one layer together. An activation inside the layer differs from rank to rank; outside
it is the same on every rank, or each rank has its tokens. A mapping is an operation that takes an activation
across this border, and its backward is the adjoint of its forward: of a copy the sum, of a gather the sum's part.

    mapping          forward          backward         elements sent per rank    in Megatron-LM
    copy_to          nothing          all-reduce       2n(t-1)/t, backward       f, copy_to_tensor_model_parallel_region
    reduce_from      all-reduce       nothing          2n(t-1)/t, forward        g, reduce_from_...
    all_gather       all-gather       reduce-scatter   n(t-1)/t each way         gather_from_sequence_parallel_region
    reduce_scatter   reduce-scatter   all-gather       n(t-1)/t each way         reduce_scatter_to_sequence_...

t is the number of ranks and n = B T h the elements of a whole activation. A column-parallel layer begins with copy_to
and a row-parallel layer ends with reduce_from; with sequence parallelism, with all_gather and reduce_scatter, which
send the same bytes. Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (2205.05198), 4.2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from minipar.autograd import Tensor, mapping
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.parallel.placement import Shard

# A gather adds nothing, so all its algorithms give the same bits; each reduction is paired with one of them.
GATHER = {"ring": "ring", "ordered": "pairwise"}


class TensorGroup:
    """The ranks that share each layer: their communicator and the algorithm ("ring" or "ordered") of their sums.

    Sums travel in `reduce_dtype`, by default in float32 at least; what is gathered in `dtype`, the activations' own.
    """

    def __init__(
        self, comm: Communicator, reduction: str = "ring", dtype: Any = None, reduce_dtype: Any = None
    ) -> None:
        self.comm, self.reduction, self.dtype, self.reduce_dtype = comm, reduction, dtype, reduce_dtype
        self.rank, self.size = comm.rank, comm.size

    def shard(self, dim: int, size: int, groups: int = 1) -> Shard:
        """Return the placement of a parameter that is split along `dim`, whose whole length is `size`."""
        return Shard(self.rank, self.size, dim, size, groups)

    def sum_dtype(self, x: Array) -> Any:
        """Return the dtype in which x is summed."""
        return self.reduce_dtype or xp.promote_types(x.dtype, "float32")

    def sum(self, x: Array) -> Array:
        """Return a new array: the sum of x over the ranks."""
        return self.start_sum(x)()

    def start_sum(self, x: Array) -> Callable[[], Array]:
        """Start `sum` and return the function that waits for its result."""
        own = xp.array(x, dtype=self.sum_dtype(x), order="C")
        work = self.comm.all_reduce(own, algorithm=self.reduction, async_op=True)
        return lambda: work.wait().astype(x.dtype, copy=False)

    def part(self, x: Array, dim: int) -> Array:
        """Return this rank's part of x along `dim`, as a view. The number of ranks must divide the dim."""
        size = x.shape[dim] // self.size
        return x[(slice(None),) * dim + (slice(self.rank * size, (self.rank + 1) * size),)]

    def gather(self, x: Array, dim: int) -> Array:
        """Join all ranks' parts, which have one shape, along `dim`."""
        parts = self.comm.all_gather(xp.ascontiguousarray(x, dtype=self.dtype), algorithm=GATHER[self.reduction])
        return xp.concatenate(list(parts.reshape(self.size, *x.shape)), axis=dim).astype(x.dtype, copy=False)

    def sum_part(self, x: Array, dim: int) -> Array:
        """Return this rank's part, along `dim`, of the sum of x over the ranks."""
        return self.start_sum_part(x, dim)()

    def start_sum_part(self, x: Array, dim: int) -> Callable[[], Array]:
        """Start `sum_part` and return the function that waits for its result."""
        parts = xp.stack(xp.split(x, self.size, axis=dim), dtype=self.sum_dtype(x))  # (t, ...): contiguous parts
        work = self.comm.reduce_scatter(parts, algorithm=self.reduction, async_op=True)
        return lambda: work.wait().reshape(parts.shape[1:]).astype(x.dtype, copy=False)


def _same(x: Array) -> Array:
    return x


def copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    """Pass on x, which each rank will use differently, so that its gradient is the sum of the ranks'."""
    return mapping(x, _same, group.sum)


def reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    """Sum the ranks' partial results; every rank gets the sum, and passes its whole gradient back."""
    return mapping(x, group.sum, _same)


def all_gather(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Join the ranks' parts along `dim`; each rank will use the whole differently, so backward sums as in `copy_to`."""
    return mapping(x, partial(group.gather, dim=dim), partial(group.sum_part, dim=dim))


def reduce_scatter(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Sum the ranks' partial results and keep this rank's part along `dim`."""
    return mapping(x, partial(group.sum_part, dim=dim), partial(group.gather, dim=dim))
