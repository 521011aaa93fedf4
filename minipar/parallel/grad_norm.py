"""The norm of the whole gradient, over every mesh axis: a loop over placements.

The order of the sum is fixed, so that every ZeRO stage, and one device, get the same bits. Within one data-parallel
chunk, squares are added parameter by parameter into their unit, then unit by unit; then chunks in rank order.
"""

import math
from collections.abc import Sequence

import numpy as np

from minipar.comm.communicator import Communicator
from minipar.nn import optim
from minipar.nn.module import Parameter
from minipar.nn.optim import squared_norm
from minipar.parallel.placement import ParameterShard, Shard, bucket_slice, placement_of


def clip_grad_norm(
    parameters: Sequence[Parameter], max_norm: float | None,
    dp: Communicator, tp: Communicator | None = None, pp: Communicator | None = None, chunks: int | None = None,
) -> float:  # fmt: skip
    """Return the 2-norm of the whole gradient, the same on every rank; scale gradients down to `max_norm`, if given.

    `parameters` are what this rank's optimizer holds, with their gradients summed over dp. Scales as
    torch.nn.utils.clip_grad_norm_ does. `chunks` is the number of chunks to add in where that is not dp's size: one
    device that is compared with many ranks.

    A rank that holds shards, or experts that others do not hold, sums its own chunks only. Sends float64 values: over
    dp one (such ranks), over tp one per chunk that is summed, over pp two per unit and such chunk.
    """
    own = any(isinstance(p, ParameterShard) or placement_of(p).ep is not None for p in parameters)
    rows = 1 if own else dp.size if chunks is None else chunks
    # Per chunk and unit: squares of the parameters that every tp rank holds whole, and of those that are split.
    squares = np.zeros((rows, placement_of(parameters[0]).units, 2))
    for p in parameters:
        assert p.grad is not None, "gradients are summed over dp first"
        placement, gradient = placement_of(p), p.grad.reshape(-1)
        for row in range(rows):  # a shard lies in one chunk; a whole parameter may lie in several
            if isinstance(p, ParameterShard):
                elements = range(p.size)
            else:
                elements = bucket_slice(p).own if own else bucket_slice(p).elements(row, rows)
            if elements:
                square = squared_norm([gradient[elements.start : elements.stop]])
                squares[row, placement.unit, int(isinstance(placement.tp, Shard))] += square
    if pp is not None and pp.size > 1:  # each unit is one pipeline rank's, so this adds zeros and rounds nothing
        pp.all_reduce(squares, algorithm="ordered")
    replicated, split = np.cumsum(squares, axis=1)[:, -1].T  # cumsum adds from left to right; sum would add in pairs
    if tp is not None and tp.size > 1:
        split = tp.all_reduce(split.copy(), algorithm="ordered")
    totals = replicated + split  # one for each chunk
    total = float(dp.all_reduce(totals, algorithm="ordered")[0]) if own else float(np.cumsum(totals)[-1])
    return optim.clip_grad_norm(parameters, max_norm, norm=math.sqrt(total))
