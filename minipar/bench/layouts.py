"""Predictions of the planner next to minipar's own steps.

layouts    one model in many layouts on this machine: the time of a step on the `cpu` clock, and each rank's peak in
           the memory ledger. With the constants of `bench machine`, each row has the prediction too.
modelled   one layout on a modelled cluster: the ranks are threads on the `model` clock. All products are computed
           and all messages carry their values; only the time is modelled.

       python -m minipar.bench modelled --gpus-per-node 8 -- --dp 8 --tp 4 --pp 2 --layers 8 --microbatches 8 ...
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, prod
from typing import Any

import numpy as np

from minipar.autograd.attention import keeps_scores
from minipar.bench import add_model_flags, check_positive, publish
from minipar.bench.costs import Machine, load_machine
from minipar.bench.pipeline import random_tokens
from minipar.comm.clock import ModelClock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.comm.threads import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.more.experts.mixtral import MixtralConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.memory import precision_of
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedules import make
from minipar.plan.cluster import AlphaBeta, Assumptions, Cluster, Gpu, model_clock_cluster
from minipar.plan.layout import MINIPAR, Framework, Layout
from minipar.plan.model import LLAMA, ModelShape
from minipar.plan.rank_bytes import Memory, memory
from minipar.plan.step_time import StepTime, step_time
from minipar.train.flags import parse
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


# ---- minipar's runs in the planner's terms ---------------------------------------------------------------------------


def step_layout(args: Namespace, schedule: Schedule | None = None) -> StepLayout:
    """Return the layout of parsed flags for `predicted_traffic`; `schedule` replaces that of the flags."""
    if schedule is None and args.pp > 1:
        schedule = make(args.schedule, args.pp, args.microbatches, args.virtual_stages)
    itemsize = np.dtype(args.dtype).itemsize
    sums = max(4, itemsize)  # gradients of 2 bytes are added up, and summed over ranks, in float32
    return StepLayout(
        args.shape,
        length=args.seq_len,
        samples=args.global_batch // (args.dp * args.microbatches),
        microbatches=args.microbatches,
        itemsize=itemsize,
        gradient_itemsize=sums,
        reduce_itemsize=sums,
        dp=args.dp,
        cp=args.cp,
        ep=args.ep,
        tp=args.tp,
        pp=args.pp,
        zero_stage=args.zero_stage,
        zero_replicas=args.zero_replicas,
        schedule=schedule,
        context_parallel=args.context_parallel,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute == "full",
        reduction=args.reduction,
        sync_every_microbatch=args.sync_every_microbatch,
        aux_loss=args.shape.aux_coefficient,
    )


def shape_of(args: Namespace) -> ModelShape:
    """Return the model of parsed flags."""
    shape = args.shape
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


def layout_of(args: Namespace) -> Layout:
    """Return the planner's layout of parsed flags."""
    return Layout(
        dp=args.dp,
        tp=args.tp,
        pp=args.pp,
        microbatch=args.global_batch // (args.dp * args.microbatches),
        microbatches=args.microbatches,
        zero=args.zero_stage,
        zero_replicas=args.zero_replicas,
        schedule=args.schedule,
        virtual_stages=stages_of(args) // args.pp,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute,
        attention="stored" if keeps_scores("auto", args.seq_len, drops=args.dropout > 0) else "flash",
        precision=precision_of(args.dtype),
        cp=args.cp,
        context_parallel=args.context_parallel,
        ep=args.ep,
    )


def stages_of(args: Namespace) -> int:
    """Return the number of pipeline stages."""
    return make(args.schedule, args.pp, args.microbatches, args.virtual_stages).stages


def framework_of(args: Namespace) -> Framework:
    """Return minipar's habits in such a run."""
    return replace(MINIPAR, every_microbatch=args.sync_every_microbatch)


