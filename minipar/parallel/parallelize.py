"""The one place where all strategies are applied to a model, axis by axis of a mesh.

NB: torchtitan has such a function for each kind of model, for example `parallelize_llama`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from numpy.typing import DTypeLike

from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.errors import UsageError
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter
from minipar.nn.transformer import LanguageModel
from minipar.parallel.context import context_parallel
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.expert import ExpertParallel, expert_parallel
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.groups import Group, by_unit, groups_over
from minipar.parallel.guards import check_wrapping, refuse_replicas
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.stage import PipelineParallel, segment_groups
from minipar.parallel.tensor.plan import TensorParallel, tensor_parallel
from minipar.parallel.token_order import ContextParallel
from minipar.parallel.tree import leaf_count
from minipar.parallel.zero import ZeroStage1, ZeroStage2

DataParallel: TypeAlias = DistributedDataParallel | ZeroStage1 | FullyShardedDataParallel  # ZeroStage2 is a ZeroStage1


@dataclass(frozen=True)
class Parallelized:
    """The strategies of a model. The optimizer receives `ddp.parameters()`.

    `tensor` and `pipeline` are None if their axis has one rank.
    """

    ddp: DataParallel
    context: ContextParallel
    tensor: TensorParallel | None
    experts: ExpertParallel
    pipeline: PipelineParallel | None


def parallelize(
    model: LanguageModel,
    mesh: DeviceMesh,
    *,
    zero_stage: int = 0,
    replicas: int = 1,
    reduction: str = "ring",
    sequence: bool = False,
    context_method: str = "ring",
    context_order: str = "zigzag",
    schedule: Schedule | None = None,
    length: int = 0,
    segments_as_units: bool = False,
    gradient_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> Parallelized:
    """Apply context, tensor, expert, pipeline and data parallelism to a model, in place.

    `reduction` is the algorithm of all sums over ranks.

    pp > 1 needs a `schedule`, and "tree" the `length` of the sequences in tokens, or UsageError. A
    pipeline's stages are cut by their cost at that length. With `segments_as_units`, the gradient's
    norm is summed segment by segment: a device that is compared with a pipeline then sums in the
    same order as the pipeline.
    """
    if mesh.pp.size > 1 and schedule is None:
        raise UsageError(f"pp = {mesh.pp.size}, but schedule is None: give the order of the pipeline's actions")
    if reduction == "tree" and length == 0:
        raise UsageError('reduction "tree", but length = 0: give the tokens of a sequence, which leaves share equally')

    # Context parallelism: each rank of cp gets a part of every sequence. Attention also needs the
    # keys and values of the other parts, which ranks send to one another.
    context = context_parallel(model, mesh.cp, context_method, context_order, reduction, reduce_dtype)

    # Tensor parallelism: each rank of tp keeps a part of every layer. Some gradients on a rank then
    # come from a part of the tokens alone. `tensor.sum_partial` sums these gradients over tp,
    # before data parallelism sums them over dp.
    # With "tree" one rank too computes the layers in leaves, as any number of ranks would.
    tensor: TensorParallel | None = None
    leaves = leaf_count(model.config, length) if reduction == "tree" else 0
    if mesh.tp.size > 1 or leaves:
        tensor = tensor_parallel(model, mesh.tp, reduction, sequence, reduce_dtype, leaves, mesh.etp)

    # Expert parallelism: each rank of ep keeps some experts of every layer, of which tensor
    # parallelism has left each rank of etp a part. The gradients of experts are summed over edp, and
    # all other gradients over dp x cp.
    experts = expert_parallel(model, mesh.ep, mesh.edp)

    # Pipeline parallelism: each rank of pp keeps some stages. `units` are the parameters that travel
    # together; `segment_lists` are the lists of segments that this rank runs one after the other.
    units = segment_groups(model) if segments_as_units else by_unit(model)
    pipeline: PipelineParallel | None = None
    segment_lists: list[Sequence[Segment]] | None = None
    if schedule is not None and mesh.pp.size > 1:
        pipeline = PipelineParallel(model, mesh.pp, schedule, length)
        units = pipeline.groups
        segment_lists = [stage.segments for stage in pipeline.stages.values()]

    # Data parallelism: ranks of dp have other sequences, and ranks of cp have other parts of them.
    # Gradients are therefore summed over both.
    ddp = shard(
        model,
        mesh.dp_cp,
        zero_stage,
        reduction,
        groups=experts.groups(mesh.dp_cp, units),
        segment_lists=segment_lists,
        replicas=replicas,
        before_reduce=None if tensor is None else tensor.sum_partial,
        gradient_dtype=gradient_dtype,
        reduce_dtype=reduce_dtype,
    )
    return Parallelized(ddp, context, tensor, experts, pipeline)


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
    if stage == 1:
        return ZeroStage1(
            model,
            comm,
            algorithm,
            groups=groups,
            replicas=replicas,
            before_reduce=before_reduce,
            gradient_dtype=gradient_dtype,
            reduce_dtype=reduce_dtype,
        )
    if stage == 2:
        return ZeroStage2(
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
