"""Notice mistakes in the planner's memory and traffic (section 9.6)."""

from fractions import Fraction

from minipar.parallel.pipeline.actions import peak_live
from minipar.parallel.pipeline.schedules import make
from minipar.plan import rank_bytes
from minipar.plan.layout import Layout
from minipar.plan.model import find_model


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
