"""Predictions of the planner next to minipar's own steps.

layouts    one model in many layouts on this machine: the time of a step on the `cpu` clock, and each rank's peak in
           the memory ledger. With the constants of `bench machine`, each row has the prediction too.
modelled   one layout on a modelled cluster: the ranks are threads on the `model` clock. All products are computed
           and all messages carry their values; only the time is modelled.

       python -m minipar.bench modelled --gpus-per-node 8 -- --dp 8 --tp 4 --pp 2 --layers 8 --microbatches 8 ...
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from minipar.autograd.attention import keeps_scores
from minipar.bench import add_model_flags, publish
from minipar.bench.costs import Machine, load_machine
from minipar.bench.pipeline import random_tokens
from minipar.comm.clock import ModelClock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.comm.threads import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import MixtralConfig
from minipar.parallel.memory import precision_of
from minipar.plan.cluster import AlphaBeta, Assumptions, Cluster, Gpu, model_clock_cluster
from minipar.plan.layout import MINIPAR, Framework, Layout
from minipar.plan.model import LLAMA, ModelShape
from minipar.plan.rank_bytes import Memory, memory
from minipar.plan.step_time import StepTime, step_time
from minipar.train import config as configurations
from minipar.train.config import check_settings, parse, resolve, schedule_of
from minipar.train.settings import DataConfig, ModelConfig, RunConfig, TrainConfig
from minipar.train.trainer import Trainer

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
MESH_SETTINGS = ("dp", "tp", "pp", "zero_stage", "zero_replicas", "sequence_parallel", "sync_every_microbatch")
MODEL_SIZES = ("layers", "hidden", "heads", "seq_len", "vocab_size")
NETWORK = Network(alpha=20e-6, beta=1e-9)
RECORDED = 2  # steps with the ledger: the second begins with all that the first one left
WARMUP = 1  # unmeasured step: meanwhile other models have taken the memory that the recorded steps had left
# An A100's rate in large products; its links at 0.8 of the data sheet's bandwidth (plan/cluster.py).
FLOPS, INSIDE, BETWEEN = 234e12, (3.4e-6, 1 / 240e9), (14e-6, 1 / 20e9)
MOST_RANKS = 1024  # threads


# ---- minipar's configurations in the planner's terms -----------------------------------------------------------------


def shape_of(config: TrainConfig) -> ModelShape:
    """Return the model of a configuration."""
    shape = configurations.shape_of(config.model)
    is_llama = shape.model_type != "gpt2"
    return ModelShape(
        shape.n_layer,
        shape.n_embd,
        shape.n_head,
        shape.vocab_size,
        positions=0 if is_llama else shape.n_positions,
        kv_heads=shape.n_kv_head,
        ffn=shape.n_inner,
        tied=shape.tie_word_embeddings,
        experts=shape.num_local_experts if isinstance(shape, MixtralConfig) else None,
        top_k=shape.num_experts_per_tok if isinstance(shape, MixtralConfig) else 1,
        **(LLAMA if is_llama else {}),
    )


def layout_of(config: TrainConfig) -> Layout:
    """Return the layout of a resolved configuration."""
    mesh, data = config.mesh, config.data
    assert mesh.dp is not None, "resolve() fills dp in"
    schedule = mesh.schedule or "1f1b"
    stored = keeps_scores(config.run.attention, config.model.seq_len, drops=config.optimizer.dropout > 0)
    return Layout(
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        microbatch=data.global_batch // (mesh.dp * data.microbatches),
        microbatches=data.microbatches,
        zero=mesh.zero_stage,
        zero_replicas=mesh.zero_replicas,
        schedule=schedule,
        virtual_stages=(mesh.virtual_stages or 2) if schedule == "interleaved-1f1b" else 1,
        sequence_parallel=mesh.sequence_parallel,
        recompute=config.run.recompute,
        attention="stored" if stored else "flash",
        precision=precision_of(config.run.dtype, config.run.gradients),
        cp=mesh.cp,
        context_parallel=mesh.context_parallel,
        cp_order=mesh.cp_order,
        ep=mesh.ep,
        etp=mesh.etp,
    )


def framework_of(config: TrainConfig) -> Framework:
    """Return minipar's habits as this configuration runs it."""
    return replace(MINIPAR, every_microbatch=config.mesh.sync_every_microbatch)


