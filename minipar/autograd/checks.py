"""Checks of what would be silently wrong: ids and targets."""

from math import prod

import numpy as np

from minipar.backend import Array, module_of, to_host
from minipar.errors import UsageError

IGNORE_INDEX = -100  # PyTorch's and Hugging Face's mark for "no target here"


def check_ids(ids: Array, count: int, what: str, where: str = "") -> None:
    """Raise UsageError, with the first wrong id and its index, unless all ids are in 0..count-1.

    NumPy would take -1 as the last row, and a rank that holds a part of the vocabulary would take
    any id as another rank's. Ids that are on the host are checked there; for those on a GPU the check
    waits.
    """
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{what}s of dtype {ids.dtype}: expected integers")
    wrong = (ids < 0) | (ids >= count)
    if wrong.any():
        index = np.argwhere(to_host(wrong))[0].tolist()
        value = to_host(ids)[tuple(index)]
        raise UsageError(f"{what} {value} at {index}{where}: expected 0 to {count - 1}")


def check_targets(targets: Array, rows: tuple[int, ...], count: int) -> None:
    """Raise UsageError unless targets have the shape of the logits' rows, or are flat, and are ids or -100."""
    if targets.shape != rows and targets.shape != (prod(rows),):
        raise UsageError(f"targets of shape {tuple(targets.shape)} for logits of {rows} tokens")
    ids = module_of(targets).where(targets == IGNORE_INDEX, 0, targets)
    check_ids(ids, count, "target", where=f", which is not {IGNORE_INDEX}")
