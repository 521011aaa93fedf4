"""Refusals of operations: each function raises an error that shows the values, or returns what was meant."""

from math import prod
from typing import Any

import numpy as np

from minipar.backend import Array, to_host
from minipar.errors import UsageError

IGNORE_INDEX = -100  # PyTorch's and Hugging Face's mark for "no target here"


def check_one_element(shape: tuple[int, ...], size: int) -> None:
    """Raise ValueError unless a tensor that is to become a Python number has one element."""
    if size != 1:
        remedy = "a number is one element: reduce it, as with .mean(), or read its array, .data"
        raise ValueError(f"a tensor of shape {shape} has {size} elements, but {remedy}")


def check_gradient(gradient: Array | None, shape: tuple[int, ...], size: int) -> None:
    """Raise ValueError for a misshapen gradient of a tensor, or for none unless it has one element."""
    if gradient is None and size != 1:
        raise ValueError(f"backward() without a gradient needs one element, but the shape is {shape}")
    if gradient is not None and gradient.shape != shape:
        raise ValueError(f"gradient of shape {gradient.shape} for a tensor of shape {shape}")


def check_is_leaf(node: Any) -> None:
    """Raise ValueError if a node has computed the tensor that gets a hook."""
    if node is not None:
        raise ValueError(f"hooks are for leaves: this tensor was computed by {node.operation_name()}")


def check_requires_grad(requires_grad: bool) -> None:
    """Raise ValueError unless a tensor has a graph that backward can go through."""
    if not requires_grad:
        causes = "it was computed under no_grad, or from arrays (.data), or a PipelineModule has run backward already"
        raise ValueError(f"backward() on a tensor that does not require a gradient: {causes}")


def check_unchanged(leaf: Any, number: int) -> None:
    """Raise RuntimeError if an optimizer has changed a leaf since the node of this number read it.

    Backward would multiply by the new values, and its result be the gradient of neither the old
    model nor the new one. A leaf that was given other values, or its old ones, is fine. NB: PyTorch
    compares versions of the values.
    """
    if getattr(leaf, "changed_values", None) is leaf.data and leaf.changed_at > number:
        why = "the optimizer has changed the parameters since this loss was computed"
        raise RuntimeError(f"backward() too late: {why}; call loss.backward() before optimizer.step()")


def dim_order(shape: tuple[int, ...], dims: tuple[int, ...]) -> list[int]:
    """Return the order of dims that `Tensor.transpose(*dims)` means. ValueError if it means none."""
    count = len(shape)
    order = list(range(count))
    if not dims:
        return order[::-1]
    known = all(isinstance(dim, int) and -count <= dim < count for dim in dims)
    chosen = [dim % count for dim in dims] if known else []
    if known and len(chosen) == 2:
        first, second = chosen
        order[first], order[second] = second, first
        return order
    if known and sorted(chosen) == order:
        return chosen
    named = ", ".join(map(str, dims))
    raise ValueError(
        f"transpose({named}) of shape {shape}: name two dims to swap, or all {count} once, in a new order"
    )


def check_whole_logits(columns: int, all_columns: int | None) -> None:
    """Raise UsageError if the logits are a rank's `columns` of `all_columns`; None, or as many: they are all."""
    if all_columns is not None and columns != all_columns:
        remedy = "write mp.vocab_parallel_cross_entropy_sum(logits, targets, layer.group)"
        raise UsageError(f"the logits are this rank's {columns} of {all_columns} columns: {remedy}")


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
    if not wrong.any():
        return
    index = np.argwhere(to_host(wrong))[0].tolist()
    value = int(to_host(ids)[tuple(index)])
    if value >= count:
        raise UsageError(f"{what} {value} at {index} is not below vocab_size {count}{where}")
    also = "" if ignored is None else f", or {ignored} to be ignored"
    raise UsageError(f"{what} {value} at {index} is negative: {what}s are 0 to {count - 1}{where}{also}")


def check_targets(targets: Array, rows: tuple[int, ...], count: int) -> None:
    """Raise UsageError unless targets have the shape of the logits' rows, or are flat, and are ids or -100."""
    if targets.shape != rows and targets.shape != (prod(rows),):
        remedy = f"expected {rows}, one for each token, or flat {(prod(rows),)}"
        raise UsageError(f"targets of shape {tuple(targets.shape)} for logits of {rows} tokens: {remedy}")
    check_ids(targets, count, "target", ignored=IGNORE_INDEX)


def refuse_dropout(dropout: str, method: str, remedy: str) -> None:
    """Raise UsageError: a `method` of attention that never has all scores of a head cannot drop probabilities."""
    raise UsageError(
        f"{dropout} needs all of attention's probabilities, which {method} never has: give {remedy}"
    )