def predict(config: TrainConfig, machine: Machine, length: int) -> tuple[StepTime, Memory]:
    """Predict a step of a resolved configuration on the `cpu` clock, and the memory of the fullest rank."""
    layout, network, framework = layout_of(config), machine.network, framework_of(config)
    speed = 1 / network.beta if network.beta else inf
    cluster = Cluster(
        gpu=Gpu(peak=machine.costs.flops_per_second, memory=inf, memory_bandwidth=inf, inside=speed, between=speed),
        gpus=layout.gpus,
        per_host=layout.gpus,
        assumptions=Assumptions(links=1.0, alpha_inside=network.alpha, contention=0.0),
        framework=framework,
        measured=machine.costs.compute,
    )
    model = shape_of(config)
    return step_time(model, layout, cluster, length), memory(model, layout, length, framework)


@dataclass(frozen=True)
class Agreement:
    """The agreement of predictions with several measured layouts.

    median, largest, memory_largest: relative errors of seconds and of peak memory. spearman: the rank correlation of
    predicted with measured seconds; 1 means the same order.
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
    """Compare two or more rows' seconds and peak_bytes with their predicted_seconds and predicted_bytes."""
    measured, predicted = (np.array([row[key] for row in rows]) for key in ("seconds", "predicted_seconds"))
    held, planned = (np.array([row[key] for row in rows]) for key in ("peak_bytes", "predicted_bytes"))
    errors = np.abs(predicted / measured - 1)
    order, planned_order = (np.argsort(np.argsort(each)) for each in (measured, predicted))
    return Agreement(
        median=float(np.median(errors)),
        largest=float(errors.max()),
        spearman=float(np.corrcoef(order, planned_order)[0, 1]),
        memory_largest=float(np.abs(planned / held - 1).max()),
    )


# ---- layouts ---------------------------------------------------------------------------------------------------------


