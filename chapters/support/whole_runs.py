"""Two whole runs compared at their end: for float64, few steps, and an `--eps` that does not enlarge rounding.

`--verify` compares step by step instead, because a training amplifies rounding: after many steps, or in float32, no
bound at the end is both right and sharp.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minipar.train.trainer import StepResult
from minipar.train.verify import Verdict

Run = tuple[dict[str, np.ndarray], Sequence[StepResult]]  # the parameters after it, and the result of each step


def bound(dtype: str | np.dtype[Any], steps: int) -> float:
    """Return the largest relative difference after `steps` steps that rounding explains.

    It is 4500 machine epsilons for the first step (1e-12 in float64) and five times that for each further one, relative
    to the largest value of a layer: AdamW divides a gradient by its own size. Where the true gradient is zero (the bias
    of the keys), the update is rounding noise divided by `eps`.
    """
    return 4500 * float(np.finfo(dtype).eps) * (5 * steps - 4)


def relative_difference(a: np.ndarray, b: np.ndarray, scale: float | None = None) -> float:
    """Return max |a - b| / scale; the default scale is max |b|."""
    largest = float(np.abs(a - b).max(initial=0.0))
    return largest / (scale or float(np.abs(b).max())) if largest else 0.0


def layer_scales(state: dict[str, np.ndarray]) -> dict[str, float]:
    """Return for each parameter the largest value in its layer: the bias of the keys alone is rounding noise."""
    layers: dict[str, float] = {}
    for name, array in state.items():
        layer = name.rpartition(".")[0]
        layers[layer] = max(layers.get(layer, 0.0), float(np.abs(array).max(initial=0.0)))
    return {name: layers[name.rpartition(".")[0]] for name in state}


def compare(parallel_run: Run, single_run: Run, *, exact: bool, ranks: int) -> Verdict:
    """Compare the parameters, losses and gradient norms of two runs; `exact` demands the same bits.

    If the parallel run was resumed, its steps are compared with the last ones of the single run.
    The norms are compared because AdamW forgives a gradient of the wrong scale, which the parameters alone would hardly
    show.
    """
    (parallel, parallel_steps), (single, single_steps) = parallel_run, single_run
    pairs = {name: (parallel[name], single[name]) for name in single}
    resumed = len(single_steps) - len(parallel_steps)
    for name, field in (("the losses", "loss"), ("the gradient norms", "grad_norm")):
        a, b = (np.array([getattr(step, field) for step in run]) for run in (parallel_steps, single_steps[resumed:]))
        pairs[name] = (a, b)
    steps, run = len(single_steps), f"{ranks} rank{'s' if ranks > 1 else ''}"
    compared = f"{len(single)} parameters, losses and gradient norms of {len(parallel_steps)} steps"
    if not all(np.isfinite(a).all() and np.isfinite(b).all() for a, b in pairs.values()):
        return Verdict(False, f"FAILED: not all values are finite after {steps} steps, which proves nothing")
    different = [name for name, (a, b) in pairs.items() if a.tobytes() != b.tobytes()]
    if not different:
        return Verdict(True, f"{run} = 1 device, bit for bit: {compared}")
    scales = layer_scales(single)
    differences = {name: relative_difference(*pairs[name], scales.get(name)) for name in different}
    worst = max(differences, key=lambda name: differences[name])
    largest, limit = differences[worst], bound(single[next(iter(single))].dtype, steps)
    if largest <= limit and not exact:
        rounding = f"largest relative difference {largest:.3g} (in {worst}) <= bound {limit:.3g}"
        return Verdict(True, f"{run} = 1 device within rounding: {compared}; {rounding}")
    where = f"in {len(different)} of {len(pairs)} arrays, most in {worst}: relative difference {largest:.3g}"
    rule = ", but the same bits are promised" if exact else f" exceeds the bound {limit:.3g}"
    return Verdict(False, f"FAILED: {run} differ from 1 device {where}{rule}")