def predict(args: Namespace, machine: Machine) -> tuple[StepTime, Memory]:
    """Predict a step of parsed flags on the `cpu` clock, and the memory of the fullest rank."""
    layout, network, framework = layout_of(args), machine.network, framework_of(args)
    speed = 1 / network.beta if network.beta else inf
    cluster = Cluster(
        gpu=Gpu(peak=machine.costs.flops_per_second, memory=inf, memory_bandwidth=inf, inside=speed, between=speed),
        gpus=layout.gpus,
        per_host=layout.gpus,
        assumptions=Assumptions(links=1.0, alpha_inside=network.alpha, contention=0.0),
        framework=framework,
        measured=machine.costs.compute,
    )
    model = shape_of(args)
    return step_time(model, layout, cluster, args.seq_len), memory(model, layout, args.seq_len, framework)


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


def add_layouts_flags(parser: ArgumentParser) -> None:
    """Add the flags of `bench layouts`."""
    add_model_flags(parser, layers=8, hidden=256, heads=8, seq_len=64, vocab_size=256)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step, over all replicas (32)")
    parser.add_argument("--machine", metavar="FILE", help="of `bench machine --json FILE`: predict each layout with it")
    parser.add_argument("--network", type=float, nargs=2, metavar=("ALPHA", "BETA"),
                        help="seconds per message and per byte (measured with --machine, else 20e-6 1e-9)")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=5, help="steps measured of each layout (5)")


def run_layouts(comm: Communicator, args: Namespace) -> None:
    """Measure the time of a step and the peak memory of each rank, in many layouts of one model."""
    machine = load_machine(args.machine) if args.machine else None
    network = NETWORK if machine is None else machine.network
    if args.network is not None:
        network = Network(*args.network)
    check_positive(args, "repeat")
    sizes = " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in (*MODEL_SIZES, "global_batch"))
    runs = runs_of(sizes, comm.size)
    rows = measure(comm, runs, args.repeat, network)
    if machine is not None and comm.rank == 0:  # no other rank has seen every layout
        for row, run in zip(rows, runs, strict=True):
            time, held = predict(run, replace(machine, network=network))
            row |= {"predicted_seconds": time.total, "ratio": time.total / row["seconds"]}
            row |= {"predicted_bytes": held.total, "bytes_ratio": held.total / row["peak_bytes"]}
    not_shown = ("sync_every_microbatch", "virtual_stages", *MODEL_SIZES, "global_batch", "ranks_peak_bytes")
    publish(comm, rows, args.json, hidden=not_shown)
    if machine is not None and comm.rank == 0 and args.json != "-":
        print(f"{len(rows)} layouts: {agreement(rows)}")


def runs_of(sizes: str, ranks: int) -> list[Namespace]:
    """Return LAYOUTS of at most `ranks` ranks, parsed, with these flags of the model and the batch. UsageError."""
    runs = []
    for layout in LAYOUTS:
        size = ranks_of(layout.split())
        if size > ranks:
            continue
        args = parse(f"{layout} {sizes}".split(), size)
        stages = stages_of(args)
        if args.layers < stages:  # raised on every rank; a Trainer would raise it on those of this layout alone
            raise UsageError(f"--layers {args.layers} are fewer than the {stages} stages of the layout {layout}")
        runs.append(args)
    return runs


def ranks_of(words: Sequence[str]) -> int:
    """Return the product of the mesh's sizes in a command line of minipar.train, which says each at most once."""
    return prod(int(size) for flag, size in pairwise(words) if flag in ("--dp", "--tp", "--pp", "--cp"))


