"""The wrappers of data parallelism by ZeRO stage: `shard` for each of them, `fully_shard` for stage 3."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from numpy.typing import DTypeLike

from minipar.comm.communicator import Communicator
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.groups import Group, by_unit, groups_over
from minipar.parallel.guards import check_wrapping, refuse_replicas
from minipar.parallel.zero import ZeroStage1, ZeroStage2

# A ZeroStage2 is a ZeroStage1.
DataParallel: TypeAlias = DistributedDataParallel | ZeroStage1 | FullyShardedDataParallel


def shard(
    model: Module,
    comm: Communicator,
    stage: int,
    algorithm: str = "ring",
    *,
    groups: Sequence[Group] | None = None,
    segment_lists: Sequence[Sequence[Segment]] | None = None,
    replicas: int = 1,
    before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
    gradient_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> DataParallel:
    """Wrap `model` over `comm` at ZeRO stage 0 (data parallelism) to 3 (fully sharded).

    All stages give the same bits. The other arguments go to the class of the stage: stage 3 uses
    `segment_lists`, stages 1 to 3 use `replicas`. ValueError for another stage.
    """
    check_wrapping(model, comm, algorithm)
    if groups is None:
        # Stage 0 has the buckets of the other stages, and so their bits: the bounds of a ring's chunks
        # decide the order of its sums. Made without `shard`, DistributedDataParallel fills them by size.
        groups = groups_over(comm, by_unit(model))
    if stage == 0:
        refuse_replicas(replicas)
        return DistributedDataParallel(
            model,
            comm,
            algorithm,
            groups=groups,
            before_reduce=before_reduce,
            gradient_dtype=gradient_dtype,
            reduce_dtype=reduce_dtype,
        )
    if stage in (1, 2):
        kind = ZeroStage1 if stage == 1 else ZeroStage2
        return kind(
            model,
            comm,
            algorithm,
            groups=groups,
            replicas=replicas,
            before_reduce=before_reduce,
            gradient_dtype=gradient_dtype,
            reduce_dtype=reduce_dtype,
        )
    if stage == 3:
        return fully_shard(
            model,
            comm,
            algorithm,
            groups=groups,
            segment_lists=segment_lists,
            replicas=replicas,
            before_reduce=before_reduce,
            gradient_dtype=gradient_dtype,
            reduce_dtype=reduce_dtype,
        )
    raise ValueError(f"ZeRO stage {stage}: expected 0, 1, 2 or 3")


def fully_shard(
    model: Module,
    comm: Communicator,
    algorithm: str = "ring",
    *,
    prefetch: bool = True,
    groups: Sequence[Group] | None = None,
    segment_lists: Sequence[Sequence[Segment]] | None = None,
    replicas: int = 1,
    before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
    gradient_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> FullyShardedDataParallel:
    """Wrap `model` at ZeRO stage 3. With `replicas=2`, each half of the ranks holds all shards.

    NB: PyTorch's FSDP2 is torch.distributed.fsdp.fully_shard. It receives a 2-D mesh instead of
    `replicas`; the first axis of this mesh has the replicas.
    """
    return FullyShardedDataParallel(
        model,
        comm,
        algorithm,
        prefetch=prefetch,
        groups=groups,
        segment_lists=segment_lists,
        replicas=replicas,
        before_reduce=before_reduce,
        gradient_dtype=gradient_dtype,
        reduce_dtype=reduce_dtype,
    )
