"""Predicted beside measured seconds of a step, of every run that the planner is compared with, by source.

PYTHONPATH=.:tests/helpers:tests/release python tests/release/plan/compared.py runs.json
python -m visualize predictions runs.json --out visualize/gallery/predictions.png
"""

import csv
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from plan import megatron_core, mpt_runs, nanotron_runs
from plan.fit_gpus import fitted_runs
from plan.test_published import LLAMA_3, TABLE_1, korthikanti, llama_3, nemotron_4
from planning import a100s, layout

from chapters.support.ch10.predictions import plot_predictions
from minipar.plan.cluster import Gpu
from minipar.plan.model import find_model
from minipar.plan.search import judge
from minipar.plan.step_time import step_time
from visualize.style import save

INTERNEVO = Path(__file__).parent / "recorded" / "internevo.csv"
Pairs = list[tuple[float, float]]


def mpt(cards: str, least: int, most: int, card: Gpu | None = None, fitted: bool = True) -> Pairs:
    """Return MPT's runs in 16 bits on these cards, or on `card`, with samples of least to most tokens.

    `fitted` says whether those that fix the GPU's constants are among them.
    """
    chosen = [run for run in mpt_runs.mpt_runs() if run.gpu.startswith(cards) and not run.fp8]
    chosen = [run for run in chosen if least <= run.length <= most]
    chosen = [run for run in chosen if fitted or run not in fitted_runs(run.gpu)]
    return [(mpt_runs.seconds(run, card), run.seconds) for run in chosen]


def llama_3_and_nemotron_4() -> Pairs:
    """Return Llama 3's two rows of 8,192 tokens and Nemotron-4's."""
    found = []
    for gpus, mfu in LLAMA_3.items():
        model, cluster, own = llama_3(gpus)
        one = judge(model, own, cluster, 2048, 8192)
        found.append((one.time.total, one.time.total * one.mfu / mfu))
    return [*found, (nemotron_4().time.total, 8.0)]


def internevo() -> Pairs:
    """Return InternEvo's runs of a 7B model (c628a8c, doc/en/train_performance.md): ZeRO-1 over all ranks or over 8."""
    model = replace(find_model("llama-7b"), vocab_size=103168)
    found = []
    with INTERNEVO.open() as file:
        for row in csv.DictReader(file):
            gpus, tp, m = int(row["gpus"]), int(row["tp"]), int(row["microbatches"])
            dp, length = gpus // tp, int(row["length"])
            one = layout(
                dp=dp,
                tp=tp,
                microbatch=int(row["microbatch"]),
                microbatches=m,
                zero=1,
                zero_replicas=1 if row["group"] == "all" else dp // int(row["group"]),
                recompute="full" if row["recompute"] == "True" else "none",
                attention="flash",
            )
            tokens = dp * one.microbatch * m * length
            measured = tokens / (gpus * float(row["tokens_per_second"]))
            found.append((step_time(model, one, a100s(gpus), length).total, measured))
    return found


def table_1() -> Pairs:
    """Return the five rows of Narayanan et al. 2021, table 1, of which the microbatch is known."""
    found = []
    for name, (tp, pp, gpus, batch, tflops, b) in TABLE_1.items():
        if b is not None:
            dp = gpus // (tp * pp)
            one = layout(dp=dp, tp=tp, pp=pp, microbatch=b, microbatches=batch // (dp * b), recompute="full")
            plan = judge(find_model(name), one, a100s(gpus, "megatron-2021"), batch, 2048)
            found.append((plan.time.total, plan.time.total * plan.tflops / tflops))
    return found


def nanotron(model: str) -> Pairs:
    """Return nanotron's runs without a pipeline on at most 32 hosts."""
    return [(nanotron_runs.seconds(run), run.seconds) for run in nanotron_runs.without_pipeline(model)]


def core() -> Pairs:
    """Return Megatron-Core's nine rows."""
    return [megatron_core.predicted_and_printed(name) for name in megatron_core.TABLE]


@cache
def compared() -> dict[str, Pairs]:
    """Return (predicted, measured) seconds by source."""
    return {
        "MPT, A100": mpt("a100", 0, 8192),
        "MPT, H100": mpt("h100", 0, 8192),
        "MPT, 16,384 tokens and more": mpt("", 16384, 1 << 20),
        "Megatron-Core, H100": core(),
        "Llama 3, Nemotron-4": llama_3_and_nemotron_4(),
        "Megatron 2021, 2022": [*table_1(), *korthikanti("megatron-2021")],
        "InternEvo, A100": internevo(),
        "nanotron 1B (fitted)": nanotron("1B"),
        "nanotron 8B": nanotron("8B"),
    }


if __name__ == "__main__":
    save(plot_predictions(compared()), sys.argv[1])
