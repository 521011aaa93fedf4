"""The cost of an order of sums: a training step with `ordered` and with `tree`, next to one with `ring`.

On one rank a tree costs the products of blocks alone, and the gradients that are kept apart. The
three trainings take their steps in turn, so other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from minipar.bench import add_model_flags, check_positive, largest, publish
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.train.data import Tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer
from minipar.train.tree_trainer import TreeTrainer

REDUCTIONS = ("ring", "ordered", "tree")
WARMUP = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench reductions`."""
    add_model_flags(parser, layers=2, hidden=256, heads=8, seq_len=128, vocab_size=256)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the others are data-parallel (1)")
    parser.add_argument("--global-batch", type=int, default=8, help="samples per step (8)")
    parser.add_argument("--microbatches", type=int, default=1, help="per replica (1)")
    parser.add_argument("--repeat", type=int, default=7, help="steps measured (7)")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure a step and count its bytes with each order of sums, next to the ring."""
    check_positive(args, "repeat", "vocab_size")
    trainers = {reduction: trainer_for(comm, args, reduction) for reduction in REDUCTIONS}
    seconds: dict[str, list[float]] = {reduction: [] for reduction in trainers}
    sent: dict[str, int] = {}
    for step in range(WARMUP + args.repeat):
        for reduction, trainer in trainers.items():
            comm.barrier()
            before = comm.traffic.bytes()
            start = time.perf_counter()
            trainer.step(step)
            elapsed = time.perf_counter() - start
            sent[reduction] = comm.traffic.bytes() - before
            slowest = largest(comm, elapsed)
            if step >= WARMUP:
                seconds[reduction].append(slowest)
    rows = []
    for reduction in trainers:
        median = float(np.median(seconds[reduction]))
        rows.append(
            {
                "reduction": reduction,
                "ranks": comm.size,
                "tp": args.tp,
                "hidden": args.hidden,
                "microbatches": args.microbatches,
                "bytes": sent[reduction],
                "seconds": median,
                "ratio": median / float(np.median(seconds["ring"])),
            }
        )
    publish(comm, rows, args.json)


def trainer_for(comm: Communicator, args: argparse.Namespace, reduction: str) -> Trainer:
    """Make a trainer of the model and mesh that the flags describe, on random text."""
    names = "layers hidden heads seq_len vocab_size tp global_batch microbatches".split()
    words = ["--reduction", reduction, "--steps", str(WARMUP + args.repeat)]
    for name in names:
        words += ["--" + name.replace("_", "-"), str(vars(args)[name])]
    letters = np.random.default_rng(0).integers(0, args.vocab_size, 16 * args.seq_len)
    tokens = Tokens(letters.astype(np.uint16), "random text")
    kind = TreeTrainer if reduction == "tree" else Trainer
    return kind(parse(words, comm.size), DeviceMesh(comm, tp=args.tp), tokens)
