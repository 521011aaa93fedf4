"""The norm of the whole gradient without any rounding that depends on the order of a sum.

Whatever ranks hold which elements, they get the same bits. Seams of the core: none, it reads placements.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from minipar.backend import Array, to_host
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.parameter import Parameter
from minipar.parallel.grad_norm import scale_down
from minipar.parallel.placement import ParameterShard, Shard, placement_of

BITS = 32  # Each of the two integers that stand for a square has as many.


def check_size(elements: int) -> None:
    """Raise UsageError if the int64 sums of so many squares could overflow: of more than 2^31."""
    most = 2 ** (63 - BITS)
    if elements > most:
        why = f"the norm adds integers of {BITS} bits in 64 bits, of at most {most} squares"
        raise UsageError(f'reduction "tree" with {elements} parameters: {why}; use another reduction')


def clip_exact_norm(
    parameters: Sequence[Parameter],
    max_norm: float | None,
    dp: Communicator,
    tp: Communicator,
    pp: Communicator,
) -> float:
    """Return the 2-norm of the whole gradient, the same bits in every layout; scale it to `max_norm`.

    The arguments are those of `grad_norm.clip_grad_norm`. Sends one float64 and two integers over
    tp, over pp, and over dp if this rank's optimizer holds shards.
    """
    axes = [tp, pp]
    if any(isinstance(p, ParameterShard) for p in parameters):
        axes.append(dp.chunk_comm)
    gradients: list[Array] = []
    for p in parameters:
        # One rank of tp counts what all of them hold.
        over_tp = placement_of(p).tp
        if isinstance(over_tp, Shard) or over_tp.rank == 0:
            gradients.append(p.grad)
    total = exact_square_sum(gradients, axes)
    return scale_down(parameters, max_norm, math.sqrt(total))


def exact_square_sum(gradients: Iterable[Array], axes: Iterable[Communicator]) -> float:
    """Return the sum of all squares over the ranks of these axes, the same for any order and any ranks.

    Each square is cut into two integers of BITS bits, relative to the largest square of all ranks.
    Sums of integers are exact, of up to 2^31 squares (`check_size`). What is below them, 2^-64 of
    the largest square, is dropped. NB: Demmel and Nguyen 2013 sum floats reproducibly in this way.
    """
    squares: list[np.ndarray] = []
    for gradient in gradients:
        wide = to_host(gradient).astype(np.float64)
        squares.append(wide * wide)
    largest = np.zeros(1)
    for square in squares:
        np.maximum(largest, square.max(initial=0), out=largest)
    for axis in axes:
        axis.all_reduce(largest, op="max", algorithm="ordered")
    if largest[0] == 0 or not np.isfinite(largest[0]):
        return float(largest[0])
    exponent = int(np.frexp(largest[0])[1])  # all squares are below 2^exponent
    totals = np.zeros(2, dtype=np.int64)
    for square in squares:
        scaled = np.ldexp(square, BITS - exponent)
        high = np.floor(scaled)
        low = np.floor(np.ldexp(scaled - high, BITS))
        totals[0] += high.sum(dtype=np.int64)
        totals[1] += low.sum(dtype=np.int64)
    for axis in axes:
        axis.all_reduce(totals, algorithm="ordered")
    total = (int(totals[0]) << BITS) + int(totals[1])
    return math.ldexp(total, exponent - 2 * BITS)
