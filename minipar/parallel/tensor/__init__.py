"""Tensor and sequence parallelism: one layer on several ranks. Read mappings.py, then layers.py, then plan.py."""

from minipar.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import PLAN, TensorParallel, check_shape, tensor_parallel

__all__ = [
    "PLAN", "ColumnParallelLinear", "RowParallelLinear", "TensorGroup", "TensorParallel", "VocabParallelEmbedding",
    "check_shape", "tensor_parallel",
]  # fmt: skip
