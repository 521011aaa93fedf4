"""Records of a training run, which `python -m minipar.compare` compares.

This file needs NumPy only. A loop of any framework that copies the class writes the same records.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

STRIPS = 24  # a multiple of 8 and of 3*8: a tensor-parallel rank's part, of a fused q, k and v too, is whole strips


class Record:
    """A directory with run.json, the run's facts, and for each step n a file step-n.npz.

    A step's file has the loss (mean over the global batch, nats per token), the gradient norm before clipping, and two
    arrays per parameter: gradient/NAME (before clipping) and update/NAME (the parameter after the step - before it).
    Such an array does not hold the values, but for each of up to 24 strips along each dim their norm and their
    projection on a fixed random direction, both float64: (2, dims * strips). Names and shapes are the serial model's,
    so records of different layouts and frameworks can be compared.
    """

    def __init__(self, directory: str | Path, parameters: Mapping[str, np.ndarray], **facts: Any) -> None:
        """Write run.json; `facts` may give dtype, dp, tp, pp, microbatches and tokens (of a global batch)."""
        self.directory = Path(directory)
        self.parameters = {name: np.array(values) for name, values in parameters.items()}
        shapes = {name: values.shape for name, values in parameters.items()}
        (self.directory / "run.json").write_text(json.dumps({**facts, "shapes": shapes}), encoding="utf-8")

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        gradients: Mapping[str, np.ndarray],
        parameters: Mapping[str, np.ndarray],
    ) -> None:
        """Write the record of one step, counted from 0; `parameters` are those after its update."""
        arrays = {"loss": np.array(loss), "grad_norm": np.array(grad_norm)}
        for name, before in self.parameters.items():
            arrays[f"gradient/{name}"] = measure(name, gradients[name])
            arrays[f"update/{name}"] = measure(name, parameters[name] - before)
            before[...] = parameters[name]
        np.savez(self.directory / f"step-{step}.npz", **arrays)  # type: ignore[arg-type]


def strips(shape: tuple[int, ...]) -> list[int]:
    """Return into how many strips each dim is cut; a single value counts as one dim."""
    return [min(STRIPS, size) for size in shape or (1,)]


def measure(name: str, values: np.ndarray) -> np.ndarray:
    """Return the norm (row 0) and the projection (row 1) of each strip of `values`, along dim 0, then dim 1, ..."""
    values = np.atleast_1d(values).astype(np.float64)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    direction = np.random.Generator(np.random.Philox(key=key)).standard_normal(values.shape)
    measured = []
    for dim, count in enumerate(strips(values.shape)):
        others = tuple(axis for axis in range(values.ndim) if axis != dim)
        starts = [values.shape[dim] * i // count for i in range(count)]
        sums = np.array([(values * values).sum(axis=others), (values * direction).sum(axis=others)])
        measured.append(np.add.reduceat(sums, starts, axis=1))
    squares, projections = np.concatenate(measured, axis=1)
    return np.array([np.sqrt(squares), projections])
