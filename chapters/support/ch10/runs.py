"""Predict runs of minipar on the model clock and on this machine."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from minipar.bench.costs import Shape
from minipar.bench.layouts import layout_of, modelled_step, shape_of
from minipar.bench.machine import pieces
from minipar.bench.pipeline import random_tokens
from minipar.comm import Communicator, DeviceMesh, ModelClock, Network
from minipar.plan.cluster import AlphaBeta, Cluster, model_clock_cluster
from minipar.plan.step_time import StepTime, step_time
from minipar.train.config import parse, resolve
from minipar.train.settings import DataConfig, ModelConfig, TrainConfig
from minipar.train.trainer import Trainer

SPEED = 1e10  # operations per second of a modelled device
INSIDE = AlphaBeta(3e-6, 1 / 2e9)  # messages in a host
BETWEEN = AlphaBeta(14e-6, 1 / 0.5e9)  # messages between hosts
GPT_SMALL = ModelConfig(layers=8, hidden=48, heads=24, seq_len=24, vocab_size=96)
GPT_TINY = ModelConfig(layers=4, hidden=32, heads=4, seq_len=16, vocab_size=64)

FAR = (  # layouts for 64 ranks
    "--dp 64 --zero-stage 3 --microbatches 2",
    "--dp 4 --tp 4 --pp 4 --zero-stage 1 --sequence-parallel --microbatches 4",
)


# ---- the model clock -------------------------------------------------------------------------------------------------


def configured(flags: str, model: ModelConfig = GPT_SMALL, samples: int | None = None) -> tuple[TrainConfig, int]:
    """Return the run that `python -m minipar.train` would make of these flags, with this model, and its ranks.

    A microbatch has one sample unless `samples`, the global batch, says otherwise.
    """
    parsed = parse(flags.split(), 1)
    dp = parsed.mesh.dp or 1
    m = parsed.data.microbatches
    size = dp * parsed.mesh.tp * parsed.mesh.pp
    data = DataConfig(global_batch=samples or dp * m, microbatches=m)
    return resolve(replace(parsed, model=model, data=data), size), size


def planned(config: TrainConfig, machine: Cluster) -> StepTime:
    """Predict a step of this run."""
    return step_time(shape_of(config), layout_of(config), machine, config.model.seq_len)


def modelled(ranks: int, per_host: int, speed: float = SPEED) -> Cluster:
    """Return the cluster that the model clock shows, with this module's links."""
    return model_clock_cluster(ranks, speed, INSIDE, BETWEEN, per_host)


def run_on_the_model_clock(comm: Communicator, config: TrainConfig, machine: Cluster) -> float:
    """Train one step on the ranks of `comm`, and return its seconds on the model clock: those of the last rank."""
    between = Network(BETWEEN.alpha, BETWEEN.beta)
    network = Network(INSIDE.alpha, INSIDE.beta, between, machine.per_host)
    timed = Communicator(comm.transport, clock=ModelClock(machine.gpu.peak), network=network)
    trainer = Trainer(config, DeviceMesh(timed, tp=config.mesh.tp, pp=config.mesh.pp), random_tokens(config))
    trainer.step(0)
    return float(max(np.frombuffer(b"".join(comm.all_gather_bytes(np.array([timed.clock.now()]).tobytes())))))


def layouts_of(ranks: int, per_host: int) -> list[str]:
    """List flags of layouts for so many ranks: each axis alone, two together, and with eight ranks all three."""
    if ranks == 1:
        return ["--microbatches 2", "--recompute full"]
    tp = gcd(24, min(ranks, per_host))  # inside a host, and whole heads
    sequence = "--sequence-parallel " if tp > 1 else ""
    flags = [
        f"--dp {ranks}",
        f"--dp {ranks} --zero-stage 3 --microbatches 2",
        f"--dp {ranks // tp} --tp {tp} {sequence}--recompute full",
        f"--pp {ranks} --microbatches {2 * ranks}",
        f"--pp {ranks} --microbatches {2 * ranks} --schedule zb-h1",
    ]
    if ranks == 8:
        flags.append("--dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel --microbatches 4")
        flags.append("--tp 2 --pp 4 --microbatches 8 --schedule interleaved-1f1b")
    return flags


