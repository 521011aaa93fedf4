"""Checkpoints: saved in any layout, resumed in any other.

    DIR/step-00000020/run.json                       the step, AdamW's step count, the text, and the run's flags
    DIR/step-00000020/parameter/NAME.npy             the serial model's arrays, by name
    DIR/step-00000020/exp_avg/NAME.npy               AdamW's two means, likewise
    DIR/step-00000020/exp_avg_sq/NAME.npy

No random state is needed: samples and masks are drawn by (seed, step, sample, name). A run may be killed at any
moment: all is written into step-N.partial, which is then renamed. Rank 0 gathers and writes one array at a time, so
no rank holds the whole state. NB: PyTorch's distributed checkpoints have a file for each rank instead.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minipar.backend import Array, from_host
from minipar.errors import UsageError
from minipar.parallel.placement import elements_of, placement_of
from minipar.parallel.state import gather_state, local_part

if TYPE_CHECKING:
    from minipar.train.trainer import Trainer

STEP = re.compile(r"step-\d{8}")
KEPT = 2  # checkpoints in the directory; older ones are removed


def states_of(trainer: "Trainer") -> dict[str, list[Array]]:
    """Return this rank's part of all that a step changes, by kind: an array for each of the optimizer's parameters."""
    optimizer = trainer.optimizer
    means = {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    return {"parameter": optimizer.values(), **means}


# ---- saving --------------------------------------------------------------------------------------


def save(trainer: "Trainer", directory: str, step: int) -> None:
    """Write DIR/step-N after `step` steps. All ranks call it."""
    root = Path(directory)
    partial = root / f"step-{step:08d}.partial"
    is_writer = trainer.mesh.world.rank == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)  # a killed run may have left it
    for kind, values in states_of(trainer).items():
        if is_writer:
            (partial / kind).mkdir(parents=True)
        for name in trainer.sizes:
            whole = gather_array(trainer, name, values)
            if is_writer:
                check_finite(name, whole)
                np.save(partial / kind / f"{name}.npy", whole)
    if is_writer:
        (partial / "run.json").write_text(json.dumps(run_of(trainer, step), indent=1))
        os.rename(partial, root / f"step-{step:08d}")
        for old in checkpoints(root)[:-KEPT]:
            if not trainer.args.verify or old != Path(trainer.args.resume or ""):  # which one device reads too
                shutil.rmtree(old)


def check_finite(name: str, values: np.ndarray) -> None:
    """Raise UsageError if the last update made a value infinite or NaN: the step's loss is that before it."""
    if not np.isfinite(values).all():
        why = "training has diverged, and is not saved"
        raise UsageError(f"{name} is not finite after the last update: {why}")


def gather_array(trainer: "Trainer", name: str, values: list[Array]) -> np.ndarray | None:
    """Return the serial model's array of this name on rank 0, None elsewhere. All ranks call it."""
    parameters = []
    own = []
    for p, value in zip(trainer.optimizer.parameters, values, strict=True):
        if placement_of(p).name == name:
            parameters.append(p)
            own.append(value)
    return gather_state(trainer.model, parameters, trainer.mesh.world, own).get(name)


def run_of(trainer: "Trainer", step: int) -> dict[str, Any]:
    """Return the content of run.json."""
    flags = vars(trainer.args) | {"shape": trainer.args.shape.to_dict()}
    text = trainer.batches.tokens.fingerprint()
    steps = {"step": step, "optimizer_steps": trainer.optimizer.steps}
    return steps | {"text": text, "flags": flags, "extra": trainer.extra}


# ---- resuming ------------------------------------------------------------------------------------


def checkpoints(root: Path) -> list[Path]:
    """List the whole checkpoints in a directory, oldest first."""
    return sorted(path for path in root.glob("step-*") if STEP.fullmatch(path.name))


def refuse_later(directory: str, step: int) -> None:
    """Raise UsageError if a directory has a checkpoint of a later step, which a resumed run would take."""
    for path in checkpoints(Path(directory)):
        if path.name > f"step-{step:08d}":
            but = f"but this run starts after step {step}: --resume it"
            raise UsageError(f"--save {directory} holds {path.name}, {but}")


def newest(directory: str) -> Path:
    """Return the newest checkpoint in a directory, or the directory itself if it is one. UsageError."""
    path = Path(directory)
    found = [path] if STEP.fullmatch(path.name) else checkpoints(path)
    if not found:
        raise UsageError(f"{directory} has no checkpoint of --save")
    return found[-1]


def read_run(directory: str) -> dict[str, Any]:
    """Read run.json of the newest checkpoint in a directory. UsageError, also if it is not whole."""
    path = newest(directory) / "run.json"
    try:
        run = dict(json.loads(path.read_text()))
        missing = {"step", "optimizer_steps", "text", "flags", "extra"} - run.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return run


def resume(trainer: "Trainer", directory: str) -> None:
    """Continue from the newest checkpoint in a directory: each rank reads its part of each array. Sends nothing.

    UsageError if an array is missing, is not whole, or is that of another model, and for another text.
    """
    run = read_run(directory)
    if run["text"] != trainer.batches.tokens.fingerprint():
        text = trainer.batches.tokens.name
        remedy = "give --data FILE with that text's path"
        raise UsageError(f"--resume {directory}: its text was not {text}; {remedy}")
    for kind, values in states_of(trainer).items():
        for p, own in zip(trainer.optimizer.parameters, values, strict=True):
            placement = placement_of(p)
            path = newest(directory) / kind / f"{placement.name}.npy"
            whole = read_array(path, placement.shape, own.dtype)
            own.reshape(-1)[...] = local_part(placement.tp, from_host(whole), elements_of(p))
    trainer.take_state(run)


def read_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Read an array of this shape and dtype. UsageError, also if it is not whole."""
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if array.shape != shape or array.dtype != dtype:
        but = f"but the model {dtype} of shape {shape}"
        raise UsageError(f"{path} has {array.dtype} of shape {array.shape}, {but}")
    return array
