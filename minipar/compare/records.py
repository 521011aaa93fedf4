"""The records that `compare/record.py` wrote, read again: files that may come from somebody else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minipar.compare.causes import CAUSES
from minipar.compare.record import strips
from minipar.errors import UsageError

EPSILONS = {"float64": 2**-52, "float32": 2**-23}  # any other dtype counts as bfloat16


@dataclass(frozen=True)
class Run:
    """A record: the sizes of its run by name, its dtype's epsilon, the parameters' shapes and each step's file."""

    sizes: dict[str, int]
    eps: float
    shapes: dict[str, tuple[int, ...]]
    steps: dict[int, Path]


def read_run(directory: str | Path) -> Run:
    """Read what a record says of its run.

    UsageError if the directory is no record, or one without a step.
    """
    path = Path(directory)
    if not os.path.isfile(path / "run.json"):  # a pipe or a device may have no end
        raise UsageError(f"there is no record in {path}: no file run.json")
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        shapes = {name: tuple(map(int, shape)) for name, shape in run["shapes"].items()}
        sizes = {name: int(run.get(name, 1)) for name in CAUSES}
        eps = EPSILONS.get(str(run.get("dtype", "float64")).removeprefix("torch."), 2**-8)
    except Exception as error:  # a foreign file can make json and NumPy raise anything
        raise UsageError(f"{path} is not a record: {error!r:.100}") from None
    files = {re.fullmatch(r"step-(\d{1,18})\.npz", file.name): file for file in path.iterdir()}
    steps = {int(match[1]): file for match, file in files.items() if match}
    if not steps or not shapes:
        raise UsageError(f"{path} is a record without a step")
    return Run(sizes, eps, shapes, steps)


def read_step(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read loss, grad_norm, gradient/NAME and update/NAME of a step.

    UsageError if the file is something else.
    """
    expected: dict[str, tuple[int, ...]] = {"loss": (), "grad_norm": ()}
    for name, shape in shapes.items():
        norms_and_projections = (2, sum(strips(shape)))
        expected[f"gradient/{name}"] = norms_and_projections
        expected[f"update/{name}"] = norms_and_projections
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: _as_float64(name, file[name]) for name in expected}
    except Exception as error:  # NumPy, zipfile and zlib raise errors of their own
        raise UsageError(f"{path} is not a step of a record: {error!r:.100}") from None
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise UsageError(f"{path}: {name} has shape {arrays[name].shape}, expected {shape}")
    return arrays


def _as_float64(name: str, values: np.ndarray) -> np.ndarray:
    """Convert an array of a file to float64. ValueError if its values are not real."""
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{name} holds {values.dtype} values")
    with np.errstate(over="ignore"):
        return values.astype(np.float64)
