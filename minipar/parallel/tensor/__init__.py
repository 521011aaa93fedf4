"""Tensor and sequence parallelism: one layer across ranks. Read mappings.py, layers.py, plan.py."""

from minipar.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    column_linear,
    enter,
    leave,
    vocab_parallel_cross_entropy_sum,
)
from minipar.parallel.tensor.mappings import (
    TensorGroup,
    all_gather,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from minipar.parallel.tensor.plan import PLAN, TensorParallel, check_shape, tensor_parallel

__all__ = [
    "PLAN",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SequenceEmbedding",
    "TensorGroup",
    "TensorParallel",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "all_gather",
    "check_shape",
    "column_linear",
    "copy_to",
    "enter",
    "gather_from",
    "leave",
    "reduce_from",
    "reduce_scatter",
    "scatter_to",
    "tensor_parallel",
    "vocab_parallel_cross_entropy_sum",
]
