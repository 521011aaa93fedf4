"""One model trained in many layouts with each order of sums: where the bits differ, and where they do not.

The ranks are threads of this process. For `--reduction ring` and `--reduction tree`, a row has a digest of the bits:
every loss, every gradient norm, and every parameter after the last step. One different bit gives another digest.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np

from minipar.bench import add_sizes, publish
from minipar.bench.layouts import ranks_of
from minipar.bench.pipeline import random_tokens
from minipar.comm.communicator import Communicator
from minipar.comm.mesh import DeviceMesh
from minipar.comm.threads import run_local
from minipar.train.flags import parse
from minipar.train.trainer import Trainer
from minipar.train.tree_trainer import TreeTrainer

LAYOUTS = (
    "",
    "--dp 2",
    "--dp 8",
    "--dp 4 --zero-stage 1",
    "--dp 4 --zero-stage 2 --zero-replicas 2",
    "--dp 8 --zero-stage 3",
    "--tp 2",
    "--tp 8",
    "--tp 8 --sequence-parallel",
    "--pp 2 --schedule gpipe",
    "--pp 4 --schedule zb-h1",
    "--pp 8",
    "--dp 4 --tp 2 --zero-stage 3",
    "--dp 2 --pp 4 --zero-stage 1",
    "--tp 4 --pp 2 --schedule zb-h1",
    "--dp 2 --tp 2 --pp 2 --zero-stage 2 --sequence-parallel --recompute full",
)
REDUCTIONS = ("ring", "tree")
SIZES = "--layers 8 --hidden 32 --heads 8 --seq-len 16 --vocab-size 64 --global-batch 8"
UPDATE = "--lr 1e-3 --lr-schedule cosine --weight-decay 0.1 --clip-grad 0.5"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench bits`."""
    add_sizes(parser, steps=20)


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Train one model in many layouts, and compare all bits with one device's, with `ring` and with `tree`."""
    rows = []
    for layout in LAYOUTS:
        row = {"layout": layout or "one device"}
        for reduction in REDUCTIONS:
            row[reduction] = train(f"{SIZES} {UPDATE} --steps {args.steps} {layout} --reduction {reduction}")
        rows.append(row)
    publish(comm, rows, args.json)


def train(flags: str) -> str:
    """Train on threads. Return a digest of all losses, norms and parameters."""
    ranks = ranks_of(flags.split())
    args = parse(flags.split(), ranks)
    tokens = random_tokens(args)
    kind = TreeTrainer if args.reduction == "tree" else Trainer

    def rank(comm: Communicator) -> str:
        trainer = kind(args, DeviceMesh(comm, tp=args.tp, pp=args.pp), tokens)
        digest = hashlib.sha256()
        for result in trainer.train():
            digest.update(np.array([result.loss, result.grad_norm]).tobytes())
        for name, value in sorted(trainer.state_dict().items()):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        return digest.hexdigest()[:8]

    return run_local(ranks, rank)[0]
