"""Checks of what would be silently wrong: ids and targets."""

from math import prod

import numpy as np

from minipar.backend import Array, to_host
from minipar.errors import UsageError

IGNORE_INDEX = -100  # PyTorch's and Hugging Face's mark for "no target here"


def check_ids(ids: Array, count: int, what: str, where: str = "", ignored: int | None = None) -> None:
    """Raise UsageError, with the first wrong id and its index, unless all ids are in 0..count-1 or `ignored`.

    NumPy would take -1 as the last row, and a rank that holds a part of the vocabulary would take
    any id as another rank's. On a GPU the check waits for the ids, as `loss.item()` waits for the
    loss.
    """
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{what}s of dtype {ids.dtype}: expected integers")
    wrong = (ids < 0) | (ids >= count)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        index = np.argwhere(to_host(wrong))[0].tolist()
        value = to_host(ids)[tuple(index)]
        also = "" if ignored is None else f", or {ignored} to be ignored"
        raise UsageError(f"{what} {value} at {index}{where}: expected 0 to {count - 1}{also}")


def check_targets(targets: Array, rows: tuple[int, ...], count: int) -> None:
    """Raise UsageError unless targets have the shape of the logits' rows, or are flat, and are ids or -100."""
    if targets.shape != rows and targets.shape != (prod(rows),):
        raise UsageError(f"targets of shape {tuple(targets.shape)} for logits of {rows} tokens")
    check_ids(targets, count, "target", ignored=IGNORE_INDEX)


def refuse_dropout(dropout: str, method: str, remedy: str) -> None:
    """Raise UsageError: a `method` of attention that never has all scores of a head cannot drop probabilities."""
    raise UsageError(
        f"{dropout} needs all of attention's probabilities, which {method} never has: give {remedy}"
    )
