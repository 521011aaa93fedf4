"""Show that the gradient of a head that several ranks copy is the sum of the copies' gradients (grouped queries)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from chapters.support.whole_runs import relative_difference


def copies_sum_to_the_gradient(
    grouped_attention: Callable[..., Any], x: np.ndarray, ranks: int, heads: int, kv_heads: int, size: int
) -> bool:
    """Tell whether the copies' gradients of k and v add up to one device's, and none of them is it by itself.

    grouped_attention  plain.py's; all ranks are computed in this process
    x                  the tokens (T, h)
    """
    random = np.random.default_rng(7)
    copies = ranks // kv_heads
    q, k, v = (random.normal(size=(x.shape[1], count * size)) for count in (heads, kv_heads, kv_heads))
    dy = random.normal(size=(len(x), heads * size))
    _, whole = grouped_attention(x, (q, k, v), heads, kv_heads, dy)
    by_rank = []
    for rank in range(ranks):
        own_q, own_dy = (np.split(array, ranks, axis=1)[rank] for array in (q, dy))
        own_k, own_v = (np.split(array, kv_heads, axis=1)[rank // copies] for array in (k, v))
        by_rank.append(grouped_attention(x, (own_q, own_k, own_v), heads // ranks, 1, own_dy)[1])
    for which in (1, 2):
        for head, expected in enumerate(np.split(whole[which], kv_heads, axis=1)):
            terms = [by_rank[rank][which] for rank in range(head * copies, (head + 1) * copies)]
            if relative_difference(sum(terms), expected) > 1e-12 or relative_difference(terms[0], expected) < 0.1:
                return False
    return True