def on_64_threads(flags: str) -> tuple[float, float]:
    """Return (predicted, run) seconds of a step on 64 ranks, threads of this process, in hosts of eight."""
    config, size = configured(flags, GPT_TINY)
    machine = modelled(size, 8, SPEED / 10)
    return planned(config, machine).total, modelled_step(config, machine)


# ---- this machine ----------------------------------------------------------------------------------------------------

GPT_MIDDLE = ModelConfig(layers=8, hidden=128, heads=8, seq_len=32, vocab_size=256)
SAMPLES = 24  # samples of the global batch
SHAPES = [  # hidden, heads, sequence, samples
    Shape(64, 4, 32, 2, vocab_size=256),
    Shape(64, 4, 64, 6, vocab_size=256),
    Shape(128, 8, 32, 3, vocab_size=256),
    Shape(128, 8, 32, 6, vocab_size=256),
    Shape(128, 8, 32, 24, vocab_size=256),
    Shape(128, 8, 64, 6, vocab_size=256),
    Shape(256, 16, 32, 3, vocab_size=256),
    Shape(128, 8, 32, 6, vocab_size=1024),
    Shape(128, 8, 32, 24, tp=2, vocab_size=256),
    Shape(128, 8, 32, 6, tp=2, sequence_parallel=True, vocab_size=256),
    Shape(128, 8, 32, 24, tp=8, vocab_size=256),
    Shape(128, 8, 32, 24, tp=8, sequence_parallel=True, vocab_size=256),
]
CASES = (
    "--microbatches 4",
    "--recompute full --microbatches 2",
    "--dp 2 --zero-stage 3 --microbatches 4",
    "--tp 2 --sequence-parallel --microbatches 4",
    "--pp 2 --schedule gpipe --microbatches 4",
    "--dp 8 --zero-stage 1",
    "--tp 8",
    "--pp 8 --schedule 1f1b --microbatches 12",
    "--pp 4 --schedule zb-h1 --microbatches 8",
    "--dp 2 --tp 2 --pp 2 --zero-stage 2 --microbatches 4",
)


def measured_pieces(number: int) -> dict[str, float]:
    """Measure the CPU seconds of each piece of a training step, for one of SHAPES."""
    return pieces(SHAPES[number], 3)


def state_of_the_machine(ranks: int) -> str:
    """Return a line that says what a measurement shares this machine's cores with."""
    load, _, _ = os.getloadavg()
    return f"{ranks} ranks on {os.cpu_count()} cores; in the last minute {load:.1f} processes wanted one on average"


def cases(ranks: int) -> dict[str, TrainConfig]:
    """Return {flags: configuration} of CASES that so many ranks can run."""
    resolved = {flags: configured(flags, GPT_MIDDLE, SAMPLES) for flags in CASES}
    return {flags: config for flags, (config, size) in resolved.items() if size <= ranks}


def panels(
    modelled: Mapping[str, tuple[float, float]], rows: Sequence[Mapping[str, float]]
) -> dict[str, list[tuple[float, float]]]:
    """Return (predicted, measured) of all runs, for a figure: seconds on both clocks, and bytes of this machine's.

    modelled  {flags: (predicted, run) seconds};  rows  those of `minipar.bench layouts`, with their predictions
    """
    return {
        "a step on the model clock, ms": [(1e3 * ours, 1e3 * run) for ours, run in modelled.values()],
        "a step on the CPU clock, ms": [(1e3 * row["predicted_seconds"], 1e3 * row["seconds"]) for row in rows],
        "memory in the ledger, MB": [(row["predicted_bytes"] / 1e6, row["peak_bytes"] / 1e6) for row in rows],
    }
