"""Tensor and sequence parallelism: one layer on several ranks. Read mappings.py, then layers.py, then plan.py."""

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
from minipar.parallel.tensor.mappings import TensorGroup, all_gather, copy_to, reduce_from, reduce_scatter
from minipar.parallel.tensor.plan import PLAN, TensorParallel, check_shape, tensor_parallel

__all__ = [
    "PLAN", "ColumnParallelLinear", "RowParallelLinear", "SequenceEmbedding", "TensorGroup", "TensorParallel",
    "VocabParallelEmbedding", "VocabParallelHead", "all_gather", "check_shape", "column_linear", "copy_to", "enter",
    "leave", "reduce_from", "reduce_scatter", "tensor_parallel", "vocab_parallel_cross_entropy_sum",
]  # fmt: skip
