"""The wrappers of data parallelism by ZeRO stage: `shard` for each of them, `fully_shard` for stage 3."""

from typing import Any

from minipar.comm.communicator import Communicator
from minipar.nn.module import Module
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.wrapper import DataParallel
from minipar.parallel.zero import ZeroStage1, ZeroStage2

fully_shard = FullyShardedDataParallel  # NB: PyTorch's FSDP2 is torch.distributed.fsdp.fully_shard.

STAGES: dict[int, type[DataParallel]] = {
    0: DistributedDataParallel,
    1: ZeroStage1,
    2: ZeroStage2,
    3: FullyShardedDataParallel,
}


def shard(
    model: Module, comm: Communicator, stage: int, algorithm: str = "ring", **options: Any
) -> DataParallel:
    """Wrap `model` over `comm` at ZeRO stage 0 (data parallelism) to 3 (fully sharded).

    All stages give the same bits. `options` are DataParallel's: `groups`, `segment_lists` and
    `before_reduce`.
    """
    return STAGES[stage](model, comm, algorithm, **options)
