"""The communication of tensor and sequence parallelism: four mappings of activations.

The ranks of a TensorGroup compute one layer together. Outside the layer all ranks have the same
activation or, with sequence parallelism, each rank has its own tokens of it. Inside the layer each
rank computes with its own part of the weights, so results and gradients differ from rank to rank. A
mapping takes an activation into the layer or out of it. The backward of a mapping is the adjoint of
its forward: the adjoint of a copy is a sum over the ranks, and the adjoint of a gather is this
rank's part of such a sum.

    mapping         forward         backward        elements sent per rank  in Megatron-LM
    copy_to         nothing         all-reduce      2n(t-1)/t, backward     copy_to_tensor_model_parallel_region
    reduce_from     all-reduce      nothing         2n(t-1)/t, forward      reduce_from_tensor_model_parallel_region
    all_gather      all-gather      reduce-scatter  n(t-1)/t each way       gather_from_sequence_parallel_region
    reduce_scatter  reduce-scatter  all-gather      n(t-1)/t each way       reduce_scatter_to_sequence_parallel_region

Here t is the number of ranks, and n = B T h is the number of elements of a whole activation. A
column-parallel layer begins with copy_to, and a row-parallel layer ends with reduce_from. With
sequence parallelism the column-parallel layer begins with all_gather, and the row-parallel layer
ends with reduce_scatter; both pairs send the same bytes. Shoeybi et al. 2019 (arXiv 1909.08053),
section 3, call the first pair f and g; the second is from Korthikanti et al. 2022 (2205.05198), 4.2.
"""

from functools import partial

from numpy.typing import DTypeLike

from minipar.autograd.tensor import Tensor, mapping
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator


class TensorGroup:
    """The ranks that share each layer: their communicator, and the algorithm of their sums.

    The algorithm `reduction` is "ring" or "ordered". Sums travel in float32 at least.
    """

    def __init__(self, comm: Communicator, reduction: str = "ring") -> None:
        self.comm = comm
        self.reduction = reduction
        self.rank = comm.rank
        self.size = comm.size  # the number of ranks

    def sum_dtype(self, x: Array) -> DTypeLike:
        """Return the dtype in which x is summed."""
        return xp.promote_types(x.dtype, "float32")

    def sum(self, x: Array) -> Array:
        """Return a new array: the sum of x over the ranks."""
        own = xp.array(x, dtype=self.sum_dtype(x), order="C")
        total = self.comm.all_reduce(own, algorithm=self.reduction)
        return total.astype(x.dtype, copy=False)

    def row_sums(self, x: Array) -> Array:
        """Add up this rank's columns of each row: (N, V/t) -> (N,)."""
        return x.sum(axis=-1)

    def part(self, x: Array, dim: int) -> Array:
        """Return this rank's part of x along `dim`, as a view.

        The number of ranks must divide the length of `dim`.
        """
        return xp.split(x, self.size, axis=dim)[self.rank]

    def gather(self, x: Array, dim: int) -> Array:
        """Join the parts of all ranks along `dim`. All parts have the shape of x."""
        # A gather adds nothing, so each algorithm gives the same bits.
        gathered = self.comm.all_gather(xp.ascontiguousarray(x), algorithm="ring")
        parts = gathered.reshape(self.size, *x.shape)
        return xp.concatenate(list(parts), axis=dim)

    def sum_part(self, x: Array, dim: int) -> Array:
        """Return this rank's part, along `dim`, of the sum of x over the ranks."""
        # The ranks' parts come one after the other in memory: (t, ...).
        parts = xp.stack(xp.split(x, self.size, axis=dim), dtype=self.sum_dtype(x))
        own = self.comm.reduce_scatter(parts, algorithm=self.reduction)
        return own.reshape(parts.shape[1:]).astype(x.dtype, copy=False)


def _same(x: Array) -> Array:
    """Return x itself, in the direction of a mapping that needs no messages."""
    return x


def copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    """Return x, which each rank then uses differently. Backward sums the ranks' gradients of x."""
    return mapping(x, _same, group.sum)


def reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    """Sum the ranks' partial results. Backward gives every rank's term the gradient of the sum."""
    return mapping(x, group.sum, _same)


def all_gather(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Join the ranks' parts along `dim`.

    Each rank then uses the whole differently. Backward sums the ranks' gradients of the whole, and
    keeps this rank's part of the sum.
    """
    gather = partial(group.gather, dim=dim)
    sum_part = partial(group.sum_part, dim=dim)
    return mapping(x, gather, sum_part)


def reduce_scatter(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Sum the ranks' partial results and keep this rank's part of the sum along `dim`.

    Backward joins the gradients of all parts, so that each term has the whole gradient.
    """
    gather = partial(group.gather, dim=dim)
    sum_part = partial(group.sum_part, dim=dim)
    return mapping(x, sum_part, gather)
