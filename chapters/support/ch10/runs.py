"""Predict runs of minipar on the model clock and on this machine."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import gcd

import numpy as np

from chapters.support.training import parsed
from minipar.bench.costs import Shape
from minipar.bench.layouts import layout_of, ranks_of, shape_of
from minipar.bench.machine import pieces
from minipar.bench.pipeline import random_tokens
from minipar.comm import Communicator, DeviceMesh, ModelClock, Network, run_local
from minipar.plan.cluster import AlphaBeta, Cluster, model_clock_cluster
from minipar.plan.step_time import StepTime, step_time
from minipar.train.trainer import Trainer

SPEED = 1e10  # operations per second of a modelled device
INSIDE = AlphaBeta(3e-6, 1 / 2e9)  # messages in a host
BETWEEN = AlphaBeta(14e-6, 1 / 0.5e9)  # messages between hosts
GPT_SMALL = "--layers 8 --hidden 48 --heads 24 --seq-len 24 --vocab-size 96"
GPT_TINY = "--layers 4 --hidden 32 --heads 4 --seq-len 16 --vocab-size 64"

FAR = (  # layouts for 64 ranks
    "--dp 64 --zero-stage 3 --microbatches 2",
    "--dp 4 --tp 4 --pp 4 --zero-stage 1 --sequence-parallel --microbatches 4",
)


# ---- the model clock -------------------------------------------------------------------------------------------------


def args_of(flags: str, model: str = GPT_SMALL, samples: int | None = None) -> Namespace:
    """Return the flags of a layout and of this model, read, on as many ranks as the layout has.

    A microbatch has one sample unless `samples`, the global batch, says otherwise.
    """
    words = flags.split()
    given = dict(pairwise(words))
    samples = samples or int(given.get("--dp", 1)) * int(given.get("--microbatches", 1))
    return parsed(f"{flags} {model} --global-batch {samples}", ranks_of(words))


def planned(args: Namespace, machine: Cluster) -> StepTime:
    """Predict a step of this run."""
    return step_time(shape_of(args), layout_of(args), machine, args.seq_len)


def modelled(ranks: int, per_host: int, speed: float = SPEED) -> Cluster:
    """Return the cluster that the model clock shows, with this module's links."""
    return model_clock_cluster(ranks, speed, INSIDE, BETWEEN, per_host)


def run_on_the_model_clock(comm: Communicator, args: Namespace, machine: Cluster) -> float:
    """Train one step on the ranks of `comm`, and return its seconds on the model clock: those of the last rank."""
    between = Network(BETWEEN.alpha, BETWEEN.beta)
    network = Network(INSIDE.alpha, INSIDE.beta, between, machine.per_host)
    timed = Communicator(comm.transport, clock=ModelClock(machine.gpu.peak), network=network)
    trainer = Trainer(args, DeviceMesh(timed, tp=args.tp, pp=args.pp), random_tokens(args))
    trainer.step(0)
    return float(max(np.frombuffer(b"".join(comm.all_gather_bytes(np.array([timed.clock.now()]).tobytes())))))


def modelled_step(args: Namespace, cluster: Cluster) -> float:
    """Return the seconds of one training step of parsed flags on a `model_clock_cluster`.

    They count from the common start until the last rank is done.
    """
    inside, between = cluster.inside, cluster.between
    network = Network(inside.alpha, inside.beta, Network(between.alpha, between.beta), cluster.per_host)

    def step(comm: Communicator) -> float:
        mesh = DeviceMesh(comm, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep)
        trainer = Trainer(args, mesh, random_tokens(args))
        start = comm.clock.now()
        trainer.step(0)
        return comm.clock.now() - start

    return max(run_local(cluster.gpus, step, clock=lambda: ModelClock(cluster.gpu.peak), network=network))


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
    args = args_of(flags, GPT_TINY)
    machine = modelled(layout_of(args).gpus, 8, SPEED / 10)
    return planned(args, machine).total, modelled_step(args, machine)


# ---- this machine ----------------------------------------------------------------------------------------------------

GPT_MIDDLE = "--layers 8 --hidden 128 --heads 8 --seq-len 32 --vocab-size 256"
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


def cases(ranks: int) -> dict[str, Namespace]:
    """Return those of CASES that so many ranks can run, and their flags, read."""
    found = {flags: args_of(flags, GPT_MIDDLE, SAMPLES) for flags in CASES}
    return {flags: args for flags, args in found.items() if layout_of(args).gpus <= ranks}


def panels(
    modelled: Mapping[str, tuple[float, float]], rows: Sequence[Mapping[str, float]]
) -> dict[str, list[tuple[float, float]]]:
    """Return (predicted, measured) of all runs, for a figure: seconds on both clocks, and bytes of this machine's.

    modelled  {flags: (predicted, run) seconds};  rows  those of `minipar.bench.layouts.measure`, with their predictions
    """
    return {
        "a step on the model clock, ms": [(1e3 * ours, 1e3 * run) for ours, run in modelled.values()],
        "a step on the CPU clock, ms": [(1e3 * row["predicted_seconds"], 1e3 * row["seconds"]) for row in rows],
        "memory in the ledger, MB": [(row["predicted_bytes"] / 1e6, row["peak_bytes"] / 1e6) for row in rows],
    }
