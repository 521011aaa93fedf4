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
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from minipar.backend import Array, from_host
from minipar.errors import UsageError
from minipar.parallel.placement import elements_of, placement_of
from minipar.parallel.state import gather_state, local_part
from minipar.train.trainer import Trainer

STEP = re.compile(r"step-\d{8}")


def states_of(trainer: Trainer) -> dict[str, dict[str, Array]]:
    """Return this rank's part of all that a step changes, by kind and by the parameter's name: no copies."""
    optimizer = trainer.optimizer
    names = [placement_of(p).name for p in optimizer.parameters]
    kinds = {
        "parameter": optimizer.values(),
        "exp_avg": optimizer.exp_avg,
        "exp_avg_sq": optimizer.exp_avg_sq,
    }
    return {kind: dict(zip(names, values, strict=True)) for kind, values in kinds.items()}


# ---- saving --------------------------------------------------------------------------------------


def save(trainer: Trainer, directory: str, step: int) -> None:
    """Write DIR/step-N after `step` steps. All ranks call it."""
    whole = Path(directory) / f"step-{step:08d}"
    partial = whole.with_suffix(".partial")
    is_writer = trainer.mesh.world.rank == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)  # a killed run may have left it
    for kind, values in states_of(trainer).items():
        if is_writer:
            (partial / kind).mkdir(parents=True)
        for name in trainer.sizes:
            array = gather_array(trainer, name, values)
            if array is not None:
                check_finite(name, array)
                np.save(partial / kind / f"{name}.npy", array)
    if is_writer:
        run = {
            "step": step,
            "optimizer_steps": trainer.optimizer.steps,
            "text": trainer.batches.tokens.fingerprint(),
            "flags": vars(trainer.args),
            "extra": trainer.extra,
        }
        # `default` writes the model's shape, which nobody reads again, as text.
        (partial / "run.json").write_text(json.dumps(run, default=str))
        partial.rename(whole)


def check_finite(name: str, values: np.ndarray) -> None:
    """Raise UsageError if the last update made a value infinite or NaN, which no step's loss has shown yet."""
    if not np.isfinite(values).all():
        raise UsageError(
            f"training has diverged, and is not saved: {name} is not finite after the last update"
        )


def gather_array(trainer: Trainer, name: str, values: dict[str, Array]) -> np.ndarray | None:
    """Return the serial model's array of this name on rank 0, None elsewhere. All ranks call it."""
    here = [p for p in trainer.optimizer.parameters if placement_of(p).name == name]  # one, or none
    own = [values[name] for _ in here]
    return gather_state(trainer.model, here, trainer.mesh.world, own).get(name)


# ---- resuming ------------------------------------------------------------------------------------


def checkpoints(root: Path) -> list[Path]:
    """List the whole checkpoints in a directory, oldest first."""
    return sorted(path for path in root.glob("step-*") if STEP.fullmatch(path.name))


def refuse_later(directory: str, step: int) -> None:
    """Raise UsageError if a directory has a checkpoint of a later step, which a resumed run would take."""
    for path in checkpoints(Path(directory)):
        if path.name > f"step-{step:08d}":
            raise UsageError(
                f"--save {directory} holds {path.name}, but the run starts after {step}: --resume it"
            )


def newest(directory: str) -> Path:
    """Return the newest checkpoint in a directory, or the directory itself if it is one. UsageError without any."""
    path = Path(directory)
    found = [path] if STEP.fullmatch(path.name) else checkpoints(path)
    if not found:
        raise UsageError(f"{directory} has no checkpoint of --save")
    return found[-1]


def read_run(directory: str) -> dict[str, Any]:
    """Read run.json of the newest checkpoint in a directory. UsageError if it cannot be read, or is not whole."""
    path = newest(directory) / "run.json"
    try:
        run: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return run


def resume(trainer: Trainer, directory: str) -> None:
    """Continue from the newest checkpoint in a directory: each rank reads its part of each array. Sends nothing.

    UsageError for another text, and if an array is missing, is not whole, or is that of another model.
    """
    run = read_run(directory)
    if run["text"] != trainer.batches.tokens.fingerprint():
        raise UsageError(
            f"--resume {directory}: its text was not {trainer.batches.tokens.name}; give its --data"
        )
    for kind, values in states_of(trainer).items():
        for p in trainer.optimizer.parameters:
            placement = placement_of(p)
            own = values[placement.name]
            path = newest(directory) / kind / f"{placement.name}.npy"
            whole = read_array(path, placement.shape, own.dtype)
            own.reshape(-1)[...] = local_part(placement.tp, from_host(whole), elements_of(p))
    trainer.take_state(run)


def read_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Read an array of this shape and dtype. UsageError if the file is not whole, or holds another one."""
    try:
        array: np.ndarray = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if array.shape != shape or array.dtype != dtype:
        raise UsageError(
            f"{path} is {array.dtype} {array.shape}, but the model's array is {dtype} {shape}"
        )
    return array
