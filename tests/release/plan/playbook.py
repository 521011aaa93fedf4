"""How well the planner predicts and ranks the Ultra-Scale Playbook's runs (nanotron_runs.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from plan.nanotron_runs import Run, nbytes, seconds

from minipar.plan.programs import PROGRAMS, Program
from minipar.plan.report import complexity


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
