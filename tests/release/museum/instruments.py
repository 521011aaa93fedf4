"""The instruments that look at one run: a program that trains on threads and prints what they read, as JSON.

    python tests/release/museum/instruments.py [--resume-after K] [--record DIR] FLAGS...

Run with the PYTHONPATH of a copy of the tree, it looks at the copy's code. A pipeline's schedule is checked apart: the
run itself goes on without a check, as it would in a framework that has none.
"""

import argparse
import copy
import hashlib
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from training import config_for, ranks_of, trainer_for

from chapters.support.training import step_layout, step_traffic
from minipar.bench.layouts import framework_of, layout_of, shape_of
from minipar.comm import run_local
from minipar.compare.recorder import Recorder
from minipar.errors import UsageError
from minipar.memory import KINDS, MemoryLedger
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.placement import Shard
from minipar.parallel.predicted_memory import OF_DTYPE, model_state
from minipar.plan.rank_bytes import memory
from minipar.train import checkpoint
from minipar.train.data import Tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import OneDevice, verify

STEPS = 20
RECORDED = 2  # steps: compare stops at the first that differs
VOCAB = 61  # two tensor-parallel ranks pad it
MODEL = f"--layers 4 --hidden 24 --heads 4 --seq-len 8 --vocab-size {VOCAB} --global-batch 16 --lr 4e-3 --dtype float64"
STATE = KINDS[:3]  # parameters, gradients, optimizer
PLANNED = 0.10  # the planner's bytes are right within this


def text() -> Tokens:
    """Return a text that can be learned: each token is followed by one of four others."""
    random = np.random.Generator(np.random.Philox(17))
    followers = random.integers(0, VOCAB, (VOCAB, 4))
    ids = [0]
    for choice in random.integers(0, 4, 4000):
        ids.append(int(followers[ids[-1], choice]))
    return Tokens(np.array(ids, np.uint8), "a text")


def configuration(flags: str, steps: int = STEPS) -> Namespace:
    """Return the flags of a run of the small model."""
    return config_for(f"{MODEL} --steps {steps} {flags}")


def digests(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield a name and a digest for each array that other ranks hold too; the same name promises the same digest.

    Every data- and context-parallel rank holds its replica's parameters (ZeRO stages 0 to 2), but for other ranks'
    experts, every tensor-parallel rank those that are not split, those with copies of a head its values, and the last
    pipeline rank the token embedding.
    """
    place = trainer.mesh.coordinates
    for name, p in trainer.model.named_parameters():
        is_here = p.placement.pp == place["pp"]
        pipeline = trainer.pipeline
        is_copy = pipeline is not None and p is trainer.model.wte.weight and place["pp"] == pipeline.borrower
        if trainer.args.zero_stage < 3 and (is_here or is_copy):
            part = p.placement.tp.rank if isinstance(p.placement.tp, Shard) else "all"
            experts = "" if p.placement.ep is None else f", experts of ep rank {p.placement.ep}"
            yield f"{name}, part {part}{experts}", hashlib.sha256(np.ascontiguousarray(p.data)).hexdigest()


def planned_peak(args: Namespace) -> float:
    """Compute the planner's bytes of the fullest rank. Of each sample a context-parallel rank computes T/c tokens."""
    alone = copy.copy(args)
    alone.cp = 1
    model = shape_of(args)
    if model.positions:
        model = replace(model, positions=args.seq_len)
    return memory(model, layout_of(alone), args.seq_len // args.cp, framework_of(args)).total


def predicted_state(args: Namespace, place: dict[str, int]) -> list[int]:
    """Compute the bytes of parameters, gradients and optimizer state on a rank by the closed forms."""
    place = {"dp": place["dp"] * args.cp + place["cp"], "tp": place["tp"], "pp": place["pp"]}
    placements = step_layout(args).placements(**place)
    psi = sum(placement.dp.size for placement in placements)
    own = sum(len(placement.dp.own) for placement in placements)
    accumulating = args.microbatches > 1 and not args.sync_every_microbatch
    state = model_state(psi, own, args.zero_stage, OF_DTYPE[args.dtype], accumulating)
    return [getattr(state, kind) for kind in STATE]


def look_at_rank(comm, args: Namespace, tokens: Tokens, record: str | None) -> dict:
    """Train on one rank, and return what its instruments read."""
    ledger = MemoryLedger()
    results = []
    with ledger.recording():
        trainer = trainer_for(copy.copy(args), tokens, comm)  # a mistake may change the flags
        recorder = None if record is None else Recorder(trainer, record)
        for step in range(trainer.first_step, args.steps):
            is_recorded = recorder is not None and len(results) < RECORDED
            results.append(recorder.step(step) if is_recorded else trainer.step(step))
            sent = {axis: comm.traffic.bytes(axis=axis) for axis in trainer.mesh.AXES}
            comm.traffic.reset()
    verdict = verify(trainer, results)
    most = [max(held[i] for _, held in ledger.moments) for i in range(len(STATE))]  # in the last step
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "digests": dict(digests(trainer)),
        "bytes": sent == step_traffic(args, comm.rank),
        "state": most == predicted_state(args, trainer.mesh.coordinates),
        "peak": ledger.peak,
        "verified": verdict.passed,
    }


def look(flags: str, resume_after: int | None = None, record: str | None = None) -> dict:
    """Train with these flags, and return for each instrument what it reads; True means that it objects.

    `losses` and `norms` are lists, to be compared with those of a right run. `schedule` is None without a pipeline.
    """
    tokens = text()
    with tempfile.TemporaryDirectory() as folder:
        if resume_after is not None:
            first = configuration(flags, resume_after)

            def save(comm) -> None:
                trainer = trainer_for(first, tokens, comm)
                for _ in trainer.train():
                    pass
                checkpoint.save(trainer, folder, resume_after)

            run_local(ranks_of(first), save)
            flags += f" --resume {folder}"
        args = configuration(flags)
        ranks = run_local(ranks_of(args), look_at_rank, args, tokens, record)
    planned = planned_peak(args)
    together: dict[str, set[str]] = {}
    for rank in ranks:
        for name, digest in rank["digests"].items():
            together.setdefault(name, set()).add(digest)
    peak = max(rank["peak"] for rank in ranks)
    is_planned = abs(peak / planned - 1) <= PLANNED
    return {
        "losses": ranks[0]["losses"],
        "norms": ranks[0]["norms"],
        "ranks": any(len(found) > 1 for found in together.values()),
        "verify": not ranks[0]["verified"],
        "bytes": not all(rank["bytes"] for rank in ranks),
        "memory": not (is_planned and all(rank["state"] for rank in ranks)),
        "schedule": rejected(args),
    }


def rejected(args: Namespace) -> bool | None:
    """Return whether the checker refuses the run's schedule, None if it has none."""
    if args.pp == 1:
        return None
    try:
        check(make(args.schedule, args.pp, args.microbatches, args.virtual_stages))
    except UsageError:
        return True
    return False


def main(argv: list[str]) -> None:
    """Look at the run of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--resume-after", type=int)
    parser.add_argument("--record")
    options, flags = parser.parse_known_args(argv)
    OneDevice.after_action = lambda trainer, action: None  # exhibit 20 changes the flags of the one device, too
    print(json.dumps(look(" ".join(flags), options.resume_after, options.record)))


if __name__ == "__main__":
    main(sys.argv[1:])
