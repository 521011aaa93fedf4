"""The serial model, its strategies, and the layout from which bytes are predicted, made from a configuration."""

from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np

from minipar.comm.mesh import DeviceMesh
from minipar.errors import UsageError
from minipar.nn.moe import moe_layers
from minipar.nn.pretrained import load_pretrained
from minipar.nn.transformer import LanguageModel, TransformerConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.memory import STAGES, check_limit, precision_of
from minipar.parallel.parallelize import Parallelized, parallelize
from minipar.parallel.pipeline.stage import PipelineExecutor
from minipar.train.checkpoint import Checkpoint
from minipar.train.config import schedule_of, shape_of
from minipar.train.settings import TrainConfig


def make_model(config: TrainConfig, checkpoint: Checkpoint | None = None) -> LanguageModel:
    """Make the serial model of a configuration, of `--init-from` or of a checkpoint, with deferred values."""
    run = config.run
    mesh = config.mesh
    shape = shape_of(config.model)
    ranks = (mesh.dp or 1) * mesh.cp * mesh.tp * mesh.pp
    shape.check_memory(sum(astuple(precision_of(run.dtype, run.gradients))), ranks)  # no layout needs less
    options: dict[str, Any] = {"dtype": run.dtype, "attention": run.attention, "recompute": run.recompute == "full"}
    if config.model.model == "gpt2":
        options["dropout"] = config.optimizer.dropout
    if config.model.init_from is not None:
        return load_pretrained(config.model.init_from, deferred=True, **options)
    if checkpoint is None:
        return shape.build(seed=run.seed, deferred=True, **options)
    model = checkpoint.shape.build(deferred=True, **options)
    for name, p in model.named_parameters():
        p.make = partial(checkpoint.array, "parameter", name, p.dtype)
    for moe, bias in zip(moe_layers(model), checkpoint.manifest.get("router_bias", []), strict=False):
        moe.bias[:] = bias
    return model


def check_model_state(config: TrainConfig, mesh: DeviceMesh, model: LanguageModel) -> None:
    """Raise UsageError if the model state of this rank does not fit `--memory-limit`."""
    run = config.run
    if config.mesh.memory_limit is None:
        return
    widths = []
    for stage in STAGES:
        reduce_dtype = run.reduce_dtype if stage == 0 else None
        widths.append(precision_of(run.dtype, run.gradients, reduce_dtype))
    placements = step_layout(config, model.config).placements(tp=mesh.tp.rank, pp=mesh.pp.rank)
    ranks = mesh.dp_cp.size // config.mesh.zero_replicas
    accumulating = config.data.microbatches > 1 and not config.mesh.sync_every_microbatch
    stage = config.mesh.zero_stage
    check_limit(config.mesh.memory_limit, placements, ranks, stage, widths, accumulating)


def refuse_export_of_biases(config: TrainConfig, model: LanguageModel) -> None:
    """Raise UsageError if `--export` would lose the biases of `--router-bias`."""
    has_biases = config.model.router_bias > 0 or any(moe.bias.any() for moe in moe_layers(model))
    if config.run.export is not None and has_biases:
        raise UsageError("--export: a Mixtral's files have no place for the biases of --router-bias; --save has")


def apply_strategies(
    config: TrainConfig, mesh: DeviceMesh, model: LanguageModel
) -> tuple[Parallelized, PipelineExecutor | None]:
    """Apply the mesh's strategies to the serial model, and make the executor of its pipeline, if any."""
    run = config.run
    flags = config.mesh
    schedule = schedule_of(config) if mesh.pp.size > 1 else None
    made = parallelize(
        model,
        mesh,
        zero_stage=flags.zero_stage,
        replicas=flags.zero_replicas if flags.zero_stage > 0 else 1,  # one device has no shards
        reduction=run.reduction,
        sequence=flags.sequence_parallel,
        context_method=flags.context_parallel,
        context_order=flags.cp_order,
        schedule=schedule,
        length=config.model.seq_len,
        segments_as_units=flags.pp > 1,  # one device that verifies a pipeline has the pipeline's units
        gradient_dtype=run.gradients,
        reduce_dtype=run.reduce_dtype,
    )
    if schedule is None or made.pipeline is None:
        return made, None
    tokens = config.model.seq_len // mesh.cp.size
    if flags.sequence_parallel:
        tokens //= mesh.tp.size
    shape = (samples_per_microbatch(config), tokens, model.config.n_embd)
    executor = PipelineExecutor(schedule, mesh.pp, made.pipeline.stages, shape, np.dtype(run.dtype))
    return made, executor


def samples_per_microbatch(config: TrainConfig) -> int:
    """Return the number of samples that a replica computes at once."""
    assert config.mesh.dp is not None, "resolve() fills dp in"
    return config.data.global_batch // (config.mesh.dp * config.data.microbatches)


def step_layout(config: TrainConfig, shape: TransformerConfig | None = None) -> StepLayout:
    """Return the layout of a resolved configuration.

    `shape` is the model's, if the flags do not say all of it.
    """
    mesh = config.mesh
    run = config.run
    sizes = config.model
    assert mesh.dp is not None, "resolve() fills dp in"
    return StepLayout(
        shape or shape_of(sizes),
        length=sizes.seq_len,
        samples=samples_per_microbatch(config),
        microbatches=config.data.microbatches,
        dp=mesh.dp,
        cp=mesh.cp,
        ep=mesh.ep,
        etp=mesh.etp,
        tp=mesh.tp,
        pp=mesh.pp,
        context_parallel=mesh.context_parallel,
        sequence_parallel=mesh.sequence_parallel,
        zero_stage=mesh.zero_stage,
        zero_replicas=mesh.zero_replicas,
        sync_every_microbatch=mesh.sync_every_microbatch,
        schedule=schedule_of(config) if mesh.pp > 1 else None,
        itemsize=np.dtype(run.dtype).itemsize,
        gradient_itemsize=np.dtype(run.gradients or run.dtype).itemsize,
        reduce_itemsize=np.dtype(run.reduce_dtype or run.dtype).itemsize,
        recompute=run.recompute == "full",
        reduction=run.reduction,
        aux_loss=sizes.aux_loss,
        router_bias=sizes.router_bias,
        capacity_factor=sizes.capacity_factor,
    )
