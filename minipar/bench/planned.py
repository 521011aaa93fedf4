"""minipar's own runs in the planner's terms: what it says of a TrainConfig on a machine whose constants were measured,
and how right it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from minipar.bench.costs import Costs
from minipar.comm import Network
from minipar.errors import UsageError
from minipar.parallel.memory import OF_DTYPE
from minipar.plan.layout import Layout
from minipar.plan.machine import Assumptions, Cluster, Gpu
from minipar.plan.memory import Memory, memory
from minipar.plan.model import ModelShape
from minipar.plan.program import MINIPAR, Program
from minipar.plan.time import StepTime, step_time
from minipar.train.config import TrainConfig


def shape_of(config: TrainConfig) -> ModelShape:
    """The model that the configuration describes."""
    model = config.model
    return ModelShape(model.layers, model.hidden, model.heads, model.vocab_size, positions=model.seq_len)


def layout_of(config: TrainConfig) -> Layout:
    """The layout of a resolved configuration."""
    mesh, data = config.mesh, config.data
    assert mesh.dp is not None, "resolve() fills dp in"
    schedule = mesh.schedule or "1f1b"
    return Layout(
        mesh.dp,
        mesh.tp,
        mesh.pp,
        microbatch=data.global_batch // (mesh.dp * data.microbatches),
        microbatches=data.microbatches,
        zero=mesh.zero_stage,
        schedule=schedule,
        virtual_stages=(mesh.virtual_stages or 2) if schedule == "interleaved-1f1b" else 1,
        sequence_parallel=mesh.sequence_parallel,
        recompute=config.run.recompute,
        precision=OF_DTYPE[config.run.dtype],
    )


def ranks_of(config: TrainConfig) -> int:
    """dp*tp*pp."""
    assert config.mesh.dp is not None
    return config.mesh.dp * config.mesh.tp * config.mesh.pp


def program_of(config: TrainConfig) -> Program:
    """minipar, as this configuration runs it."""
    return replace(MINIPAR, every_microbatch=config.mesh.sync_every_microbatch)


@dataclass(frozen=True)
class Machine:
    """What `bench machine` measured: `costs` of computation, `network`: a message between two ranks."""

    costs: Costs
    network: Network


def load_machine(path: str) -> Machine:
    """From `bench machine --json FILE`. UsageError for a file that is not that, or of one rank, without messages."""
    try:
        rows = json.loads(Path(path).read_text())
        found = {row["name"]: float(row["value"]) for row in rows if row["row"] == "constant"}
        costs = Costs(**{field.name: found[field.name] for field in fields(Costs)})
        return Machine(costs, Network(found["message_alpha"], found["message_beta"]))
    except OSError as error:
        raise UsageError(f"--machine {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--machine {path} is not what `mpirun -n N python -m minipar.bench machine --json FILE` writes on two "
            f"ranks or more: {type(error).__name__} {error}"
        ) from None


def predict(config: TrainConfig, machine: Machine, length: int) -> tuple[StepTime, Memory]:
    """What the planner says of a resolved configuration: a step on the `cpu` clock, and the fullest rank's memory."""
    layout, network = layout_of(config), machine.network
    speed = 1 / network.beta if network.beta else inf
    gpu = Gpu(machine.costs.flops_per_second, inf, inf, speed, speed)
    one = Assumptions(links=1.0, alpha_inside=network.alpha, alpha_between=network.alpha, contention=0.0)
    program = program_of(config)
    cluster = Cluster(gpu, layout.gpus, layout.gpus, one, program, machine.costs.compute)
    model = shape_of(config)
    return step_time(model, layout, cluster, length), memory(model, layout, length, program)


@dataclass(frozen=True)
class Agreement:
    """Of several layouts: relative errors of predicted seconds and of predicted peak memory, and Spearman's correlation
    of predicted with measured seconds (1: in the same order).
    """

    median: float
    largest: float
    spearman: float
    memory_largest: float

    def __str__(self) -> str:
        return (
            f"seconds predicted within {self.largest:.1%}, median {self.median:.1%}, Spearman {self.spearman:.3f}; "
            f"memory within {self.memory_largest:.1%}"
        )


def agreement(rows: Sequence[Mapping[str, Any]]) -> Agreement:
    """Of rows with seconds, predicted_seconds, peak_bytes and predicted_bytes; two or more."""
    measured, predicted = (np.array([row[key] for row in rows]) for key in ("seconds", "predicted_seconds"))
    held, planned = (np.array([row[key] for row in rows]) for key in ("peak_bytes", "predicted_bytes"))
    errors = np.abs(predicted / measured - 1)
    place, planned_place = (np.argsort(np.argsort(each)) for each in (measured, predicted))
    return Agreement(
        float(np.median(errors)),
        float(errors.max()),
        float(np.corrcoef(place, planned_place)[0, 1]),
        float(np.abs(planned / held - 1).max()),
    )
