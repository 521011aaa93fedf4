"""Train six matrices on plain arrays for Muon: the layers, their gradient, and the sum of the ranks' gradients."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np

WIDTHS = (12, 12, 48, 12, 12, 48, 12)
SHAPES = tuple(pairwise(WIDTHS))
SIZES = tuple(prod(shape) for shape in SHAPES)
SAMPLES = 32  # of each rank in each step


def views(flat: np.ndarray) -> list[np.ndarray]:
    """Return the six matrices of a flat array in which they lie one after another."""
    parts = np.split(flat, np.cumsum(SIZES)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def initial() -> np.ndarray:
    """Return the parameters before the first step, flat."""
    return np.random.default_rng(9).normal(0, 0.4, sum(SIZES))


def loss_and_gradient(flat: np.ndarray, rank: int, step: int, ranks: int) -> tuple[float, np.ndarray]:
    """Return a rank's share of the mean loss over all ranks' samples, and the gradient of its share, flat.

    The loss of a sample is half the sum of squares behind the layers x = tanh(x A).
    """
    matrices = views(flat)
    kept = [np.random.default_rng([9, step, rank]).normal(size=(SAMPLES, WIDTHS[0]))]
    for matrix in matrices:
        kept.append(np.tanh(kept[-1] @ matrix))
    loss = float((kept[-1] ** 2).sum()) / 2 / (ranks * SAMPLES)
    gradient = kept[-1] / (ranks * SAMPLES)
    found = []
    for matrix, x, y in zip(matrices[::-1], kept[-2::-1], kept[:0:-1], strict=True):
        gradient = gradient * (1 - y**2)
        found.append((x.T @ gradient).reshape(-1))
        gradient = gradient @ matrix.T
    return loss, np.concatenate(found[::-1])


def whole_batch(flat: np.ndarray, step: int, ranks: int) -> tuple[float, np.ndarray]:
    """Return loss and gradient, flat, of one device that takes the ranks' samples one rank after another."""
    shares = [loss_and_gradient(flat, rank, step, ranks) for rank in range(ranks)]
    return sum(loss for loss, _ in shares), in_rank_order([gradient for _, gradient in shares])


def in_rank_order(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return ((a_0 + a_1) + a_2) + ..., the sum of the ranks' arrays as one device makes it."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total
