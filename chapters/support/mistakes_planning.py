"""Mistakes that chapters 9 and 10 plant in the planner, each for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

from chapters.support.published_runs import KORTHIKANTI, NARAYANAN, narayanan
from chapters.support.three_models import ASK, BATCH, LENGTH, MIDDLE
from minipar.comm import Communicator, DeviceMesh, run_local
from minipar.parallel.memory import FLOAT64
from minipar.parallel.pipeline.actions import peak_live
from minipar.parallel.pipeline.schedules import make
from minipar.plan import rank_bytes
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import MEGATRON, Framework, Layout
from minipar.plan.model import ModelShape, find_model, utilization
from minipar.plan.rank_bytes import Volume, layer_activations, volume
from minipar.plan.search import judge, plan
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer

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


def alarms() -> list[str]:
    """Name what notices a mistake in the planner's memory or traffic: chapter 9's instruments.

    lists   the schedules' own lists: GPipe's microbatches in flight
    layer   Korthikanti et al. 2022: bytes that a layer of GPT-3 keeps under tp 8, beside dp 8
    bytes   what ZeRO-3 sends over dp: 3 m times the rank's parameters
    """
    model, length = find_model("gpt3-175b"), 2048
    gpipe = Layout(dp=1, tp=1, pp=4, microbatch=1, microbatches=8, schedule="gpipe")
    sharded = Layout(dp=8, tp=8, pp=1, microbatch=1, microbatches=4, zero=3)
    layer = length * model.hidden * (10 + (24 + 80) / 8)
    sent = 3 * 4 * 2 * Fraction(7, 8) * rank_bytes.rank_parameters(model, sharded)
    agree = {
        "lists": rank_bytes.in_flight(gpipe) == max(map(peak_live, make("gpipe", 4, 8).ranks)),
        "layer": rank_bytes.layer_activations(model, sharded, length) == layer,
        "bytes": rank_bytes.volume(model, sharded, length).dp == sent,
    }
    return [name for name in agree if not agree[name]]


def recommended(name: str, gpus: int = 256) -> dict[str, Any]:
    """Let a planner with this mistake choose a layout for Llama 2 70B on A100s.

    Return the layout, its bytes and MFU as this planner claims them, and as they are.
    """
    model, batch, length = find_model(MIDDLE), BATCH[MIDDLE], LENGTH[MIDDLE]
    with MISTAKES[name]():
        claim = plan(model, Cluster(GPUS["a100"], gpus), batch, length, ASK, top=1).plans[0]
    truth = judge(model, claim.layout, Cluster(GPUS["a100"], gpus), batch, length)
    return {
        "layout": str(claim.layout),
        "claimed_bytes": claim.memory.total,
        "bytes": truth.memory.total,
        "claimed_mfu": claim.mfu,
        "mfu": truth.mfu,
    }


# ---- chapter 10's instruments ----------------------------------------------------------------------------------------

RUN = (
    "--layers 4 --hidden 32 --heads 8 --seq-len 16 --vocab-size 256 --dtype float64 --dp 2 --zero-stage 3 "
    "--sync-every-microbatch --microbatches 4 --global-batch 8"
)


def bytes_of_a_run() -> int:
    """Train one step of RUN on two threads, and return the bytes that a rank sends over dp."""
    text = load_tokens(None, vocab_size=256, seq_len=16)

    def sent(comm: Communicator) -> int:
        config = resolve(parse(RUN.split(), 1), comm.size)
        trainer = Trainer(config, DeviceMesh(comm, dp=2, tp=1, pp=1), text)
        comm.traffic.reset()
        trainer.step(0)
        return comm.traffic.bytes(axis="dp")

    return run_local(2, sent)[0]


def later_alarms(sent: int) -> list[str]:
    """Name what notices a mistake.

    run     RUN's traffic over dp, predicted within a thousandth of the bytes `sent`
    print   Korthikanti's MFU within 0.3 points, Narayanan's speeds within 15 %
    """
    shape = ModelShape(layers=4, hidden=32, heads=8, vocab_size=256, positions=16)
    layout = Layout(dp=2, tp=1, pp=1, microbatch=1, microbatches=4, zero=3, precision=FLOAT64)
    agree = {"run": abs(float(rank_bytes.volume(shape, layout, 16).dp) / sent - 1) < 1e-3, "print": True}
    for name, (gpus, batch, *_, seconds, _, printed) in KORTHIKANTI.items():
        mfu = utilization(batch * find_model(name).model_flops(2048), seconds, gpus, 312e12)
        agree["print"] &= abs(100 * mfu - printed) < 0.3
    agree["print"] &= all(abs(row.ratio - 1) < 0.15 for name in NARAYANAN for row in narayanan(name))
    return [name for name in agree if not agree[name]]
