"""Constants from measurements: least squares of relative errors, no constant below zero."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] = ()) -> np.ndarray:
    """The c >= 0 for which sum over i of ((known[i] + features[i] @ c) / seconds[i] - 1)^2 is least; features (n, k),
    n >= k; known: seconds that need no constant (default 0).

    A small measurement counts as much as a large one. With few constants every choice of those that are not zero can be
    tried: the best without a negative one is the minimum (Lawson and Hanson 1974, chapter 23).
    """
    measured = np.asarray(seconds, dtype=float)
    relative = np.asarray(features, dtype=float) / measured[:, None]  # (n, k)
    target = 1 - (np.asarray(known) if len(known) else 0) / measured  # (n,)
    count = relative.shape[1]
    best, least = np.zeros(count), float((target**2).sum())
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            columns = relative[:, list(chosen)]
            scale = np.abs(columns).max(axis=0)  # seconds per byte beside seconds per call: 1e-9 beside 1e-5
            found = np.linalg.lstsq(columns / scale, target, rcond=None)[0] / scale
            error = float(((columns @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = found
    return best
