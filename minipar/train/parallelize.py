"""Apply each strategy to the serial model, one axis of the mesh after the other: on this page they meet.

NB: torchtitan has such a function for each kind of model, for example `parallelize_llama`.
"""

from argparse import Namespace
from typing import Any

import numpy as np

from minipar.comm.mesh import DeviceMesh
from minipar.more.context.context_parallel import context_parallel
from minipar.more.context.token_order import ContextParallel
from minipar.more.experts.expert_parallel import expert_parallel
from minipar.more.hybrid import HybridComm
from minipar.more.tree.tree_layers import tree_parallel
from minipar.more.tree.tree_sums import leaf_count
from minipar.nn.gpt import LanguageModel
from minipar.parallel.buckets import by_unit
from minipar.parallel.pipeline.model import PipelineParallel, segment_groups
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import PipelineExecutor, PipelineStage
from minipar.parallel.tensor.plan import TensorParallel, tensor_parallel
from minipar.parallel.wrap import shard
from minipar.parallel.wrapper import DataParallel

Strategies = tuple[
    DataParallel, ContextParallel, TensorParallel | None, PipelineParallel | None, PipelineExecutor
]


def parallelize(model: LanguageModel, mesh: DeviceMesh, args: Namespace) -> Strategies:
    """Apply context, tensor, expert, pipeline and data parallelism to a serial model, in place.

    Return (ddp, context, tensor, pipeline, executor): what data, context, tensor and pipeline parallelism have made,
    and what runs a step's schedule. The optimizer takes ddp's parameters. `pipeline` is None on one rank of pp, and
    `tensor` on one rank of tp, unless the reduction is a tree.
    """
    # Context parallelism: each of c ranks has a part of every sample's tokens. Attention also needs the keys and values
    # of the other parts, which the ranks send to one another. "zigzag" gives rank r the chunks r and 2c-1-r of 2c, so
    # that all ranks have the same work under a causal mask.
    context = context_parallel(model, mesh.cp, args.context_parallel, "zigzag", args.reduction)

    # Tensor parallelism: each of t ranks keeps a part of every layer. Some gradients on a rank are only a term of the
    # sum (a router's; with sequence parallelism those of norms and row biases): `tensor.sum_partial` sums these over
    # tp, before dp sums them. With "tree" every sum follows one fixed binary tree, so that all layouts have the same
    # bits; one rank alone therefore uses it, too. (There the sums over tp are taken leaf by leaf, see tree_trainer.py.)
    sequence = args.sequence_parallel
    tensor = None
    if args.reduction == "tree":
        tensor = tree_parallel(model, mesh.tp, leaf_count(model.config, args.seq_len), sequence)
    elif mesh.tp.size > 1:
        tensor = tensor_parallel(model, mesh.tp, args.reduction, sequence)

    # Expert parallelism: each rank of ep keeps some experts of every layer. Their gradients are summed over edp, the
    # ranks that hold the same experts, and all other gradients over dp x cp.
    experts = expert_parallel(model, mesh.ep, mesh.edp)

    # Pipeline parallelism. A segment is the embedding, a block, or the head; a stage is a list of segments. Each rank
    # of pp keeps some stages; one rank has all segments in one stage, and runs one microbatch after the other. A unit
    # is the parameters whose gradients data parallelism will send together.
    if mesh.pp.size > 1:
        schedule = make(args.schedule, mesh.pp.size, args.microbatches, args.virtual_stages)
        pipeline = PipelineParallel(model, mesh.pp, schedule, args.seq_len)
        stages = pipeline.stages
        units = pipeline.groups
    else:
        schedule = make("1f1b", 1, args.microbatches)
        pipeline = None
        stages = {0: PipelineStage(model.segments)}
        # The norm is added up unit by unit. So the one device of `--verify` has the units of the pipeline that it is
        # compared with, of `args.pp` ranks.
        units = segment_groups(model) if args.pp > 1 else by_unit(model)

    # Data parallelism: ranks of dp have other samples, and ranks of cp other tokens. Gradients are summed over both.
    # ZeRO shards over these ranks: stage 1 the optimizer's state, 2 gradients too, 3 parameters too. With several
    # replicas the ranks form as many groups, and each group has a full set of shards (hybrid sharding). `groups` says
    # which parameters are sent together, and over which ranks: of each unit the experts, and the rest.
    ranks: Any = mesh.dp_cp
    if args.zero_replicas > 1:
        ranks = HybridComm(mesh.dp_cp, args.zero_replicas)
    ddp = shard(
        model,
        ranks,
        args.zero_stage,
        args.reduction,
        groups=experts.groups(ranks, units),
        segment_lists=[stage.segments for stage in stages.values()],
        before_reduce=None if tensor is None else tensor.sum_partial,
    )

    tokens = args.seq_len // mesh.cp.size
    if sequence:
        tokens //= mesh.tp.size
    samples = args.global_batch // (args.dp * args.microbatches)
    shape = (samples, tokens, args.hidden)  # (B, T/c/t, h): what a stage sends to the next one
    executor = PipelineExecutor(schedule, mesh.pp, stages, shape, np.dtype(args.dtype))
    return ddp, context, tensor, pipeline, executor
