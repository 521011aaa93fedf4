"""The serial model of a configuration, and its layout, from which bytes are predicted."""

from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np

from minipar.nn.moe import moe_layers
from minipar.nn.pretrained import load_pretrained
from minipar.nn.transformer import LanguageModel, TransformerConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.memory import precision_of
from minipar.train.checkpoint import Checkpoint
from minipar.train.config import TrainConfig, schedule_of, shape_of


def make_model(config: TrainConfig, checkpoint: Checkpoint | None = None) -> LanguageModel:
    """Make the serial model of a configuration, of `--init-from` or of a checkpoint, with deferred values."""
    sizes, run, mesh, shape = config.model, config.run, config.mesh, shape_of(config.model)
    ranks = (mesh.dp or 1) * mesh.cp * mesh.tp * mesh.pp
    shape.check_memory(sum(astuple(precision_of(run.dtype, run.gradients))), ranks)  # no layout needs less
    options: dict[str, Any] = {"dtype": run.dtype, "attention": run.attention, "recompute": run.recompute == "full"}
    if sizes.model == "gpt2":
        options["dropout"] = config.optimizer.dropout
    if sizes.init_from is not None:
        return load_pretrained(sizes.init_from, deferred=True, **options)
    if checkpoint is None:
        return shape.build(seed=run.seed, deferred=True, **options)
    model = checkpoint.shape.build(deferred=True, **options)
    for name, p in model.named_parameters():
        p.make = partial(checkpoint.array, "parameter", name, p.dtype)
    for moe, bias in zip(moe_layers(model), checkpoint.manifest.get("router_bias", []), strict=False):
        moe.bias[:] = bias
    return model


def step_layout(config: TrainConfig, shape: TransformerConfig | None = None) -> StepLayout:
    """Return the layout of a resolved configuration. `shape` is the model's, if the flags do not say all of it."""
    mesh, data = config.mesh, config.data
    assert mesh.dp is not None, "resolve() fills dp in"
    same = "dp cp ep tp pp context_parallel sequence_parallel zero_stage zero_replicas sync_every_microbatch".split()
    return StepLayout(
        shape or shape_of(config.model),
        length=config.model.seq_len,
        samples=data.global_batch // (mesh.dp * data.microbatches),
        microbatches=data.microbatches,
        itemsize=np.dtype(config.run.dtype).itemsize,
        gradient_itemsize=np.dtype(config.run.gradients or config.run.dtype).itemsize,
        reduce_itemsize=np.dtype(config.run.reduce_dtype or config.run.dtype).itemsize,
        schedule=schedule_of(config) if mesh.pp > 1 else None,
        recompute=config.run.recompute == "full",
        reduction=config.run.reduction,
        **{name: getattr(mesh, name) for name in same},
        **{name: getattr(config.model, name) for name in ("aux_loss", "router_bias", "capacity_factor")},
    )
