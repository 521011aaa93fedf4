"""The ZeRO stages beside one another: a data-parallel training step of each, in turns, on the same ranks.

Stage 0 is the baseline of each `ratio`. Stage 3 is measured with and without prefetching the next unit's parameters.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from minipar.comm import Communicator
from minipar.nn import GPT, AdamW, GPTConfig
from minipar.parallel import DistributedDataParallel, ZeroStage3, shard

COLUMNS = ("zero_stage", "prefetch", "ranks", "layers", "hidden", "batch", "seconds", "ratio")
WARMUP = 1


def measure(comm: Communicator, config: GPTConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each stage. Collective; args.batch samples per rank. seconds: median over the steps of the time until
    the last rank is done."""
    random = np.random.Generator(np.random.Philox(comm.rank))
    inputs, targets = random.integers(0, config.vocab_size, (2, args.batch, config.n_positions))

    def make(stage: int, prefetch: bool) -> tuple[GPT, DistributedDataParallel, AdamW]:
        model = GPT(config, dtype=args.dtype, deferred=True)
        if stage == 3:
            ddp: DistributedDataParallel = ZeroStage3(model, comm, prefetch=prefetch)
        else:
            ddp = shard(model, comm, stage)
        return model, ddp, AdamW(ddp.optimized)

    def step(model: GPT, ddp: DistributedDataParallel, optimizer: AdamW) -> None:
        ddp.zero_grad()
        model.loss(inputs, targets).backward()
        ddp.synchronize()
        optimizer.step()
        ddp.refresh_parameters()

    kinds = [(0, False), (1, False), (2, False), (3, True), (3, False)]
    made = [make(*kind) for kind in kinds]
    times = np.zeros((WARMUP + args.repeat, len(kinds)))
    for row in times:
        for i, parts in enumerate(made):
            comm.barrier()
            start = time.perf_counter()
            step(*parts)
            comm.barrier()
            row[i] = time.perf_counter() - start
    comm.all_reduce(times, op="max")
    seconds = np.median(times[WARMUP:], axis=0)
    return [
        {
            "zero_stage": stage,
            "prefetch": prefetch if stage == 3 else None,
            "ranks": comm.size,
            "layers": config.n_layer,
            "hidden": config.n_embd,
            "batch": args.batch,
            "seconds": float(seconds[i]),
            "ratio": float(seconds[i] / seconds[0]),
        }
        for i, (stage, prefetch) in enumerate(kinds)
    ]
