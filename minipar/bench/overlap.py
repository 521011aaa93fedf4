"""What synchronization costs a data-parallel step: wall time beside the CPU time that computation alone takes.

On a machine with c cores, N ranks that each compute for s CPU seconds need at least N s / c seconds; `ratio` is the
measured wall time over that. Three kinds of step take turns: no synchronization at all (which gives s), one all-reduce
after backward (naive), and buckets that start during backward.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.bench.report import publish
from minipar.comm import Communicator
from minipar.errors import UsageError
from minipar.nn import GPT, AdamW, GPTConfig
from minipar.parallel import DistributedDataParallel, all_reduce_gradients

HELP = "wall time of a data-parallel step beside the CPU time of its computation"
COLUMNS = ("sync", "ranks", "cores", "layers", "hidden", "batch", "wall_seconds", "cpu_seconds", "ratio")
WARMUP = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench overlap`."""
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON (- for standard output)")
    parser.add_argument("--layers", type=int, default=4, help="Transformer layers (4)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (256)")
    parser.add_argument("--heads", type=int, default=8, help="attention heads (8)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sample (128)")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank")
    parser.add_argument("--repeat", type=int, default=7, help="steps measured of each kind")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """One row for each way to synchronize."""
    if args.repeat < 1 or args.batch < 1:
        raise UsageError(f"--repeat {args.repeat} --batch {args.batch}: expected at least 1 of each")
    try:
        config = GPTConfig(256, args.seq_len, args.hidden, args.layers, args.heads)
    except ValueError as error:
        raise UsageError(str(error)) from None
    publish(comm, measure(comm, config, args.batch, args.repeat), COLUMNS, args.json)


def measure(comm: Communicator, config: GPTConfig, batch: int, repeat: int) -> list[dict[str, Any]]:
    """Rows for "naive" and "buckets". Collective. cpu_seconds: medians of the steps without synchronization, all ranks
    together.
    """
    random = np.random.Generator(np.random.Philox(comm.rank))
    inputs, targets = random.integers(0, config.vocab_size, (2, batch, config.n_positions))
    model = GPT(config)
    ddp = DistributedDataParallel(model, comm)
    optimizer = AdamW(model.parameters())

    def step(sync: str) -> None:
        model.zero_grad()
        loss = model.loss(inputs, targets)
        if sync == "buckets":
            loss.backward()
            ddp.synchronize()
        else:
            with ddp.no_sync():
                loss.backward()
            if sync == "naive":
                all_reduce_gradients(ddp.buffers, comm)
        optimizer.step()

    wall: dict[str, list[float]] = {"none": [], "naive": [], "buckets": []}
    cpu: list[float] = []
    for i in range(WARMUP + repeat):
        for sync, seconds in wall.items():
            wall_seconds, cpu_seconds = _timed(comm, lambda sync=sync: step(sync))  # type: ignore[misc]
            if i >= WARMUP:
                seconds.append(wall_seconds)
                if sync == "none":
                    cpu.append(cpu_seconds)
    total = float(comm.all_reduce(np.array([np.median(cpu)]))[0])
    cores = min(len(os.sched_getaffinity(0)), comm.size)
    rows = []
    for sync in ("naive", "buckets"):
        slowest = float(comm.all_reduce(np.array([np.median(wall[sync])]), op="max")[0])
        rows.append(
            {
                "sync": sync,
                "ranks": comm.size,
                "cores": cores,
                "layers": config.n_layer,
                "hidden": config.n_embd,
                "batch": batch,
                "wall_seconds": slowest,
                "cpu_seconds": total,
                "ratio": slowest / (total / cores),
            }
        )
    return rows


def _timed(comm: Communicator, call: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds until every rank is done, this rank's CPU seconds)."""
    comm.barrier()
    start, cpu_start = time.perf_counter(), time.thread_time()
    call()
    cpu = time.thread_time() - cpu_start
    comm.barrier()
    return time.perf_counter() - start, cpu
