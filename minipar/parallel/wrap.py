"""The wrappers of data parallelism by ZeRO stage: `shard` for each of them, `fully_shard` for stage 3."""

from collections.abc import Callable, Sequence
from typing import Any

from minipar.comm.communicator import Communicator
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import Group
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.wrapper import DataParallel
from minipar.parallel.zero import ZeroStage1, ZeroStage2

STAGES: dict[int, type[DataParallel[Any]]] = {0: DistributedDataParallel, 1: ZeroStage1, 2: ZeroStage2}


def shard(
    model: Module, comm: Communicator, stage: int, algorithm: str = "ring", *,
    groups: Sequence[Group] | None = None,
    segment_lists: Sequence[Sequence[Segment]] | None = None,
    before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
) -> DataParallel[Any]:  # fmt: skip
    """Wrap `model` over `comm` at ZeRO stage 0 (data parallelism) to 3 (fully sharded).

    All stages give the same bits. The other arguments go to the class of the stage; stage 3 alone
    uses `segment_lists`. ValueError for another stage.
    """
    if stage == 3:
        return FullyShardedDataParallel(
            model,
            comm,
            algorithm,
            segment_lists=segment_lists,
            groups=groups,
            before_reduce=before_reduce,
        )
    if stage not in STAGES:
        raise ValueError(f"ZeRO stage {stage}: expected 0, 1, 2 or 3")
    return STAGES[stage](model, comm, algorithm, groups=groups, before_reduce=before_reduce)


def fully_shard(
    model: Module, comm: Communicator, algorithm: str = "ring", *, prefetch: bool = True
) -> FullyShardedDataParallel:
    """Wrap `model` at ZeRO stage 3. NB: PyTorch's FSDP2 is torch.distributed.fsdp.fully_shard."""
    return FullyShardedDataParallel(model, comm, algorithm, prefetch=prefetch)
