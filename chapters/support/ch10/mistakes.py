"""Plant mistakes in the planner, each for the length of a `with` block."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

from chapters.support.ch10.three_models import ASK, BATCH, LENGTH, MIDDLE
from minipar.plan import rank_bytes
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import MEGATRON, Framework, Layout
from minipar.plan.model import ModelShape, find_model
from minipar.plan.rank_bytes import Volume, layer_activations, volume
from minipar.plan.search import judge, plan

Mistake = Callable[[], AbstractContextManager[Any]]
right_flops = ModelShape.model_flops


def one_in_flight() -> AbstractContextManager[Any]:
    """Keep the activations of one microbatch, whatever the schedule."""
    return patch.object(rank_bytes, "in_flight", lambda layout: 1)


def activations_by_dp() -> AbstractContextManager[Any]:
    """Divide a layer's activations by dp, as ZeRO divides model state."""

    def divided(model: ModelShape, layout: Layout, *more: Any) -> float:
        return layer_activations(model, layout, *more) / layout.dp

    return patch.object(rank_bytes, "layer_activations", divided)


def gathers_once() -> AbstractContextManager[Any]:
    """Let ZeRO-3 gather its parameters once per step: of 3m passes over them, 2m gathers become 2."""

    def fewer(model: ModelShape, layout: Layout, length: int, framework: Framework = MEGATRON) -> Volume:
        m, right = layout.microbatches, volume(model, layout, length, framework)
        return replace(right, dp=right.dp * Fraction(2 + m, 3 * m)) if layout.zero == 3 else right

    return patch.object(rank_bytes, "volume", fewer)


def recomputation_is_useful() -> AbstractContextManager[Any]:
    """Count a second forward of every layer as model FLOPs."""

    def more(model: ModelShape, length: int) -> int:
        return right_flops(model, length) + model.layers * model.layer_flops(length)

    return patch.object(ModelShape, "model_flops", more)


def bits_as_bytes() -> AbstractContextManager[Any]:
    """Take the A100's network card of 200 Gb/s for one of 200 GB/s."""
    return patch.dict(GPUS, a100=replace(GPUS["a100"], between=200e9))


MISTAKES: dict[str, Mistake] = {
    mistake.__name__: mistake
    for mistake in (one_in_flight, activations_by_dp, gathers_once, recomputation_is_useful, bits_as_bytes)
}


def recommended(name: str, gpus: int = 256) -> dict[str, Any]:
    """Let a planner with this mistake choose a layout for Llama 2 70B on A100s.

    Return the layout, its bytes by part and its MFU as this planner claims them, and as they are.
    """
    model, batch, length = find_model(MIDDLE), BATCH[MIDDLE], LENGTH[MIDDLE]
    with MISTAKES[name]():
        claim = plan(model, Cluster(GPUS["a100"], gpus), batch, length, ASK, top=1).plans[0]
    truth = judge(model, claim.layout, Cluster(GPUS["a100"], gpus), batch, length)
    return {
        "layout": str(claim.layout),
        "claimed": asdict(claim.memory),
        "really": asdict(truth.memory),
        "claimed_mfu": claim.mfu,
        "mfu": truth.mfu,
    }
