"""minipar's own runs in the planner's terms: a TrainConfig as a model and a layout."""

from __future__ import annotations

from minipar.parallel.model_state import OF_DTYPE
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.train.config import TrainConfig


def shape_of(config: TrainConfig) -> ModelShape:
    """The model that the configuration describes."""
    model = config.model
    return ModelShape(model.layers, model.hidden, model.heads, model.vocab_size, positions=model.seq_len)


def layout_of(config: TrainConfig) -> Layout:
    """The layout of a resolved configuration."""
    mesh, data = config.mesh, config.data
    assert mesh.dp is not None, "resolve() fills dp in"
    schedule = mesh.schedule or "1f1b"
    return Layout(
        mesh.dp,
        mesh.tp,
        mesh.pp,
        microbatch=data.global_batch // (mesh.dp * data.microbatches),
        microbatches=data.microbatches,
        zero=mesh.zero_stage,
        schedule=schedule,
        virtual_stages=(mesh.virtual_stages or 2) if schedule == "interleaved-1f1b" else 1,
        sequence_parallel=mesh.sequence_parallel,
        recompute=config.run.recompute,
        precision=OF_DTYPE[config.run.dtype],
    )
