"""One model in many layouts: the time of a step on the `cpu` clock, and each rank's peak in the memory ledger.

A rank's time is its own CPU time between communication calls, and a message takes alpha + beta*bytes, so that ranks
which share cores show what as many cores with that network would. A layout of n ranks runs on the first n; the others
wait. The layouts take turns, step by step, so that whatever else the machine does happens to all.

With the constants of `bench machine` each row also says what the planner predicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minipar.bench.pipeline import random_tokens
from minipar.bench.planned import agreement, load_machine, predict, ranks_of
from minipar.bench.report import publish
from minipar.comm import Communicator, DeviceMesh, Network
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.train.config import ModelConfig, TrainConfig, check, parse, resolve
from minipar.train.pipelined import schedule_of
from minipar.train.trainer import Trainer

HELP = "the time of a step and the peak memory of each rank, in many layouts of one model"
COLUMNS = (
    "ranks", "dp", "tp", "pp", "zero_stage", "schedule", "microbatches", "sequence_parallel", "recompute", "seconds",
    "seconds_min", "seconds_max", "peak_bytes",
)  # fmt: skip
PREDICTED = ("predicted_seconds", "ratio", "predicted_bytes", "bytes_ratio")
# As `python -m minipar.train` takes them.
LAYOUTS = (
    "",
    "--microbatches 4",
    "--recompute full --microbatches 2",
    "--dp 2",
    "--dp 2 --zero-stage 3 --microbatches 4",
    "--tp 2",
    "--tp 2 --sequence-parallel --microbatches 4",
    "--pp 2 --schedule gpipe --microbatches 4",
    "--dp 4 --zero-stage 1",
    "--dp 4 --zero-stage 2 --sync-every-microbatch --microbatches 2",
    "--dp 4 --zero-stage 3",
    "--tp 4",
    "--pp 4 --schedule naive --microbatches 4",
    "--pp 4 --schedule 1f1b --microbatches 8",
    "--pp 4 --schedule interleaved-1f1b --microbatches 8",
    "--pp 4 --schedule zb-h1 --microbatches 8",
    "--dp 2 --pp 2 --zero-stage 1 --microbatches 4",
    "--dp 8",
    "--dp 8 --zero-stage 3",
    "--tp 8",
    "--tp 8 --sequence-parallel --recompute full",
    "--pp 8 --schedule gpipe --microbatches 8",
    "--pp 8 --schedule 1f1b --microbatches 16",
    "--dp 4 --tp 2 --zero-stage 1",
    "--dp 2 --pp 4 --zero-stage 3 --microbatches 4",
    "--tp 2 --pp 4 --schedule zb-h1 --microbatches 8",
    "--dp 2 --tp 2 --pp 2 --zero-stage 2 --microbatches 4",
    "--dp 2 --tp 2 --pp 2 --sequence-parallel --recompute full --microbatches 4",
)
NETWORK = Network(20e-6, 1e-9)
RECORDED = 2  # steps with the ledger: the second begins with all that the first one left
WARMUP = 1  # round without: the models made meanwhile have taken the memory that these steps had left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench layouts`."""
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON (- for standard output)")
    parser.add_argument("--layers", type=int, default=8, help="Transformer layers (8)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (256)")
    parser.add_argument("--heads", type=int, default=8, help="attention heads (8)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens per sample (64)")
    parser.add_argument("--vocab-size", type=int, default=256, help="tokens that exist (256)")
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step, over all replicas (32)")
    parser.add_argument("--machine", metavar="FILE", help="of `bench machine --json FILE`: predict each layout with it")
    parser.add_argument("--network", type=float, nargs=2, metavar=("ALPHA", "BETA"),
                        help="seconds per message and per byte (measured with --machine, else 20e-6 1e-9)")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=5, help="steps measured of each layout")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """One row for each layout that these ranks are enough for."""
    machine = load_machine(args.machine) if args.machine else None
    network = NETWORK if machine is None else machine.network
    if args.network is not None:
        network = Network(*args.network)
    if args.repeat < 1 or min(network.alpha, network.beta) < 0:
        raise UsageError(
            f"--repeat {args.repeat} --network {network.alpha:g} {network.beta:g}: expected at least 1, and no negative"
        )
    model = ModelConfig(args.layers, args.hidden, args.heads, args.seq_len, args.vocab_size)
    asked = configs(model, args.global_batch, comm.size)
    rows = measure(comm, asked, args.repeat, network)
    if machine is None:
        publish(comm, rows, COLUMNS, args.json)
        return
    for row, config in zip(rows, asked, strict=True) if comm.rank == 0 else ():
        time, memory = predict(config, replace(machine, network=network), args.seq_len)
        row |= {"predicted_seconds": time.total, "ratio": time.total / row["seconds"]}
        row |= {"predicted_bytes": memory.total, "bytes_ratio": memory.total / row["peak_bytes"]}
    publish(comm, rows, COLUMNS + PREDICTED, args.json)  # rank 0's: it alone has seen every layout
    if comm.rank == 0 and args.json != "-":
        print(f"{len(rows)} layouts: {agreement(rows)}")