def measure(comm: Communicator, runs: Sequence[Namespace], repeat: int, network: Network) -> list[dict[str, Any]]:
    """Measure a row for each layout. Collective over `comm`; none has more ranks than `comm`.

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
    peaks = np.zeros((comm.size, len(runs)))
    for j, args in enumerate(runs):
        size = layout_of(args).gpus
        if size not in worlds:
            worlds[size] = timed.split(0 if comm.rank < size else None, "world")
        world, ledger, trainer = worlds[size], MemoryLedger(), None
        with ledger.recording():
            if world is not None:  # a fresh mesh: scratch buffers belong to communicators
                mesh = DeviceMesh(world, args.dp, args.tp, args.pp)
                trainer = Trainer(args, mesh, random_tokens(args))
                for step in range(RECORDED):
                    trainer.step(step)
        trainers.append(trainer)
        peaks[comm.rank, j] = ledger.peak
    seconds = np.zeros((WARMUP + repeat, len(runs)))
    for i in range(WARMUP + repeat):
        for j, trainer in enumerate(trainers):
            comm.barrier()  # ranks without a part in a layout leave the cores to the others
            if trainer is not None:
                seconds[i, j] = _step_seconds(trainer, RECORDED + i)
    comm.all_reduce(peaks)
    return [_row(args, seconds[WARMUP:, j], peaks[:, j].astype(int).tolist()) for j, args in enumerate(runs)]


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


def _row(args: Namespace, seconds: np.ndarray, peaks: list[int]) -> dict[str, Any]:
    ranks = layout_of(args).gpus
    return {
        "ranks": ranks,
        **{setting: getattr(args, setting) for setting in MESH_SETTINGS},
        "schedule": args.schedule if args.pp > 1 else None,
        "virtual_stages": stages_of(args) // args.pp,
        "microbatches": args.microbatches,
        "recompute": args.recompute,
        **{size: getattr(args, size) for size in MODEL_SIZES},
        "global_batch": args.global_batch,
        "seconds": float(np.median(seconds)),
        "seconds_min": float(seconds.min()),
        "seconds_max": float(seconds.max()),
        "peak_bytes": max(peaks[:ranks]),
        "ranks_peak_bytes": peaks[:ranks],
    }


# ---- modelled --------------------------------------------------------------------------------------------------------


def add_modelled_flags(parser: ArgumentParser) -> None:
    """Add the flags of `bench modelled`."""
    add = parser.add_argument
    add("--gpus-per-node", type=int, default=8, metavar="N", help="ranks in one host (8)")
    add("--flops", type=float, default=FLOPS, help="operations per second of a rank, in products (234e12)")
    pair: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("ALPHA", "BETA")}
    add("--inside", **pair, default=INSIDE, help="seconds per message and per byte in a host (an A100's)")
    add("--between", **pair, default=BETWEEN, help="the same between hosts")
    add("flags", nargs="*", metavar="-- FLAGS", help="of minipar.train: mesh, model, batch")


def run_modelled(comm: Communicator, args: Namespace) -> None:
    """Run a step of any layout on a modelled cluster of hosts, in one process, next to the prediction."""
    if comm.size > 1:
        raise UsageError(f"bench modelled makes its own ranks; mpirun started {comm.size}: run it without mpirun")
    ranks = ranks_of(args.flags)
    run = parse(args.flags, ranks)
    if ranks > MOST_RANKS or run.reduction == "tree":
        raise UsageError(f"{ranks} ranks, --reduction {run.reduction}: at most {MOST_RANKS}, and not tree")
    per_host = min(args.gpus_per_node, ranks)
    cluster = model_clock_cluster(ranks, args.flops, AlphaBeta(*args.inside), AlphaBeta(*args.between), per_host)
    seconds = modelled_step(run, cluster)
    time = step_time(shape_of(run), layout_of(run), replace(cluster, framework=framework_of(run)), run.seq_len)
    row = {
        "ranks": ranks,
        "hosts": -(-ranks // per_host),
        **{axis: getattr(run, axis) for axis in ("dp", "cp", "ep", "tp", "pp")},
        "seconds": seconds,
        "predicted_seconds": time.total,
        "ratio": time.total / seconds,
        "compute": time.compute,
        **{f"exposed_{axis}": getattr(time, axis) for axis in ("tp", "cp", "ep", "pp", "dp")},
        "bubble": time.bubble,
    }
    publish(comm, [row], args.json)


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
