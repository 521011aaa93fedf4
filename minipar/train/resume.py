"""Going on from a checkpoint: everything is checked first, then each rank takes its part of the numbers.

Parameters come as those of a GPT-2 directory do: the serial model's are read one at a time (`nn.Deferred`) and cut by
the layout that runs now. The optimizer's means are filled in afterwards, the same way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minipar.comm import Communicator
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.train.checkpoint import agreeing, checkpoints, told
from minipar.train.config import TrainConfig
from minipar.train.data import Tokens
from minipar.train.manifest import MANIFEST, STEP, Checkpoint, read_regular

# What a resumed run must be told as the saved one was: which numbers there are, which samples come, and what the means
# are means of. Everything else may change: the layout, learning rate and schedule, weight decay, dropout, steps.
MUST_AGREE = (
    "--layers --hidden --heads --vocab-size --seq-len --dtype --global-batch --order --seed --betas".split()
)  # fmt: skip
# What an update depends on besides: `--verify` starts from step 0, so it needs the same from there on.
UPDATE = "--lr --lr-schedule --warmup-steps --eps --weight-decay --dropout --clip-grad".split()
# What the order of sums depends on.
SUMS = "--dp --microbatches --tp --reduction --sync-every-microbatch --device".split()


def _find(directory: str) -> Path:
    """The checkpoint that `--resume` means: DIR itself if it has a manifest or is named so, else the newest in it."""
    root = Path(directory)
    try:
        if STEP.fullmatch(root.name) or (root / MANIFEST).exists():
            return root
        found = checkpoints(root)
    except OSError as error:
        raise UsageError(f"--resume {directory}: {error.strerror}") from None
    if not found:
        raise UsageError(f"--resume {directory}: no checkpoint in it (no step-NNNNNNNN that was finished)")
    return found[-1][1]


def open_checkpoint(config: TrainConfig, tokens: Tokens, comm: Communicator) -> Checkpoint | None:
    """Collective: the checkpoint that `--resume` names, every file of it checked, before anything is loaded; None
    without the flag. UsageError on every rank: a file missing, cut, changed or foreign; another run than this one.

    On the wire: the manifest, from rank 0 to all. Each rank checks a share of the files.
    """
    if config.run.resume is None:
        return None
    place, text = b"", b""
    with agreeing(comm, "--resume"):
        if comm.rank == 0:
            directory = _find(config.run.resume)
            place, text = os.fsencode(directory), read_regular(directory / MANIFEST)
    place, text = (comm.all_gather_bytes(each)[0] for each in (place, text))
    checkpoint = Checkpoint(os.fsdecode(place), text)
    check_agreement(checkpoint, config, tokens)
    with agreeing(comm, "--resume"):
        if comm.rank == 0:
            checkpoint.check_listing()
        for file in checkpoint.files[comm.rank :: comm.size]:
            checkpoint.check_file(file)
    return checkpoint


def check_agreement(checkpoint: Checkpoint, config: TrainConfig, tokens: Tokens) -> None:
    """UsageError with every difference between what the checkpoint was written with and what this run was told."""
    saved, here = checkpoint.history[-1]["flags"], told(config)
    _compare(checkpoint, MUST_AGREE, saved, here, "; a resumed run must be told the same")
    if checkpoint.manifest["data"] != tokens.fingerprint().hex():
        raise UsageError(f"{checkpoint.path}: written while training on another text than {tokens.name}; give --data")
    if checkpoint.step > config.optimizer.steps:
        raise UsageError(f"{checkpoint.path}: step {checkpoint.step} is beyond --steps {config.optimizer.steps}")
    model, shape, problem = config.model, checkpoint.manifest["model"], None
    wanted = {"n_layer": model.layers, "n_embd": model.hidden, "n_head": model.heads, "vocab_size": model.vocab_size}
    if shape | wanted != shape or shape["n_positions"] < model.seq_len:
        problem = f"its model is {shape}"
    else:
        serial = GPT(GPTConfig(**shape), deferred=True)
        if checkpoint.shapes != {name: p.shape for name, p in serial.named_parameters()}:
            problem = "its parameters are not those of its model"
        elif checkpoint.manifest["dtype"] != config.run.dtype:
            problem = f"its numbers are {checkpoint.manifest['dtype']}"
    if problem is not None:
        raise UsageError(f"{checkpoint.path}: {problem}, which is not what its history says")
    if config.run.verify:
        for period in checkpoint.history:
            if period["flags"].get("--init-from") is not None:
                raise UsageError("--verify with --resume starts from step 0, but this run began with --init-from")
            names = [*UPDATE, *(["--steps"] if config.optimizer.lr_schedule == "cosine" else [])]
            _compare(checkpoint, names, period["flags"], here, "; --verify starts from step 0 and needs the same there")


def _compare(
    checkpoint: Checkpoint, names: Sequence[str], saved: dict[str, Any], here: dict[str, Any], why: str
) -> None:
    different = [name for name in names if name not in saved or saved[name] != here[name]]
    if different:
        then = ", ".join(f"{name} {saved.get(name)}" for name in different)
        now = ", ".join(f"{name} {here[name]}" for name in different)
        raise UsageError(f"{checkpoint.path}: written with {then}, but this run has {now}{why}")


def same_sums(checkpoint: Checkpoint | None, config: TrainConfig) -> bool:
    """Whether every step so far added its numbers in the order in which this layout adds them, so that one device can
    repeat all of them to the bit."""
    here = told(config)
    for period in [] if checkpoint is None else checkpoint.history:
        then = period["flags"]
        if any(then.get(name) != here[name] for name in SUMS):
            return False
        # The norm is summed bucket by bucket, and a pipeline's buckets are other ones; clipping brings it in.
        if config.optimizer.clip_grad and (then.get("--pp") == 1) != (here["--pp"] == 1):
            return False
    return True
