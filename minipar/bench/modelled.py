"""A modelled cluster: the training code itself, its ranks threads of one process, on the clock `model`.

Nothing is simulated but time: every product is computed and every message carries its numbers, while the clock charges
what the cluster would take. So the planner can be held against the program on clusters that nobody here has.

    python -m minipar.bench modelled --gpus-per-node 8 -- --dp 8 --tp 4 --pp 2 --layers 8 --microbatches 8 ...
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from minipar.bench.pipeline import random_tokens
from minipar.bench.planned import layout_of, program_of, ranks_of, shape_of
from minipar.bench.report import publish
from minipar.comm import Communicator, DeviceMesh, HostNetwork, ModelClock, Network, run_local
from minipar.errors import UsageError
from minipar.plan.machine import Cluster, Link, model_clock_cluster
from minipar.plan.time import step_time
from minipar.train.config import DataConfig, RunConfig, TrainConfig, parse, resolve
from minipar.train.trainer import Trainer

HELP = "in one process: a step of any layout on a cluster of hosts that is modelled, beside what the planner says"
COLUMNS = (
    "ranks", "hosts", "dp", "tp", "pp", "seconds", "predicted_seconds", "ratio", "compute", "exposed_tp", "exposed_pp",
    "exposed_dp", "bubble",
)  # fmt: skip
# An A100's rate in large products; its links at 0.8 of what is printed (plan/machine.py).
FLOPS, INSIDE, BETWEEN = 234e12, (3.4e-6, 1 / 240e9), (14e-6, 1 / 20e9)
MOST_RANKS = 1024  # threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench modelled`."""
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the row as JSON (- for standard output)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="ranks in one host (8)")
    add("--flops", type=float, default=FLOPS, help="operations per second of a rank, in products (234e12)")
    pair: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("ALPHA", "BETA")}
    add("--inside", **pair, default=INSIDE, help="seconds per message and per byte in a host (an A100's)")
    add("--between", **pair, default=BETWEEN, help="the same between hosts")
    add("flags", nargs="*", metavar="-- FLAGS", help="of minipar.train: mesh, model, batch")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """One row: measured on the clock, predicted, and the prediction's parts."""
    if comm.size > 1:
        raise UsageError(f"bench modelled makes its own ranks; mpirun started {comm.size}: run it without mpirun")
    told = parse(args.flags)
    seen = TrainConfig(
        told.mesh,
        told.model,
        replace(DataConfig(), global_batch=told.data.global_batch, microbatches=told.data.microbatches),
        run=replace(RunConfig(), recompute=told.run.recompute, dtype=told.run.dtype, reduction=told.run.reduction),
    )
    if told != seen:
        raise UsageError(
            "bench modelled takes one step of random tokens: of minipar.train's flags those of mesh and model, "
            "--global-batch, --microbatches, --recompute and --dtype"
        )
    ranks = (told.mesh.dp or 1) * told.mesh.tp * told.mesh.pp
    if ranks > MOST_RANKS or told.run.reduction != "ring":
        raise UsageError(f"{ranks} ranks, --reduction {told.run.reduction}: at most {MOST_RANKS}, and ring")
    if args.gpus_per_node < 1:
        raise UsageError(f"--gpus-per-node {args.gpus_per_node}: expected at least 1")
    if min(args.flops, *args.inside, *args.between) <= 0:
        named = " ".join(f"{number:g}" for number in (args.flops, *args.inside, *args.between))
        raise UsageError(f"--flops, --inside, --between {named}: each must be above 0")
    config = resolve(told, ranks)
    per_host = min(args.gpus_per_node, ranks)
    cluster = model_clock_cluster(ranks, args.flops, Link(*args.inside), Link(*args.between), per_host)
    publish(comm, [measure(config, cluster)], COLUMNS, args.json)


def measure(config: TrainConfig, cluster: Cluster) -> dict[str, Any]:
    """One row of a resolved configuration."""
    seconds = modelled_step(config, cluster)
    cluster = replace(cluster, program=program_of(config))
    time = step_time(shape_of(config), layout_of(config), cluster, config.model.seq_len)
    mesh, parts = config.mesh, asdict(time)
    return {
        "ranks": ranks_of(config),
        "hosts": -(-cluster.gpus // cluster.per_host),
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "seconds": seconds,
        "predicted_seconds": time.total,
        "ratio": time.total / seconds,
        "compute": time.compute,
        **{f"exposed_{axis}": parts[axis] for axis in ("tp", "pp", "dp")},
        "bubble": time.bubble,
    }


def modelled_step(config: TrainConfig, cluster: Cluster) -> float:
    """Seconds of one training step of a resolved configuration on a `plan.machine.model_clock_cluster`: from the common
    start until the last rank is done.
    """
    inside, between = cluster.inside, cluster.between
    network = HostNetwork(inside.alpha, inside.beta, Network(between.alpha, between.beta), cluster.per_host)

    def step(comm: Communicator) -> float:
        mesh = DeviceMesh(comm, tp=config.mesh.tp, pp=config.mesh.pp)
        trainer = Trainer(config, mesh, random_tokens(config))
        start = comm.clock.now()
        trainer.step(0)
        return comm.clock.now() - start

    return max(run_local(cluster.gpus, step, clock=lambda: ModelClock(cluster.gpu.peak), network=network))
