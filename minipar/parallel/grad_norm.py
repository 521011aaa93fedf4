"""The norm of the whole gradient, over every mesh axis: a loop over placements.

The order of the sum is fixed, so that every ZeRO stage, and one device, get the same bits. Within
one data-parallel chunk, squares are added parameter by parameter into their unit, then unit by
unit; then chunks in rank order.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from minipar.backend import Array, is_host, read_values, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.parameter import Parameter, owners_of
from minipar.parallel.placement import ParameterShard, Shard, placement_of

WHOLE = 0  # the index of parameters that every tp rank holds whole
SPLIT = 1  # the index of those of which it has a part

# Elements that `squared_norm` sums at a time on the host: they stay in a core's cache.
BLOCK = 1 << 15


def clip_grad_norm(
    parameters: Sequence[Parameter],
    max_norm: float | None,
    dp: Communicator | None = None,
    tp: Communicator | None = None,
    pp: Communicator | None = None,
    chunks: int | None = None,
) -> float:
    """Return the 2-norm of the whole gradient, the same on every rank; scale it to `max_norm`.

    `parameters` are what this rank's optimizer holds, with their gradients summed over dp. Scales
    as torch.nn.utils.clip_grad_norm_ does, unless `max_norm` is None. `chunks` is the number of
    chunks to add in where that is not dp's size: one device that is compared with many ranks.

    RuntimeError before gradients are summed over dp, UsageError without the ranks of an axis that has
    cut the parameters. A rank that holds shards, or experts that others do not hold, sums its own chunks only. Sends
    float64 values over each axis:

        dp   one, from ranks that sum their own chunks only
        tp   one for each chunk that is summed
        pp   two for each chunk that is summed and each unit
    """
    for owner in owners_of(parameters):
        parameters = owner.sum_gradients() or parameters
    for p in parameters:
        p.fold_tied_gradients()
    if any(p.placement is None for p in parameters):
        # A model on one device.
        total = squared_norm(p.grad for p in parameters if p.grad is not None)
        return scale_down(parameters, max_norm, math.sqrt(total))
    if tp is None and any(placement_of(p).tp.ranks > 1 for p in parameters):
        raise UsageError("clip_grad_norm: tp has cut these parameters: give its ranks, such as mesh.tp")
    # Other ranks of dp do not hold what a rank has of shards and of experts.
    own_only = any(isinstance(p, ParameterShard) or placement_of(p).ep is not None for p in parameters)
    count = 1
    if dp is not None:
        dp = dp.chunk_comm
        if not own_only:
            count = dp.size if chunks is None else chunks
    squares = own_squares(parameters, count, own_only)
    totals = add_over_axes(squares, tp, pp)
    if own_only:
        if dp is None:
            raise UsageError("clip_grad_norm: this rank holds shards: give the ranks of data parallelism")
        dp.all_reduce(totals, algorithm="ordered")
    total = float(add_left_to_right(totals, axis=0))
    return scale_down(parameters, max_norm, math.sqrt(total))


def scale_down(parameters: Iterable[Parameter], max_norm: float | None, norm: float) -> float:
    """Scale the gradients, whose 2-norm is `norm`, down to `max_norm` if it is larger; return `norm`.

    The factor is max_norm / (norm + 1e-6), as PyTorch's.
    """
    if max_norm is not None and norm > max_norm:
        for p in parameters:
            gradient = p.grad
            if gradient is not None:
                gradient *= max_norm / (norm + 1e-6)
    return norm


def squared_norm(arrays: Iterable[Array]) -> float:
    """Return the sum of all squares, in float64, array after array and block after block in order.

    Ranks that hold a chunk each, and one device that goes through the same chunks, get the same
    bits. On a device a block is a whole array, because a launch costs more than the cache saves.
    """
    return read_values([square_sum(arrays)])[0]


def square_sum(arrays: Iterable[Array]) -> Array:
    """Return the sum of the squares of all elements, in float64, as an array without dims where the arrays are."""
    total = xp.zeros(())
    for array in arrays:
        flat = array.reshape(-1)
        starts = range(0, flat.size, BLOCK)
        blocks = [flat[start : start + BLOCK] for start in starts] if is_host(flat) else [flat]
        for block in blocks:
            if block.dtype.itemsize == 2:
                block = block.astype("float32")
            total = total + (block * block).sum(dtype="float64")
    return total


def own_squares(parameters: Sequence[Parameter], chunks: int, own_only: bool) -> np.ndarray:
    """Sum the squares of this rank's gradients: (chunks, units, 2), WHOLE and SPLIT.

    With `own_only` the one chunk is this rank's.
    """
    squares = np.zeros((chunks, placement_of(parameters[0]).units, 2))
    places = []
    sums = []  # where the gradients are: all of them are read in one copy
    for p in parameters:
        if p.grad is None:
            continue
        placement = placement_of(p)
        kind = SPLIT if isinstance(placement.tp, Shard) else WHOLE
        gradient = p.grad.reshape(-1)
        for chunk, elements in enumerate(elements_by_chunk(p, chunks, own_only)):
            places.append((chunk, placement.unit, kind))
            sums.append(square_sum([gradient[elements.start : elements.stop]]))
    for place, value in zip(places, read_values(sums), strict=True):
        squares[place] += value
    return squares


def elements_by_chunk(p: Parameter, chunks: int, own_only: bool) -> list[range]:
    """Return which elements of a parameter's gradient lie in each chunk, or in this rank's own alone."""
    owned = placement_of(p).dp
    if isinstance(p, ParameterShard) or owned is None:
        return [range(p.size)]
    if own_only:
        return [owned.own]
    return [owned.elements(chunk, chunks) for chunk in range(chunks)]


def add_over_axes(squares: np.ndarray, tp: Communicator | None, pp: Communicator | None) -> np.ndarray:
    """Add squares (chunks, units, 2) over the ranks of pp and tp and over the units: (chunks,)."""
    if pp is not None:
        # Each unit is one rank's, so this adds zeros and rounds nothing.
        pp.all_reduce(squares, algorithm="ordered")
    sums = add_left_to_right(squares, axis=1)  # (chunks, 2)
    split = sums[:, SPLIT].copy()
    if tp is not None:
        tp.all_reduce(split, algorithm="ordered")
    return sums[:, WHOLE] + split


def add_left_to_right(values: np.ndarray, axis: int) -> np.ndarray:
    """Add along an axis one by one. NumPy's `sum` adds in pairs, and so has other bits."""
    return np.cumsum(values, axis=axis).take(-1, axis=axis)
