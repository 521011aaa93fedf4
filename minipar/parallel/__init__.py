"""Strategies applied to a serial model; the model does not know."""

from minipar.parallel.buffers import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, FlatBuffers
from minipar.parallel.data import (
    DistributedDataParallel,
    accumulate_replicas,
    all_reduce_gradients,
    global_token_count,
)

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "DistributedDataParallel",
    "FlatBuffers",
    "accumulate_replicas",
    "all_reduce_gradients",
    "global_token_count",
]
