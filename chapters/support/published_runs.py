"""Printed speeds of training runs, and the planner's predictions of them, for chapter 10.

Narayanan et al. 2021 (arXiv 2104.04473, table 1), Korthikanti et al. 2022 (arXiv 2205.05198, table 5), Llama Team 2024
(arXiv 2407.21783, table 4), Touvron et al. 2023 (arXiv 2302.13971 and 2307.09288).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chapters.support.three_models import ASK
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import Layout
from minipar.plan.model import find_model
from minipar.plan.search import SearchSpace, judge, plan
from minipar.plan.step_time import step_time

NARAYANAN = {  # tp, pp, GPUs, batch, microbatch, TFLOP/s per GPU as printed
    "megatron-1.7b": (1, 1, 32, 512, 16, 137),
    "megatron-7.5b": (4, 1, 128, 512, 16, 142),
    "megatron-39b": (8, 2, 512, 1536, 4, 138),
    "megatron-145b": (8, 8, 1536, 2304, 2, 148),
    "megatron-1t": (8, 64, 3072, 3072, 1, 163),
}
KORTHIKANTI = {  # GPUs, batch, tp, pp, stages per rank, seconds with selective and with full recompute, MFU printed
    "megatron-22b": (8, 4, 8, 1, 1, 1.10, 1.42, 41.5),
    "gpt3-175b": (64, 64, 8, 8, 3, 13.75, 18.13, 51.4),
    "megatron-1t": (512, 512, 8, 64, 1, 71.49, 94.42, 56.3),
}
LLAMA_3 = {8192: 0.43, 16384: 0.41}  # GPUs, MFU as printed
LLAMA_65B = replace(find_model("llama-7b"), layers=80, hidden=8192, heads=64, kv_heads=64, ffn=22016)
TOUVRON = {  # shape, GPUs, batch, sequence, tokens per second and GPU as printed
    "LLaMA 7B": (find_model("llama-7b"), 256, 2048, 2048, 1.0e12 / 82_432 / 3600),
    "LLaMA 65B": (LLAMA_65B, 2048, 2048, 2048, 380),
    "Llama 2 70B": (find_model("llama-2-70b"), 2048, 1024, 4096, 2.0e12 / 1_720_320 / 3600),
}


@dataclass(frozen=True)
class Row:
    """A printed value and the predicted one; `ratio` is predicted time over printed time."""

    source: str
    name: str
    predicted: float
    printed: float
    ratio: float
    unit: str

    def __str__(self) -> str:
        return f"{self.source:<17} {self.name:<28}{self.predicted:>9.4g}{self.printed:>9.4g} {self.unit}"


def narayanan(name: str) -> list[Row]:
    """Predict a row of Narayanan's table: 1F1B, no ZeRO, full recompute, recomputation counted."""
    tp, pp, gpus, batch, microbatch, printed = NARAYANAN[name]
    dp = gpus // tp // pp
    layout = Layout(dp, tp, pp, microbatch, batch // dp // microbatch, recompute="full")
    tflops = judge(find_model(name), layout, Cluster(GPUS["a100"], gpus), batch, 2048).tflops
    return [Row("Narayanan 2021", name, tflops, printed, printed / tflops, "TFLOP/s per GPU")]


def korthikanti(name: str, recompute: str) -> list[Row]:
    """Predict a row of Korthikanti's table: sequence parallelism goes with selective recompute."""
    gpus, batch, tp, pp, v, selective, full, _ = KORTHIKANTI[name]
    microbatch = 4 if name == "megatron-22b" else 1
    schedule, sharded = "interleaved-1f1b" if v > 1 else "1f1b", recompute == "selective"
    layout = Layout(1, tp, pp, microbatch, batch // microbatch, 0, schedule, v, sharded, recompute)
    seconds = step_time(find_model(name), layout, Cluster(GPUS["a100"], gpus), 2048).total
    printed = selective if sharded else full
    return [Row("Korthikanti 2022", f"{name}, {recompute}", seconds, printed, seconds / printed, "s")]


def llama_3(gpus: int) -> list[Row]:
    """Predict the MFU of 405B with the printed tp and pp: the planner's layout, and that without recompute."""
    ask = SearchSpace(tp=8, pp=16, attention="flash", sequence_parallel=True)
    model, cluster = find_model("llama-3-405b"), Cluster(GPUS["h100"], gpus)
    (first,) = plan(model, cluster, 2048, 8192, ask).plans
    again = judge(model, replace(first.layout, zero=1, recompute="none"), cluster, 2048, 8192)
    rows = []
    for kind, choice in (("planner's", first), ("no recompute", again)):
        unit, printed = f"MFU, {choice.memory.total / 1e9:.0f} GB", LLAMA_3[gpus]
        rows.append(Row("Llama 3, 2024", f"405B, {gpus:,}, {kind}", choice.mfu, printed, printed / choice.mfu, unit))
    return rows


def touvron(name: str, attention: str) -> list[Row]:
    """Predict tokens per second and GPU of the planner's best layout."""
    model, gpus, batch, length, printed = TOUVRON[name]
    cluster, ask = Cluster(GPUS["a100"], gpus), replace(ASK, attention=attention)
    best = plan(model, cluster, batch, length, ask, top=3).plans[0]
    tokens = batch * length / best.time.total / gpus
    label = name if attention == "flash" else f"{name}, stored scores"
    return [Row("Touvron 2023", label, tokens, printed, printed / tokens, "tokens/s per GPU")]


PREDICTIONS: dict[str, tuple[Callable[..., list[Row]], Sequence[tuple[Any, ...]]]] = {
    "llama_3": (llama_3, [(gpus,) for gpus in LLAMA_3]),
    "touvron": (touvron, [(name, attention) for name in TOUVRON for attention in ("flash", "stored")]),
    "korthikanti": (korthikanti, [(name, recompute) for name in KORTHIKANTI for recompute in ("selective", "full")]),
    "narayanan": (narayanan, [(name,) for name in NARAYANAN]),
}
JOBS = [(source, case) for source, (_, cases) in PREDICTIONS.items() for case in cases]


def predicted(source: str, case: Sequence[Any]) -> list[list[Any]]:
    """Predict the rows of a job of JOBS. Values are JSON's; `Row(*values)` is the row again."""
    function, _ = PREDICTIONS[source]
    return [[row.source, row.name, row.predicted, row.printed, row.ratio, row.unit] for row in function(*case)]
