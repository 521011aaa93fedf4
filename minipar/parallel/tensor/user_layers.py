"""Parallel layers for a user's own model: made from sizes, and without sequence parallelism."""

from minipar.autograd.tensor import Tensor
from minipar.backend import Array
from minipar.comm.communicator import Communicator
from minipar.errors import check_divides
from minipar.nn.layers import Embedding, Linear
from minipar.parallel.placement import Shard
from minipar.parallel.tensor.column_slice import ColumnSlice
from minipar.parallel.tensor.layers import (
    Border,
    ColumnLinear,
    RowLinear,
    VocabEmbedding,
    shard_parameter,
)
from minipar.parallel.tensor.mappings import TensorGroup

EQUAL = "each tensor-parallel rank has as many"


class ColumnParallelLinear(ColumnLinear):
    """A ColumnLinear for a user's own model. The arguments after `groups` are Linear's.

    `groups` equal stretches of columns are split one by one, as q, k and v. UsageError if t does
    not divide a stretch, and for an operation over the columns of the result, such as a softmax.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        comm: Communicator,
        *,
        name: str,
        groups: int = 1,
        bias: bool = True,
        transposed: bool = False,
        seed: int = 0,
        dtype: str = "float32",
        std: float = 0.02,
    ) -> None:
        group = TensorGroup(comm)
        check_divides(f"{name}: n_out/(groups*tp)", n_out, groups * group.size, EQUAL)
        layer = Linear(
            n_in, n_out, name=name, bias=bias, transposed=transposed, seed=seed, dtype=dtype, std=std
        )
        dim = 0 if layer.transposed else 1
        shard_parameter(layer.weight, Shard(group.rank, group.size, dim, n_out, groups))
        if layer.bias is not None:
            shard_parameter(layer.bias, Shard(group.rank, group.size, 0, n_out, groups))
        super().__init__(layer, Border(group))
        self.group = group  # `vocab_parallel_cross_entropy_sum` takes it, if this layer is a head

    def forward(self, x: Tensor | Array) -> Tensor:
        return ColumnSlice.of(super().forward(x)) if self.group.size > 1 else super().forward(x)


class RowParallelLinear(RowLinear):
    """A RowLinear for a user's own model. The arguments after `name` are Linear's.

    UsageError if t does not divide n_in.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        comm: Communicator,
        *,
        name: str,
        bias: bool = True,
        transposed: bool = False,
        seed: int = 0,
        dtype: str = "float32",
        std: float = 0.02,
    ) -> None:
        group = TensorGroup(comm)
        check_divides(f"{name}: n_in/tp", n_in, group.size, EQUAL)
        layer = Linear(
            n_in, n_out, name=name, bias=bias, transposed=transposed, seed=seed, dtype=dtype, std=std
        )
        dim = 1 if layer.transposed else 0
        shard_parameter(layer.weight, Shard(group.rank, group.size, dim, n_in))
        super().__init__(layer, Border(group))


class VocabParallelEmbedding(VocabEmbedding):
    """A VocabEmbedding for a user's own model. The arguments after `name` are Embedding's."""

    def __init__(
        self,
        count: int,
        dim: int,
        comm: Communicator,
        *,
        name: str,
        seed: int = 0,
        dtype: str = "float32",
        std: float = 0.02,
    ) -> None:
        group = TensorGroup(comm)
        layer = Embedding(count, dim, name=name, seed=seed, dtype=dtype, std=std)
        shard_parameter(layer.weight, Shard(group.rank, group.size, 0, count))
        super().__init__(layer, Border(group))