def configs(model: ModelConfig, global_batch: int, ranks: int) -> list[TrainConfig]:
    """LAYOUTS of this model on at most `ranks` ranks. UsageError where the model or the batch does not fit one."""
    found = []
    for flags in LAYOUTS:
        told = parse(flags.split())
        size = (told.mesh.dp or 1) * told.mesh.tp * told.mesh.pp
        if size <= ranks:
            config = replace(told, model=model, data=replace(told.data, global_batch=global_batch))
            check(config)
            stages = schedule_of(config).stages if config.mesh.pp > 1 else 1
            if model.layers < stages:  # said here on every rank; a Trainer would say it on those of this layout
                raise UsageError(f"--layers {model.layers} are fewer than the {stages} stages of the layout {flags}")
            found.append(resolve(config, size))
    return found


def measure(comm: Communicator, configs: Sequence[TrainConfig], repeat: int, network: Network) -> list[dict[str, Any]]:
    """A row for each layout. Collective over `comm`; each config has its dp, and no more ranks than `comm`.

    seconds: of a step on the `cpu` clock, from a moment that is the same on all ranks to the last rank's end, median
    over `repeat` steps (seconds_min, seconds_max: over the same). peak_bytes: of the fullest rank, and ranks_peak_bytes
    of each, from the memory ledger in two steps of their own, which the timed steps follow.
    """
    timed = Communicator(comm.transport, clock="cpu", network=network)
    worlds: dict[int, Communicator | None] = {}
    trainers: list[Trainer | None] = []
    ledgers = []
    for config in configs:
        size = ranks_of(config)
        if size not in worlds:
            worlds[size] = timed.split(0 if comm.rank < size else None, "world")
        world, ledger = worlds[size], MemoryLedger()
        with ledger.recording():
            trainer = None if world is None else _trainer(config, world)
            if trainer is not None:
                for step in range(RECORDED):
                    trainer.step(step)
        trainers.append(trainer)
        ledgers.append(ledger.peak)
    seconds = np.zeros((WARMUP + repeat, len(configs)))
    for i in range(WARMUP + repeat):
        for j, trainer in enumerate(trainers):
            comm.barrier()  # who has no part in a layout leaves the cores to the others
            if trainer is not None:
                seconds[i, j] = _step_seconds(trainer, RECORDED + i)
    peaks = np.zeros((comm.size, len(configs)))
    peaks[comm.rank] = ledgers
    comm.all_reduce(peaks)
    return [
        _row(config, seconds[WARMUP:, j], peaks[: ranks_of(config), j].astype(int).tolist())
        for j, config in enumerate(configs)
    ]


def _trainer(config: TrainConfig, world: Communicator) -> Trainer:
    """On a mesh of its own: rooms for messages belong to communicators, and would be another layout's."""
    mesh = DeviceMesh(world, config.mesh.dp, config.mesh.tp, config.mesh.pp)
    return Trainer(config, mesh, random_tokens(config))


def _step_seconds(trainer: Trainer, step: int) -> float:
    """One step, the same number on all of its ranks."""
    world = trainer.mesh.world
    start = _latest(world)
    world.clock.resume(start)
    trainer.step(step)
    return _latest(world) - start


def _latest(world: Communicator) -> float:
    """The clock of the rank that is furthest; asking takes no time on it."""
    now = np.array([world.clock.now()])
    return max(float(np.frombuffer(each)[0]) for each in world.all_gather_bytes(now.tobytes()))


def _row(config: TrainConfig, seconds: np.ndarray, peaks: list[int]) -> dict[str, Any]:
    mesh, model, data = config.mesh, config.model, config.data
    schedule = schedule_of(config) if mesh.pp > 1 else None
    return {
        "ranks": ranks_of(config),
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "zero_stage": mesh.zero_stage,
        "sync_every_microbatch": mesh.sync_every_microbatch,
        "schedule": None if schedule is None else schedule.name,
        "virtual_stages": 1 if schedule is None else schedule.stages // mesh.pp,
        "microbatches": data.microbatches,
        "sequence_parallel": mesh.sequence_parallel,
        "recompute": config.run.recompute,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "seq_len": model.seq_len,
        "vocab_size": model.vocab_size,
        "global_batch": data.global_batch,
        "seconds": float(np.median(seconds)),
        "seconds_min": float(seconds.min()),
        "seconds_max": float(seconds.max()),
        "peak_bytes": max(peaks),
        "ranks_peak_bytes": peaks,
    }
