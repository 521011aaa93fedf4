"""Two whole runs compared at their end, as `--verify` compares them, and single arrays."""

from collections.abc import Sequence

import numpy as np

from minipar.train.trainer import StepResult
from minipar.train.verify import Verdict, compare, values_of

Run = tuple[dict[str, np.ndarray], Sequence[StepResult]]  # the parameters after it, and the result of each step


def relative_difference(a: np.ndarray, b: np.ndarray, scale: float | None = None) -> float:
    """Return max |a - b| / scale; the default scale is max |b|."""
    largest = float(np.abs(a - b).max(initial=0.0))
    return largest / (scale or float(np.abs(b).max())) if largest else 0.0


def verdict_of(run: Run, single: Run, ranks: int, exact: bool = False) -> Verdict:
    """Compare a run on so many ranks with one on one device: parameters, and each step's loss and gradient norm.

    `exact` demands the same bits. If the run was resumed, its steps are compared with the last ones of the single run.
    """
    state, results = run
    single_state, single_results = single
    same_steps = single_results[-len(results) :]
    line = compare(values_of(results, state), values_of(same_steps, single_state), ranks, exact)
    return Verdict("FAILED" not in line, line)
