"""Predict the printed speeds of training runs (section 10.5).

Narayanan et al. 2021 (arXiv 2104.04473, tables 1 and 2, figure 15), Korthikanti et al. 2022 (arXiv 2205.05198, table
5), Llama Team 2024 (arXiv 2407.21783, table 4), Touvron et al. 2023 (arXiv 2302.13971 and 2307.09288).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from chapters.support.three_models import ASK
from minipar.plan.cluster import GPUS, PROGRAMS, Cluster
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape, find_model
from minipar.plan.search import SearchSpace, judge, plan
from minipar.plan.step_time import step_time

NARAYANAN = {  # tp, pp, GPUs, batch, microbatch, TFLOP/s per GPU as printed
    "megatron-1.7b": (1, 1, 32, 512, 16, 137),
    "megatron-7.5b": (4, 1, 128, 512, 16, 142),
    "megatron-39b": (8, 2, 512, 1536, 4, 138),
    "megatron-145b": (8, 8, 1536, 2304, 2, 148),
    "megatron-1t": (8, 64, 3072, 3072, 1, 163),
}
ZERO_3 = {  # GPUs, batch, microbatch, TFLOP/s per GPU as printed (table 2); tp 1, pp 1
    "gpt3-175b": [(384, 1536, 4, 144), (768, 1536, 2, 88), (1536, 1536, 1, 44)],
    "megatron-530b": [(640, 2560, 4, 138), (1120, 2240, 2, 98), (2240, 2240, 1, 48)],
}
IN_3D = {  # stages, then GPUs, batch, TFLOP/s per GPU as printed (table 2); tp 8, microbatches of one
    "gpt3-175b": (12, [(384, 1536, 153), (768, 1536, 149), (1536, 1536, 141)]),
    "megatron-530b": (35, [(560, 2240, 171), (1120, 2240, 167), (2240, 2240, 159)]),
}
FIGURE_15 = {32: 58, 128: 103, 512: 128}  # batch, TFLOP/s per GPU as read off: 5.9B, tp 2, dp 32, microbatches of one
GPT_6B = ModelShape(32, 3840, 32, 51200, positions=2048)
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
    """A printed value and the predicted one; `ratio` is predicted time over printed time.

    distance   by what factor, as a logarithm, predicted and printed time differ
    """

    source: str
    name: str
    predicted: float
    printed: float
    ratio: float
    unit: str

    @property
    def distance(self) -> float:
        return abs(log(self.ratio))

    def __str__(self) -> str:
        return f"{self.source:<24} {self.name:<27}{self.predicted:>9.4g}{self.printed:>9.4g} {self.unit}"


def cluster_of(gpu: str, gpus: int, program: str) -> Cluster:
    """Return the cluster on which a program of PROGRAMS trains."""
    trains = PROGRAMS[program]
    return Cluster(GPUS[gpu], gpus, assumptions=trains.assumptions, framework=trains.framework)


def _megatron_row(
    source: str, program: str, label: str, model: ModelShape, gpus: int, batch: int, printed: float, **sizes: int
) -> Row:
    """Predict the TFLOP/s per A100 of a layout without sequence parallelism, with full recompute.

    sizes  tp, pp, microbatch and zero of the layout; dp is what is left of the GPUs
    """
    dp = gpus // sizes["tp"] // sizes["pp"]
    layout = Layout(dp=dp, microbatches=batch // dp // sizes["microbatch"], recompute="full", **sizes)
    tflops = judge(model, layout, cluster_of("a100", gpus, program), batch, 2048).tflops
    return Row(f"{source}, {program}", label, tflops, printed, printed / tflops, "TFLOP/s per GPU")


def narayanan(name: str, program: str = "megatron") -> list[Row]:
    """Predict a row of Narayanan's table 1: 1F1B, no ZeRO, full recompute, recomputation counted."""
    tp, pp, gpus, batch, microbatch, printed = NARAYANAN[name]
    sizes = {"tp": tp, "pp": pp, "microbatch": microbatch}
    return [_megatron_row("table 1", program, name, find_model(name), gpus, batch, printed, **sizes)]


def zero_3(name: str, program: str = "deepspeed-2021") -> list[Row]:
    """Predict Narayanan's table 2: ZeRO-3 without model parallelism, full recompute."""
    rows = []
    for gpus, batch, microbatch, printed in ZERO_3[name]:
        label = f"{name[-4:].upper()} on {gpus:,}, ZeRO-3"
        sizes = {"tp": 1, "pp": 1, "microbatch": microbatch, "zero": 3}
        rows.append(_megatron_row("table 2", program, label, find_model(name), gpus, batch, printed, **sizes))
    return rows


def in_3d(name: str, program: str = "megatron-2021") -> list[Row]:
    """Predict Narayanan's table 2: tensor, pipeline and data parallelism, full recompute."""
    pp, printed_rows = IN_3D[name]
    sizes = {"tp": 8, "pp": pp, "microbatch": 1}
    rows = []
    for gpus, batch, printed in printed_rows:
        label = f"{name[-4:].upper()} on {gpus:,}, 3D"
        rows.append(_megatron_row("table 2", program, label, find_model(name), gpus, batch, printed, **sizes))
    return rows


def figure_15(program: str = "megatron-2021") -> list[Row]:
    """Predict Narayanan's figure 15 at tp 2."""
    sizes = {"tp": 2, "pp": 1, "microbatch": 1}
    rows = []
    for batch, printed in FIGURE_15.items():
        label = f"5.9B, tp 2, a batch of {batch}"
        rows.append(_megatron_row("figure 15", program, label, GPT_6B, 64, batch, printed, **sizes))
    return rows


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
    """Predict the MFU of 405B with the printed tp and pp, and all else free: with what Megatron keeps, and Llama 3."""
    ask = SearchSpace(tp=8, pp=16, attention="flash", precision=PRECISIONS["bf16"])
    model, rows = find_model("llama-3-405b"), []
    for program in ("megatron", "llama-3"):
        (best,) = plan(model, cluster_of("h100", gpus, program), 2048, 8192, ask).plans
        unit = f"MFU, {best.layout.recompute} recompute, {best.memory.total / 1e9:.0f} GB"
        name, printed = f"405B, {gpus:,}, {program}", LLAMA_3[gpus]
        rows.append(Row("Llama 3, 2024", name, best.mfu, printed, printed / best.mfu, unit))
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
    "zero_3": (zero_3, [(name, program) for program in ("megatron", "deepspeed-2021") for name in ZERO_3]),
    "in_3d": (in_3d, [(name,) for name in IN_3D]),
    "figure_15": (figure_15, [(program,) for program in ("megatron", "megatron-2021")]),
    "narayanan": (narayanan, [(name, program) for program in ("megatron", "megatron-2021") for name in NARAYANAN]),
}
JOBS = [(source, case) for source, (_, cases) in PREDICTIONS.items() for case in cases]


def predicted(source: str, case: Sequence[Any]) -> list[list[Any]]:
    """Predict the rows of a job of JOBS. Values are JSON's; `Row(*values)` is the row again."""
    function, _ = PREDICTIONS[source]
    return [[row.source, row.name, row.predicted, row.printed, row.ratio, row.unit] for row in function(*case)]
