"""Runs of the Ultra-Scale Playbook next to the planner's predictions of them.

`recorded/playbook.csv` has 1,018 runs of nanotron that the authors of the Ultra-Scale Playbook (Hugging Face 2025)
measured for it: hosts of 8 H100, 256 sequences of 4096 tokens per step, bf16 with gradients accumulated in fp32, flash
attention, no recompute, sequence parallelism, 1F1B. `memory` is in GB of 2^30 bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from minipar.plan.cluster import GPUS, PROGRAMS, Cluster, Program
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import memory
from minipar.plan.search import complexity
from minipar.plan.step_time import step_time

BATCH, LENGTH = 256, 4096
H100 = replace(GPUS["h100"], memory=85.5e9)  # 81,559 MiB, as nvidia-smi shows
LLAMA = {"gated": True, "biases": False, "norm_biases": False, "vocab_size": 131072, "heads": 32}
MODELS = {
    "1B": ModelShape(layers=16, hidden=2048, ffn=8192, tied=True, **LLAMA),
    "8B": ModelShape(layers=32, hidden=4096, ffn=14336, tied=False, **LLAMA),
}
MOST_HOSTS = 32  # on 64 hosts the same layout differs by factors between two runs


@dataclass(frozen=True)
class Run:
    """A measured run: its layout, seconds of a step and bytes of the GPU's memory."""

    model: str
    hosts: int
    layout: Layout
    seconds: float
    nbytes: float


@cache
def runs() -> tuple[Run, ...]:
    """Read the record."""
    with (Path(__file__).parent / "recorded" / "playbook.csv").open() as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def _run(row: dict[str, str]) -> Run:
    sizes = {name: int(row[name]) for name in ("dp", "tp", "pp", "zero", "microbatch", "microbatches")}
    sharded = {"sequence_parallel": sizes["tp"] > 1, "attention": "flash", "precision": PRECISIONS["bf16"]}
    return Run(
        model=row["model"],
        hosts=int(row["nodes"]),
        layout=Layout(**sizes, **sharded),
        seconds=BATCH * LENGTH / float(row["tokens_per_second"]),
        nbytes=float(row["memory"]) * 2**30,
    )


def without_pipeline(model: str) -> list[Run]:
    """Return a model's runs with pp = 1 on at most MOST_HOSTS hosts."""
    return [run for run in runs() if run.model == model and run.layout.pp == 1 and run.hosts <= MOST_HOSTS]


def cluster_of(run: Run, program: Program = PROGRAMS["nanotron"]) -> Cluster:
    """Return the cluster that a run was measured on."""
    return Cluster(H100, 8 * run.hosts, framework=program.framework, assumptions=program.assumptions)


def seconds(run: Run, program: Program = PROGRAMS["nanotron"]) -> float:
    """Predict the seconds of a run's step, long pipelines in closed form."""
    return step_time(MODELS[run.model], run.layout, cluster_of(run, program), LENGTH).total


def nbytes(run: Run, program: Program = PROGRAMS["nanotron"]) -> float:
    """Predict the bytes of a run's fullest GPU."""
    return memory(MODELS[run.model], run.layout, LENGTH, program.framework).total


def within(predicted: Sequence[float], measured: Sequence[float], part: float = 0.2) -> float:
    """Return the share of predictions that are at most `part` of the measured value away from it."""
    return sum(abs(p / m - 1) <= part for p, m in zip(predicted, measured, strict=True)) / len(measured)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of ranks; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    given = np.asarray(values)
    return np.array([(given < value).sum() + ((given == value).sum() - 1) / 2 for value in given])


def groups(chosen: Iterable[Run]) -> dict[tuple[str, int], list[Run]]:
    """Return the runs of each (model, hosts)."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in chosen:
        found.setdefault((run.model, run.hosts), []).append(run)
    return found


@dataclass(frozen=True)
class Choice:
    """What the planner would choose among the layouts that were measured on a number of hosts.

    best_mesh   the rank, from 1, of the mesh of the fastest measured run among the meshes by predicted seconds
    first       measured throughput of the planner's first choice over that of the fastest run
    """

    best_mesh: int
    first: float


def choice(group: Sequence[Run], program: Program = PROGRAMS["nanotron"], spread: float = 0.0) -> Choice:
    """Compare the planner's choice among these runs with the fastest of them; the simplest of those within `spread`."""
    tied = (1 + spread) * min(seconds(run, program) for run in group)

    def order(run: Run) -> tuple[bool, tuple[bool, int], float]:
        time = seconds(run, program)
        return time > tied, complexity(run.layout) if time <= tied else (False, 0), time

    predicted = sorted(group, key=order)
    best = min(group, key=lambda run: run.seconds)
    meshes = list(dict.fromkeys(run.layout.mesh for run in predicted))
    return Choice(best_mesh=1 + meshes.index(best.layout.mesh), first=best.seconds / predicted[0].seconds)


def summary(chosen: Sequence[Run], program: Program = PROGRAMS["nanotron"]) -> str:
    """Return a line on how well the planner predicts these runs."""
    time, held = [seconds(run, program) for run in chosen], [nbytes(run, program) for run in chosen]
    per_group = [
        spearman([seconds(run, program) for run in group], [run.seconds for run in group])
        for group in groups(chosen).values()
    ]
    return (
        f"{len(chosen)} runs: seconds within 20 % in {within(time, [run.seconds for run in chosen]):.1%}, memory in "
        f"{within(held, [run.nbytes for run in chosen]):.1%}; Spearman per group {median(per_group):.3f} in the "
        f"median, {min(per_group):.3f} in the worst"
    )
