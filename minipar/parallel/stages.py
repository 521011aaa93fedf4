"""The choice among the data-parallel strategies by ZeRO stage."""

from collections.abc import Callable
from typing import Any

from minipar.comm.communicator import Communicator
from minipar.nn.module import Module
from minipar.parallel.buckets import by_unit
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.wrapper import Wrapper
from minipar.parallel.zero import ZeroStage1, ZeroStage2

# The class of each stage, from 0 to 3.
STAGES: list[Callable[..., Wrapper]] = [DistributedDataParallel, ZeroStage1, ZeroStage2, FullyShardedDataParallel]


def shard(model: Module, comm: Communicator, stage: int, algorithm: str = "ring", **options: Any) -> Wrapper:
    """Wrap `model` over `comm` at ZeRO stage 0 (plain data parallelism) to 3 (fully sharded), with the same buckets.

    All stages give the same bits. `options` are those of the stage's class. ValueError for another stage.
    """
    if stage not in range(len(STAGES)):
        raise ValueError(f"ZeRO stage {stage}: expected 0, 1, 2 or 3")
    if stage == 0:
        options.setdefault("groups", by_unit(model))
        if (replicas := options.pop("replicas", 1)) != 1:
            raise ValueError(f"replicas = {replicas}: ZeRO stage 0 shards nothing; give stage 1, 2 or 3")
    if stage < 2:
        options.pop("runs", None)  # the parts of a pipeline's stages: gradients or parameters come and go with them
    return STAGES[stage](model, comm, algorithm, **options)


def fully_shard(model: Module, comm: Communicator, algorithm: str = "ring", **options: Any) -> FullyShardedDataParallel:
    """Wrap `model` over `comm` at ZeRO stage 3; with `replicas=2` shard within each half of the ranks.

    NB: torch.distributed.fsdp.fully_shard is PyTorch's FSDP2, whose 2-D mesh has the replicas on its first axis.
    """
    return FullyShardedDataParallel(model, comm, algorithm, **options)