def add_layouts_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench layouts`."""
    add_model_flags(parser, layers=8, hidden=256, heads=8, seq_len=64, vocab_size=256)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step, over all replicas (32)")
    parser.add_argument("--machine", metavar="FILE", help="of `bench machine --json FILE`: predict each layout with it")
    parser.add_argument("--network", type=float, nargs=2, metavar=("ALPHA", "BETA"),
                        help="seconds per message and per byte (measured with --machine, else 20e-6 1e-9)")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=5, help="steps measured of each layout (5)")


def run_layouts(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure the time of a step and the peak memory of each rank, in many layouts of one model."""
    machine = load_machine(args.machine) if args.machine else None
    network = NETWORK if machine is None else machine.network
    if args.network is not None:
        network = Network(*args.network)
    if args.repeat < 1 or min(network.alpha, network.beta) < 0:
        raise UsageError(
            f"--repeat {args.repeat} --network {network.alpha:g} {network.beta:g}: expected at least 1, and no negative"
        )
    model = ModelConfig(args.layers, args.hidden, args.heads, args.seq_len, args.vocab_size)
    resolved = configs(model, args.global_batch, comm.size)
    rows = measure(comm, resolved, args.repeat, network)
    if machine is not None and comm.rank == 0:  # no other rank has seen every layout
        for row, config in zip(rows, resolved, strict=True):
            time, held = predict(config, replace(machine, network=network), args.seq_len)
            row |= {"predicted_seconds": time.total, "ratio": time.total / row["seconds"]}
            row |= {"predicted_bytes": held.total, "bytes_ratio": held.total / row["peak_bytes"]}
    not_shown = ("sync_every_microbatch", "virtual_stages", *MODEL_SIZES, "global_batch", "ranks_peak_bytes")
    publish(comm, rows, args.json, hidden=not_shown)
    if machine is not None and comm.rank == 0 and args.json != "-":
        print(f"{len(rows)} layouts: {agreement(rows)}")


def configs(model: ModelConfig, global_batch: int, ranks: int) -> list[TrainConfig]:
    """Return LAYOUTS of this model on at most `ranks` ranks. UsageError if the model or batch does not fit one."""
    resolved = []
    for flags in LAYOUTS:
        parsed = parse(flags.split())
        size = (parsed.mesh.dp or 1) * parsed.mesh.tp * parsed.mesh.pp
        if size > ranks:
            continue
        config = replace(parsed, model=model, data=replace(parsed.data, global_batch=global_batch))
        check_settings(config)
        stages = schedule_of(config).stages if config.mesh.pp > 1 else 1
        if model.layers < stages:  # raised on every rank; a Trainer would raise it on those of this layout alone
            raise UsageError(f"--layers {model.layers} are fewer than the {stages} stages of the layout {flags}")
        resolved.append(resolve(config, size))
    return resolved


def measure(comm: Communicator, configs: Sequence[TrainConfig], repeat: int, network: Network) -> list[dict[str, Any]]:
    """Measure a row for each layout. Collective over `comm`; each resolved config has no more ranks than `comm`.

    A layout of n ranks runs on the first n while the others wait. On the `cpu` clock a rank's time is its own CPU time
    between communication calls, and a message takes alpha + beta*bytes, so that ranks which share cores show the time
    of as many cores with that network. The layouts alternate step by step, so that other load affects all of them.

    seconds       of a step, from a moment that is the same on all ranks to the last rank's end; median over `repeat`
                  steps (seconds_min, seconds_max: over the same)
    peak_bytes    of the fullest rank; ranks_peak_bytes: of each, from the ledger in RECORDED steps before the others
    """
    timed = Communicator(comm.transport, clock="cpu", network=network)
    worlds: dict[int, Communicator | None] = {}
    trainers: list[Trainer | None] = []
    peaks = np.zeros((comm.size, len(configs)))
    for j, config in enumerate(configs):
        size = layout_of(config).gpus
        if size not in worlds:
            worlds[size] = timed.split(0 if comm.rank < size else None, "world")
        world, ledger, trainer = worlds[size], MemoryLedger(), None
        with ledger.recording():
            if world is not None:  # a fresh mesh: scratch buffers belong to communicators
                mesh = DeviceMesh(world, config.mesh.dp, config.mesh.tp, config.mesh.pp)
                trainer = Trainer(config, mesh, random_tokens(config))
                for step in range(RECORDED):
                    trainer.step(step)
        trainers.append(trainer)
        peaks[comm.rank, j] = ledger.peak
    seconds = np.zeros((WARMUP + repeat, len(configs)))
    for i in range(WARMUP + repeat):
        for j, trainer in enumerate(trainers):
            comm.barrier()  # ranks without a part in a layout leave the cores to the others
            if trainer is not None:
                seconds[i, j] = _step_seconds(trainer, RECORDED + i)
    comm.all_reduce(peaks)
    return [_row(config, seconds[WARMUP:, j], peaks[:, j].astype(int).tolist()) for j, config in enumerate(configs)]


def _step_seconds(trainer: Trainer, step: int) -> float:
    """Return the seconds of one step, the same value on all of its ranks."""
    world = trainer.mesh.world
    start = _latest(world)
    world.clock.resume(start)
    trainer.step(step)
    return _latest(world) - start


def _latest(world: Communicator) -> float:
    """Return the clock of the rank that is furthest ahead. The exchange takes no time on it."""
    now = np.array([world.clock.now()])
    return max(float(np.frombuffer(each)[0]) for each in world.all_gather_bytes(now.tobytes()))


def _row(config: TrainConfig, seconds: np.ndarray, peaks: list[int]) -> dict[str, Any]:
    mesh, ranks = config.mesh, layout_of(config).gpus
    schedule = schedule_of(config) if mesh.pp > 1 else None
    return {
        "ranks": ranks,
        **{setting: getattr(mesh, setting) for setting in MESH_SETTINGS},
        "schedule": None if schedule is None else schedule.name,
        "virtual_stages": 1 if schedule is None else schedule.stages // mesh.pp,
        "microbatches": config.data.microbatches,
        "recompute": config.run.recompute,
        **{size: getattr(config.model, size) for size in MODEL_SIZES},
        "global_batch": config.data.global_batch,
        "seconds": float(np.median(seconds)),
        "seconds_min": float(seconds.min()),
        "seconds_max": float(seconds.max()),
        "peak_bytes": max(peaks[:ranks]),
        "ranks_peak_bytes": peaks[:ranks],
    }


# ---- modelled --------------------------------------------------------------------------------------------------------


def add_modelled_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench modelled`."""
    add = parser.add_argument
    add("--gpus-per-node", type=int, default=8, metavar="N", help="ranks in one host (8)")
    add("--flops", type=float, default=FLOPS, help="operations per second of a rank, in products (234e12)")
    pair: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("ALPHA", "BETA")}
    add("--inside", **pair, default=INSIDE, help="seconds per message and per byte in a host (an A100's)")
    add("--between", **pair, default=BETWEEN, help="the same between hosts")
    add("flags", nargs="*", metavar="-- FLAGS", help="of minipar.train: mesh, model, batch")


def run_modelled(comm: Communicator, args: argparse.Namespace) -> None:
    """Run a step of any layout on a modelled cluster of hosts, in one process, next to the prediction."""
    if comm.size > 1:
        raise UsageError(f"bench modelled makes its own ranks; mpirun started {comm.size}: run it without mpirun")
    parsed = parse(args.flags)
    data = DataConfig(global_batch=parsed.data.global_batch, microbatches=parsed.data.microbatches)
    run = RunConfig(recompute=parsed.run.recompute, dtype=parsed.run.dtype, reduction=parsed.run.reduction)
    if parsed != TrainConfig(parsed.mesh, parsed.model, data, run=run):
        raise UsageError(
            "bench modelled takes one step of random tokens: of minipar.train's flags those of mesh and model, "
            "--global-batch, --microbatches, --recompute and --dtype"
        )
    ranks = (parsed.mesh.dp or 1) * parsed.mesh.cp * parsed.mesh.tp * parsed.mesh.pp
    if ranks > MOST_RANKS or run.reduction != "ring":
        raise UsageError(f"{ranks} ranks, --reduction {run.reduction}: at most {MOST_RANKS}, and ring")
    if args.gpus_per_node < 1:
        raise UsageError(f"--gpus-per-node {args.gpus_per_node}: expected at least 1")
    values = args.flops, *args.inside, *args.between
    if min(values) <= 0:
        raise UsageError(f"--flops, --inside, --between {' '.join(f'{x:g}' for x in values)}: each must be above 0")
    config, per_host = resolve(parsed, ranks), min(args.gpus_per_node, ranks)
    cluster = model_clock_cluster(ranks, args.flops, AlphaBeta(*args.inside), AlphaBeta(*args.between), per_host)
    seconds = modelled_step(config, cluster)
    cluster = replace(cluster, framework=framework_of(config))
    time = step_time(shape_of(config), layout_of(config), cluster, config.model.seq_len)
    row = {
        "ranks": ranks,
        "hosts": -(-ranks // per_host),
        "dp": config.mesh.dp,
        "cp": config.mesh.cp,
        "ep": config.mesh.ep,
        "tp": config.mesh.tp,
        "etp": config.mesh.etp or config.mesh.tp,
        "pp": config.mesh.pp,
        "seconds": seconds,
        "predicted_seconds": time.total,
        "ratio": time.total / seconds,
        "compute": time.compute,
        **{f"exposed_{axis}": getattr(time, axis) for axis in ("tp", "cp", "ep", "pp", "dp")},
        "bubble": time.bubble,
    }
    publish(comm, [row], args.json)


def modelled_step(config: TrainConfig, cluster: Cluster) -> float:
    """Return the seconds of one training step of a resolved configuration on a `model_clock_cluster`.

    They count from the common start until the last rank is done.
    """
    inside, between = cluster.inside, cluster.between
    network = Network(inside.alpha, inside.beta, Network(between.alpha, between.beta), cluster.per_host)

    def step(comm: Communicator) -> float:
        mesh = DeviceMesh(comm, **{axis: getattr(config.mesh, axis) for axis in ("tp", "pp", "cp", "ep", "etp")})
        trainer = Trainer(config, mesh, random_tokens(config))
        start = comm.clock.now()
        trainer.step(0)
        return comm.clock.now() - start

    return max(run_local(cluster.gpus, step, clock=lambda: ModelClock(cluster.gpu.peak), network=network))
