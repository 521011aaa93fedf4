"""The wrappers of data parallelism by ZeRO stage: `shard` for each of them, `fully_shard` for stage 3."""

from collections.abc import Callable, Sequence

from minipar.comm.communicator import Communicator
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import Group
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
    model: Module,
    comm: Communicator,
    stage: int,
    algorithm: str = "ring",
    *,
    groups: Sequence[Group] | None = None,
    segment_lists: Sequence[Sequence[Segment]] | None = None,
    before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
) -> DataParallel:
    """Wrap `model` over `comm` at ZeRO stage 0 (data parallelism) to 3 (fully sharded).

    All stages give the same bits. The other arguments are DataParallel's.
    """
    return STAGES[stage](
        model, comm, algorithm, groups=groups, segment_lists=segment_lists, before_reduce=before_reduce
    )
