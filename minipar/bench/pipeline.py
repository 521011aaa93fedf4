"""Measured bubbles next to predicted ones: a training step of each schedule, all ranks as one pipeline.

The clock is `cpu`: a rank's time is its own CPU time, and messages carry it along, so that ranks which share cores show
the bubble that as many cores would. Messages cost nothing. The schedules alternate step by step, so that other load on
the machine affects all of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from minipar.bench import add_sizes, largest, publish
from minipar.comm.chrome_trace import start_trace
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.parallel.pipeline.actions import Schedule, simulate
from minipar.train.data import Tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
VOCABULARY = 32  # few tokens: the head then adds next to nothing to the last stage, and the stages are equal
WARMUP = 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench pipeline`; each rank has 2 layers."""
    add_sizes(parser, hidden=256, heads=8, seq_len=64, batch=8, microbatches=8, repeat=3)


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure the bubble of each pipeline schedule on two ranks or more, next to its closed form."""
    sizes = f"--layers {2 * comm.size} --hidden {args.hidden} --heads {args.heads} --seq-len {args.seq_len}"
    batch = f"--global-batch {args.batch * args.microbatches} --microbatches {args.microbatches}"
    runs = {}
    for name in SCHEDULES:
        flags = f"--pp {comm.size} --schedule {name} {sizes} --vocab-size {VOCABULARY} {batch}"
        runs[name] = parse(flags.split(), comm.size)
    publish(comm, measure(comm, runs, args.repeat), args.json)


def measure(comm: Communicator, runs: dict[str, argparse.Namespace], repeat: int) -> list[dict[str, Any]]:
    """Measure a row for each schedule. Collective.

    Bubbles (idle / total) and seconds, from the first action of a step to the last, are medians over the steps.
    """
    timed = Communicator(comm.transport, clock="cpu")
    mesh = DeviceMesh(timed, pp=comm.size)
    trainers = {name: Trainer(args, mesh, random_tokens(args)) for name, args in runs.items()}
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for step in range(WARMUP + repeat):
        for name, trainer in trainers.items():
            start_trace(timed)
            trainer.step(step)
            steps[name].append(_bubble_and_seconds(timed, trainer.executor.schedule))
    rows = []
    for name, trainer in trainers.items():
        bubbles, seconds = np.array(steps[name][WARMUP:]).T
        row = {"schedule": name, "ranks": comm.size, "microbatches": runs[name].microbatches}
        row |= {"bubble_measured": float(np.median(bubbles))}
        row |= {"bubble_min": float(bubbles.min()), "bubble_max": float(bubbles.max())}
        # with F = I = W = 1, B = 2
        row["bubble_closed_form"] = float(simulate(trainer.executor.schedule).bubble_fraction)
        rows.append(row | {"seconds": float(np.median(seconds))})
    return rows


def _bubble_and_seconds(comm: Communicator, schedule: Schedule) -> tuple[float, float]:
    """Return the bubble of the step since `start_trace`, and its seconds. Collective."""
    names = {str(action) for action in schedule.ranks[comm.rank]}
    actions = [event for event in comm.tracer.events if event["name"] in names]
    begin = -largest(comm, -min(event["ts"] for event in actions))
    end = largest(comm, max(event["ts"] + event["dur"] for event in actions))
    busy = comm.all_reduce(np.array([sum(event["dur"] for event in actions)], np.float64))
    return 1 - float(busy[0]) / (comm.size * (end - begin)), (end - begin) / 1e6


def random_tokens(args: argparse.Namespace) -> Tokens:
    """Return a random text for the model's vocabulary, the same on every rank."""
    random = np.random.Generator(np.random.Philox(0))
    ids = random.integers(0, args.vocab_size, 64 * args.seq_len + 1, dtype=np.uint16)
    return Tokens(ids, "random tokens")
