"""Records of a training run, for `python -m minipar.compare`: NumPy only, for a loop of any framework to copy."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

# A multiple of 8 and of 3*8: a tensor-parallel rank's part, of q, k and v too, is whole strips.
STRIPS = 24
Arrays = Mapping[str, np.ndarray]


class Record:
    """A new directory with the run's facts, run.json, and for each step n a file step-n.npz.

    A step's file has the loss (nats per token), the gradient norm before clipping, and for each parameter
    gradient/NAME (before clipping) and update/NAME (the parameter after the step less before it). Such an array
    has, for up to 24 strips along each dim, the norm and the projection on a random direction: (2, strips of all dims).
    """

    def __init__(self, directory: str | Path, parameters: Arrays, **facts: object) -> None:
        """Write run.json. `facts` can be dtype, dp, cp, ep, tp, pp, microbatches, and the tokens of a global batch.

        FileExistsError if the directory exists: steps of two runs, or of two ranks, are not mixed.
        """
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True)
        except FileExistsError:
            remedy = "give each record a new directory, and write it on rank 0 alone"
            raise FileExistsError(f"{directory} exists already: {remedy}") from None
        self.parameters = {name: np.array(values) for name, values in parameters.items()}
        facts["shapes"] = {name: values.shape for name, values in parameters.items()}
        (self.directory / "run.json").write_text(json.dumps(facts))

    def step(
        self, step: int, loss: float, grad_norm: float, gradients: Arrays, parameters: Arrays
    ) -> None:
        """Write one step, counted from 0; `gradients` are those before clipping, `parameters` those after the step.

        ValueError if an array has another shape than its parameter, TypeError if a value is complex.
        """
        arrays = {"loss": np.array(float(loss)), "grad_norm": np.array(float(grad_norm))}
        for name, before in self.parameters.items():
            for what, values in (("gradient", gradients[name]), ("parameter", parameters[name])):
                if np.shape(values) != before.shape:
                    raise ValueError(f"{what} {name} has shape {np.shape(values)}, not {before.shape}")
            arrays[f"gradient/{name}"] = measure(name, gradients[name])
            with np.errstate(over="ignore", invalid="ignore"):  # the comparison names what is not finite
                arrays[f"update/{name}"] = measure(name, parameters[name] - before)
            before[...] = parameters[name]
        np.savez(self.directory / f"step-{step}.npz", **arrays)  # type: ignore[arg-type]


def strips(shape: tuple[int, ...]) -> list[int]:
    """Return into how many strips each dim is cut; a single value counts as one dim."""
    return [min(STRIPS, size) for size in shape or (1,)]


def measure(name: str, values: np.ndarray) -> np.ndarray:
    """Return the norm (row 0) and the projection (row 1) of each strip of `values`, along dim 0, then dim 1, ..."""
    if np.iscomplexobj(values):
        raise TypeError(f"{name} is complex: a record holds real values")
    values = np.atleast_1d(values).astype(np.float64)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    direction = np.random.Generator(np.random.Philox(key=key)).standard_normal(values.shape)
    measured = []
    with np.errstate(over="ignore", invalid="ignore"):
        scale = 2.0**600 if np.abs(values).max(initial=0) > 1e150 else 1.0  # or squares would overflow
        values = values / scale
        products = values * direction
        for dim, count in enumerate(strips(values.shape)):
            others = tuple(axis for axis in range(values.ndim) if axis != dim)
            starts = [values.shape[dim] * i // count for i in range(count)]
            sums = np.array([(values * values).sum(axis=others), products.sum(axis=others)])
            measured.append(np.add.reduceat(sums, starts, axis=1))
        squares, projections = np.concatenate(measured, axis=1)
        return scale * np.array([np.sqrt(squares), projections])
