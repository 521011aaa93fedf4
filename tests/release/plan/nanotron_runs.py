"""Predict runs of the Ultra-Scale Playbook.

RECORD has 1,018 runs of nanotron that the authors of the Ultra-Scale Playbook (Hugging Face 2025) measured for it:
hosts of 8 H100, 256 sequences of 4096 tokens per step, bf16 with gradients accumulated in fp32, flash attention, no
recompute, sequence parallelism, 1F1B. `memory` is in GB of 2^30 bytes.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape
from minipar.plan.programs import PROGRAMS, Program
from minipar.plan.rank_bytes import memory
from minipar.plan.step_time import step_time

RECORD = Path(__file__).parent / "recorded" / "playbook.csv"
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
    with RECORD.open() as file:
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
