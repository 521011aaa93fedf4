"""The instruments that look at one run: a program that trains on threads and prints what they read, as JSON.

    python tests/release/museum/instruments.py [--resume-after K] [--record DIR] FLAGS...

Run with the PYTHONPATH of a copy of the tree, it looks at the copy's code. A pipeline's schedule is checked apart: the
run itself goes on without a check, as it would in a framework that has none.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from training import config_for, ranks_of, trainer_for

from minipar.bench.layouts import framework_of, layout_of
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import KINDS, MemoryLedger
from minipar.parallel.memory import OF_DTYPE, model_state
from minipar.parallel.pipeline import check as checker
from minipar.parallel.pipeline.check import check
from minipar.parallel.placement import Shard
from minipar.parallel.traffic import predicted_traffic
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import memory
from minipar.train.checkpoint import prepare_directory
from minipar.train.config import schedule_of
from minipar.train.data import Tokens
from minipar.train.from_config import step_layout
from minipar.train.recording import Recorder
from minipar.train.settings import TrainConfig
from minipar.train.trainer import Trainer
from minipar.train.verify import Verifier

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
    return Tokens(np.array(ids, np.uint8), "a text", VOCAB)


def configuration(flags: str, steps: int = STEPS) -> TrainConfig:
    """Return the resolved configuration of a run of the small model."""
    return config_for(f"{MODEL} --steps {steps} {flags}")


def digests(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield a name and a digest for each array that other ranks hold too; the same name promises the same digest.

    Every data- and context-parallel rank holds its replica's parameters (ZeRO stages 0 to 2), but for other ranks'
    experts, every tensor-parallel rank those that are not split, those with copies of a head its values, and the last
    pipeline rank the token embedding.
    """
    place = trainer.mesh.coordinates
    for name, p in trainer.model.named_parameters():
        is_here = p.make is None and p.placement.pp == place["pp"]
        is_copy = trainer.pipeline is not None and p is trainer.model.wte.weight and p.make is None
        if trainer.config.mesh.zero_stage < 3 and (is_here or is_copy):
            part = p.placement.tp.rank if isinstance(p.placement.tp, Shard) else "all"
            experts = "" if p.placement.ep is None else f", experts of ep rank {p.placement.ep}"
            yield f"{name}, part {part}{experts}", hashlib.sha256(np.ascontiguousarray(p.data)).hexdigest()


def planned_peak(config: TrainConfig) -> float:
    """Compute the planner's bytes of the fullest rank. Of each sample a context-parallel rank computes T/c tokens."""
    sizes, is_gpt2 = config.model, config.model.model == "gpt2"
    size = sizes.layers, sizes.hidden, sizes.heads, sizes.vocab_size
    llama = {"tied": False, "gated": True, "biases": False, "norm_biases": False}
    options = {"positions": sizes.seq_len} if is_gpt2 else {"kv_heads": sizes.kv_heads, "ffn": sizes.ffn, **llama}
    options |= {"experts": sizes.experts, "top_k": sizes.top_k} if sizes.model == "mixtral" else {}
    length = sizes.seq_len // config.mesh.cp
    layout = layout_of(replace(config, mesh=replace(config.mesh, cp=1)))
    return memory(ModelShape(*size, **options), layout, length, framework_of(config)).total


def predicted_state(config: TrainConfig, place: dict[str, int]) -> list[int]:
    """Compute the bytes of parameters, gradients and optimizer state on a rank by the closed forms."""
    placements = step_layout(config).placements(**place)
    psi, own = sum(p.dp.size for p in placements), sum(len(p.dp.own) for p in placements)
    accumulating = config.data.microbatches > 1 and not config.mesh.sync_every_microbatch
    state = model_state(psi, own, config.mesh.zero_stage, OF_DTYPE[config.run.dtype], accumulating)
    return [getattr(state, kind) for kind in STATE]


def look_at_rank(comm, config: TrainConfig, tokens: Tokens, record: str | None) -> dict:
    """Train on one rank, and return what its instruments read."""
    ledger = MemoryLedger()
    results = []
    with ledger.recording():
        trainer = trainer_for(config, tokens, comm)
        recorder = None if record is None else Recorder(trainer, record)
        verifier = Verifier(trainer)
        for result in trainer.train():
            results.append(result)
            verifier.check_step(result)
            if recorder is not None and len(results) == RECORDED:
                recorder.stop()
            sent = {axis: comm.traffic.bytes(axis=axis) for axis in trainer.mesh.AXES}
            comm.traffic.reset()
    place = trainer.mesh.coordinates
    most = [max(held[i] for _, held in ledger.moments) for i in range(len(STATE))]  # in the last step
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "digests": dict(digests(trainer)),
        "bytes": sent == predicted_traffic(step_layout(config), comm.rank),
        "state": most == predicted_state(config, place),
        "peak": ledger.peak,
        "verified": verifier.verdict().passed,
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
                if comm.rank == 0:
                    prepare_directory(folder, 0)
                trainer.save(folder, resume_after)

            run_local(ranks_of(first), save)
            flags += f" --resume {folder}"
        config = configuration(flags)
        ranks = run_local(ranks_of(config), look_at_rank, config, tokens, record)
    planned = planned_peak(config)
    together: dict[str, set[str]] = {}
    for rank in ranks:
        for name, digest in rank["digests"].items():
            together.setdefault(name, set()).add(digest)
    return {
        "losses": ranks[0]["losses"],
        "norms": ranks[0]["norms"],
        "ranks": any(len(found) > 1 for found in together.values()),
        "verify": not ranks[0]["verified"],
        "bytes": not all(rank["bytes"] for rank in ranks),
        "memory": not (
            all(rank["state"] for rank in ranks) and abs(max(rank["peak"] for rank in ranks) / planned - 1) <= PLANNED
        ),
        "schedule": rejected(config),
    }


def rejected(config: TrainConfig) -> bool | None:
    """Return whether the checker refuses the run's schedule, None if it has none."""
    if config.mesh.pp == 1:
        return None
    try:
        check(schedule_of(config))
    except UsageError:
        return True
    return False


def main(argv: list[str]) -> None:
    """Look at the run of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--resume-after", type=int)
    parser.add_argument("--record")
    options, flags = parser.parse_known_args(argv)
    checker.check = lambda schedule: None
    print(json.dumps(look(" ".join(flags), options.resume_after, options.record)))


if __name__ == "__main__":
    main(sys.argv[1:])
