"""The resumption of a run: from which checkpoint, with which flags, and whether one device could repeat it.

`find_checkpoint` reads the manifest, `continued` takes the run's flags from it, and
`check_checkpoint` checks every file.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.train.checkpoint import MANIFEST, STEP, Checkpoint, agreeing, checkpoints, reading, run_flags
from minipar.train.config import check_settings
from minipar.train.data import Tokens
from minipar.train.manifest import MOST_BYTES
from minipar.train.settings import SIZES, RunConfig, TrainConfig, flags, with_values

# What a resumed run cannot change: the model's shape, the order of the data, and AdamW's betas.
MUST_AGREE = list(SIZES)
MUST_AGREE += "--seq-len --dtype --global-batch --order --pack --seed --betas".split()
# What an update depends on besides: `--verify` starts from step 0, so it needs the same values from
# there on.
UPDATE = "--lr --lr-schedule --warmup-steps --eps --weight-decay --dropout --clip-grad".split()
UPDATE += "--aux-loss --router-bias --capacity-factor --gradients --reduce-dtype --skip-nonfinite".split()
# What a resumed run takes from its checkpoint unless the flag is given. Layout and device are free.
TAKEN = [*MUST_AGREE, *UPDATE, "--data", "--eval-every", "--eval-data", "--steps", "--reduction"]
# What the order of sums depends on.
SUMS = "--dp --cp --ep --microbatches --tp --reduction --sync-every-microbatch --zero-replicas --device".split()


def _find(run: RunConfig, name: str) -> Path | None:
    """Return the checkpoint that `--resume` means: DIR or the newest in it; with `auto` that of --save DIR, if any."""
    auto = run.resume == "auto"
    directory = str(run.save if auto else run.resume)
    root = Path(directory)
    try:
        if not auto and (STEP.fullmatch(root.name) or (root / MANIFEST).exists()):
            return root
        complete = [] if auto and not root.exists() else checkpoints(root)
    except OSError as error:
        raise UsageError(f"{name} {directory}: {error.strerror}") from None
    if not complete and not auto:
        raise UsageError(f"{name} {directory}: no checkpoint in it (no step-NNNNNNNN that was finished)")
    return complete[-1][1] if complete else None


def find_checkpoint(config: TrainConfig, comm: Communicator, name: str = "--resume") -> Checkpoint | None:
    """Read on rank 0, for all ranks, the manifest of the checkpoint to resume, if any.

    Errors call the flag `name`.
    """
    if config.run.resume is None:
        return None
    found = None
    text = b""
    with agreeing(comm, name):
        if comm.rank == 0:
            found = _find(config.run, name)
        if found is not None:
            text = _read_manifest(found / MANIFEST)
    directory = comm.all_gather_bytes(os.fsencode(found or ""))[0]
    text = comm.all_gather_bytes(text)[0]
    return Checkpoint(os.fsdecode(directory), text) if directory else None


def _read_manifest(path: Path) -> bytes:
    with reading(path):
        size = os.path.getsize(path)
        if size > MOST_BYTES:
            raise UsageError(f"{path} has {size:,} bytes, expected at most {MOST_BYTES:,}")
        return path.read_bytes()


def continued(config: TrainConfig, checkpoint: Checkpoint) -> TrainConfig:
    """Return `config` with the checkpoint's value of each of TAKEN that was not given.

    UsageError if they disagree.
    """
    saved = checkpoint.flags[-1]
    values: dict[str, Any] = {"model.init_from": None}  # with `auto`: only a run that starts reads it
    for section, field, flag, _ in flags(config):
        name = f"{section}.{field.name}"
        if flag in TAKEN and name not in config.given:
            values[name] = saved[flag]
    config = with_values(config, values)
    _compare(checkpoint.path, MUST_AGREE, saved, run_flags(config), "; these cannot change in a resumed run")
    check_settings(config)
    return config


def check_checkpoint(checkpoint: Checkpoint, config: TrainConfig, tokens: Tokens | None, comm: Communicator) -> None:
    """Raise UsageError if a file is damaged or contradicts this run.

    All ranks call it, and each reads some of the files.
    """
    saved = checkpoint.flags[-1]
    current = run_flags(config)
    _compare(checkpoint.path, MUST_AGREE, saved, current, "; these cannot change in a resumed run")
    if tokens is not None and checkpoint.manifest["data"] != tokens.fingerprint().hex():
        raise UsageError(f"{checkpoint.path}: written while training on another text than {tokens.name}; give --data")
    if checkpoint.step > config.optimizer.steps:
        raise UsageError(f"{checkpoint.path}: step {checkpoint.step} is beyond --steps {config.optimizer.steps}")
    if saved["--reduction"] == current["--reduction"] == "tree" and leaves(saved) != leaves(current):
        then = f"dp*microbatches = {leaves(saved)} leaves of a tree"
        raise UsageError(f"{checkpoint.path}: written with {then}, but this run has {leaves(current)}; keep them")
    with agreeing(comm, "--resume"):
        for file in checkpoint.files[comm.rank :: comm.size]:
            checkpoint.check_file(file)


def leaves(values: dict[str, Any]) -> int:
    """Return the leaves of the batch with `--reduction tree`: the microbatches of all replicas."""
    return values["--dp"] * values["--microbatches"]


def _compare(path: Path, names: Sequence[str], saved: dict[str, Any], current: dict[str, Any], why: str) -> None:
    """Raise UsageError with all those flags whose values differ."""
    different = [name for name in names if saved[name] != current[name]]
    if different:
        then = ", ".join(f"{name} {saved[name]}" for name in different)
        now = ", ".join(f"{name} {current[name]}" for name in different)
        raise UsageError(f"{path}: written with {then}, but this run has {now}{why}")


def same_sums(checkpoint: Checkpoint | None, config: TrainConfig) -> bool:
    """Return whether every step so far added its values in this layout's order, which one device repeats to the bit."""
    current = run_flags(config)
    periods = [] if checkpoint is None else checkpoint.flags
    if config.run.reduction == "tree":
        return all(then["--reduction"] == "tree" and leaves(then) == leaves(current) for then in periods)
    # The norm is summed bucket by bucket, and a pipeline has other buckets. Clipping depends on the
    # norm.
    same_norm = (not config.optimizer.clip_grad or (then["--pp"] == 1) == (config.mesh.pp == 1) for then in periods)
    return all(same_norm) and all(then[name] == current[name] for then in periods for name in SUMS)


def repeatable(checkpoint: Checkpoint, config: TrainConfig) -> bool:
    """Return whether one device that starts at step 0 with this run's flags has the checkpoint's bits on its way.

    So it is if every run so far had the same order of sums and the same flags that an update
    depends on.
    """
    names = [*UPDATE, "--init-from"]
    if config.optimizer.lr_schedule == "cosine":
        names.append("--steps")
    if config.model.capacity_factor is not None:
        names += ["--dp", "--microbatches"]  # decide what is dropped
    current = run_flags(config)
    same_updates = all(then[name] == current[name] for then in checkpoint.flags for name in names)
    return same_updates and same_sums(checkpoint, config)
