"""Strategies applied to a serial model; the model does not know."""

from minipar.parallel.buffers import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, FlatBuffers, units
from minipar.parallel.data import (
    DistributedDataParallel,
    accumulate_replicas,
    all_reduce_gradients,
    global_token_count,
)
from minipar.parallel.fully_sharded import ZeroStage3, shard
from minipar.parallel.zero import ZeroStage1, ZeroStage2

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "DistributedDataParallel",
    "FlatBuffers",
    "ZeroStage1",
    "ZeroStage2",
    "ZeroStage3",
    "accumulate_replicas",
    "all_reduce_gradients",
    "global_token_count",
    "shard",
    "units",
]
