"""The layout of a configured run, from which traffic and memory are computed before it starts."""

import numpy as np

from minipar.nn.gpt import GPTConfig
from minipar.parallel.layout import StepLayout
from minipar.train.config import TrainConfig
from minipar.train.pipelined import schedule_of


def step_layout(config: TrainConfig, positions: int | None = None) -> StepLayout:
    """Return the layout of a resolved configuration. `positions`: the learned ones, if more than seq-len."""
    mesh, model, data = config.mesh, config.model, config.data
    assert mesh.dp is not None, "resolve() fills dp in"
    return StepLayout(
        GPTConfig(model.vocab_size, positions or model.seq_len, model.hidden, model.layers, model.heads),
        length=model.seq_len,
        samples=data.global_batch // (mesh.dp * data.microbatches),
        microbatches=data.microbatches,
        itemsize=np.dtype(config.run.dtype).itemsize,
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        zero_stage=mesh.zero_stage,
        schedule=schedule_of(config) if mesh.pp > 1 else None,
        sequence_parallel=mesh.sequence_parallel,
        recompute=config.run.recompute == "full",
        reduction=config.run.reduction,
        sync_every_microbatch=mesh.sync_every_microbatch,
    )
