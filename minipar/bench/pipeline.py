"""Measured bubbles next to predicted ones: a training step of each schedule, all ranks as one pipeline.

The clock is `cpu`: a rank's time is its own CPU time, and messages carry it along, so that ranks which share cores show
the bubble that as many cores would. Messages cost nothing. The schedules alternate step by step, so that other load on
the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from minipar.bench import add_model_flags, check_positive, publish
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.comm.trace import start_trace
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, Schedule, Slot, Time, Timeline, parse_action, simulate
from minipar.train.data import Tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
VOCABULARY = 32  # few tokens: the head then adds next to nothing to the last stage, and the stages are equal
WARMUP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench pipeline`."""
    parser.add_argument("--layers", type=int, help="Transformer layers (2 per rank)")
    add_model_flags(parser, hidden=256, heads=8, seq_len=64)
    parser.add_argument("--batch", type=int, default=8, help="samples per microbatch (8)")
    parser.add_argument("--microbatches", type=int, help="microbatches per step (as many as ranks)")
    parser.add_argument("--repeat", type=int, default=3, help="steps measured of each schedule (3)")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure the bubble of each pipeline schedule on two ranks or more, simulate it, and give its closed form."""
    if comm.size < 2:
        raise UsageError("bench pipeline needs at least 2 ranks: mpirun -n 8 python -m minipar.bench pipeline")
    if args.microbatches is None:
        args.microbatches = comm.size
    check_positive(args, "repeat", "batch", "microbatches")
    layers = 2 * comm.size if args.layers is None else args.layers
    sizes = f"--layers {layers} --hidden {args.hidden} --heads {args.heads} --seq-len {args.seq_len}"
    batch = f"--global-batch {args.batch * args.microbatches} --microbatches {args.microbatches}"
    runs = {}
    for name in SCHEDULES:
        flags = f"--pp {comm.size} --schedule {name} {sizes} --vocab-size {VOCABULARY} {batch}"
        runs[name] = parse(flags.split(), comm.size)
    publish(comm, measure(comm, runs, args.repeat), args.json, hidden=["layers", "hidden", "batch"])


def measure(comm: Communicator, runs: dict[str, argparse.Namespace], repeat: int) -> list[dict[str, Any]]:
    """Measure a row for each schedule; only rank 0 returns rows. Collective.

    Bubbles (idle / total) and seconds, from the first action of a step to the last, are medians over the steps.
    """
    timed = Communicator(comm.transport, clock="cpu")
    mesh = DeviceMesh(timed, pp=comm.size)
    # All of them first: too few layers for one schedule's stages show before any time is spent on another's steps.
    trainers = {name: Trainer(args, mesh, random_tokens(args)) for name, args in runs.items()}
    schedules = {name: trainer.executor.schedule for name, trainer in trainers.items()}
    steps: dict[str, list[Timeline]] = {name: [] for name in runs}
    for step in range(WARMUP + repeat):
        for name, trainer in trainers.items():
            start_trace(timed)
            trainer.step(step)
            timeline = _timeline(timed, schedules[name])
            if step >= WARMUP:
                steps[name].append(timeline)
    if comm.rank != 0:
        return []
    return [_row(runs[name], schedules[name], timelines) for name, timelines in steps.items()]


def random_tokens(args: argparse.Namespace) -> Tokens:
    """Return a random text for the model's vocabulary, the same on every rank."""
    random = np.random.Generator(np.random.Philox(0))
    ids = random.integers(0, args.vocab_size, 64 * args.seq_len + 1, dtype=np.uint16)
    return Tokens(ids, "random tokens")


def _timeline(comm: Communicator, schedule: Schedule) -> Timeline:
    """Return the actions of all ranks since `start_trace`."""
    names = {str(action) for action in schedule.ranks[comm.rank]}
    events = [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in comm.tracer.events if e["name"] in names]
    everyone = comm.all_gather_bytes(json.dumps(events).encode())
    ranks = [[Slot(parse_action(name), start, end) for name, start, end in json.loads(data)] for data in everyone]
    return timeline_of(schedule.name, ranks)


def timeline_of(name: str, ranks: Sequence[Sequence[Slot]]) -> Timeline:
    """Return the timeline of a measured step from each rank's slots; time 0 is the start of the first action."""
    begin = min(slot.start for row in ranks for slot in row)
    slots = tuple(tuple(Slot(slot.action, slot.start - begin, slot.end - begin) for slot in row) for row in ranks)
    return Timeline(Schedule.of(name, [[slot.action for slot in row] for row in ranks]), slots)


def mean_durations(timeline: Timeline) -> Durations:
    """Return the mean time of each kind of action, stage by stage."""
    times: dict[tuple[int, str], list[Time]] = defaultdict(list)
    for row in timeline.ranks:
        for slot in row:
            times[slot.action.stage, slot.action.kind].append(slot.end - slot.start)
    return Durations(table={key: sum(values) / len(values) for key, values in times.items()})


def _row(args: argparse.Namespace, schedule: Schedule, steps: list[Timeline]) -> dict[str, Any]:
    bubbles = [float(step.bubble_fraction) for step in steps]
    simulated = [simulate(schedule, mean_durations(step)) for step in steps]
    return {
        "schedule": schedule.name,
        "ranks": len(schedule.ranks),
        "microbatches": schedule.microbatches,
        "layers": args.layers,
        "hidden": args.hidden,
        "batch": args.global_batch // args.microbatches,
        "bubble_measured": float(np.median(bubbles)),
        "bubble_min": min(bubbles),
        "bubble_max": max(bubbles),
        "bubble_simulated": float(np.median([float(timeline.bubble_fraction) for timeline in simulated])),
        "bubble_closed_form": float(simulate(schedule).bubble_fraction),  # F = I = W = 1, B = 2
        "seconds": float(np.median([float(step.makespan) for step in steps])),
    }
