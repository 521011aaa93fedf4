"""Blockwise attention: causal self-attention in blocks of scores, whose memory grows with the length.

FlashAttention (Dao et al. 2022, arXiv 2205.14135). Arrays have the shapes of autograd/attention.py:
queries are (B, n, g, T, d), keys and values are (B, n, 1, S, d), with S keys where that differs
from T, and g query heads share each of the n heads of keys.

Seams of the core: the model's function `attention`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.autograd.attention import (
    above_diagonal,
    causal_attention,
    join_heads,
    row_products,
    scale_of,
    separate_heads,
    split_heads,
    transposed,
)
from minipar.autograd.fused import product
from minipar.autograd.rules import Gradients
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, xp
from minipar.nn.gpt import SelfAttention

# Rows and columns of a block of scores (measured: docs/measurements.md). KEY_BLOCK is a multiple of
# QUERY_BLOCK: then the diagonal meets only the last block of each row of blocks.
QUERY_BLOCK = 128
KEY_BLOCK = 1024


def attend(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    causal: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute softmax(scale q k^T) v, and the log-sum-exp of each row's scores, (B, n, g, T).

    Memory grows as T + S. If `causal`, q and k are at the same positions and no query sees a later
    key; otherwise each query sees all keys.
    """
    out = xp.empty_like(q)
    lse = xp.empty(q.shape[:-1], dtype=q.dtype)
    mask = above_diagonal(min(QUERY_BLOCK, q.shape[-2]), q.dtype)
    for heads in heads_at_a_time(k):
        for rows in blocks(q.shape[-2], QUERY_BLOCK):
            queries = q[*heads, :, rows] * scale  # (..., g, rows, d)
            running_sum = xp.zeros((*queries.shape[:-1], 1), dtype=q.dtype)
            running_max = xp.full_like(running_sum, -xp.inf)
            # The sum of the values, each times exp(score - running_max).
            weighted = xp.zeros_like(queries)
            seen = rows.stop if causal else k.shape[-2]
            for columns in blocks(seen, KEY_BLOCK):
                keys = k[*heads, :, columns]
                values = v[*heads, :, columns]
                p = product(queries, transposed(keys))  # the scores: (..., g, rows, columns)
                if causal and columns.stop == rows.stop:
                    hide_later_keys(p, mask)
                block_max = p.max(axis=-1, keepdims=True)
                new_max = xp.maximum(running_max, block_max)
                p -= new_max
                xp.exp(p, out=p)
                # What the blocks before have added up is relative to a smaller maximum.
                correction = xp.exp(running_max - new_max)
                running_sum *= correction
                running_sum += row_sums(p)
                weighted *= correction
                weighted += product(p, values)
                running_max = new_max
            out[*heads, :, rows] = weighted / running_sum
            row_lse = running_max + xp.log(running_sum)
            lse[*heads, :, rows] = row_lse[..., 0]
    return out, lse


def attend_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    scale: float,
    causal: bool = True,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute (dq, dk, dv) of `attend` from its inputs and results; it makes the scores again.

    With `out` and `lse` of more keys than k (`merge`), these are the terms of the keys k.
    """
    dq = xp.empty_like(q)
    dk = xp.empty_like(k)
    dv = xp.empty_like(v)
    mask = above_diagonal(min(QUERY_BLOCK, q.shape[-2]), q.dtype)
    for heads in heads_at_a_time(k):
        # Each query head's term of the gradients of its keys and values: (..., g, S, d).
        shape = (*q[heads].shape[:3], *k.shape[-2:])
        dkeys = xp.zeros(shape, dtype=q.dtype)
        dvalues = xp.zeros_like(dkeys)
        for rows in blocks(q.shape[-2], QUERY_BLOCK):
            queries = q[*heads, :, rows] * scale
            grad = dout[*heads, :, rows]
            row_lse = lse[*heads, :, rows, None]
            delta = row_products(grad, out[*heads, :, rows])
            dqueries = xp.zeros_like(queries)
            seen = rows.stop if causal else k.shape[-2]
            for columns in blocks(seen, KEY_BLOCK):
                keys = k[*heads, :, columns]
                values = v[*heads, :, columns]
                p = product(queries, transposed(keys))
                if causal and columns.stop == rows.stop:
                    hide_later_keys(p, mask)
                p -= row_lse
                xp.exp(p, out=p)
                dvalues[..., columns, :] += product(transposed(p), grad)
                # Softmax: dscores = p (dp - delta), as in FullAttention.
                dscores = product(grad, transposed(values))
                dscores -= delta
                dscores *= p
                dqueries += product(dscores, keys)
                dkeys[..., columns, :] += product(transposed(dscores), queries)
            dqueries *= scale
            dq[*heads, :, rows] = dqueries
        dk[heads] = dkeys.sum(axis=-3, keepdims=True)
        dv[heads] = dvalues.sum(axis=-3, keepdims=True)
    return dq, dk, dv


def blocks(length: int, size: int) -> list[slice]:
    """Cut `length` rows or columns into blocks of `size`; the last one may be smaller."""
    starts = range(0, length, size)
    return [slice(start, min(start + size, length)) for start in starts]


def heads_at_a_time(k: Array) -> list[tuple[slice, slice]]:
    """Return slices of (B, n) to compute one after another.

    On the CPU each is one head of keys, whose blocks stay in caches. A GPU takes all at once.
    """
    batch, kv_heads = k.shape[:2]
    if xp.module is np:
        return list(itertools.product(blocks(batch, 1), blocks(kv_heads, 1)))
    return [(slice(0, batch), slice(0, kv_heads))]


def hide_later_keys(scores: Array, mask: Array) -> None:
    """Add the mask of `above_diagonal` to the last columns of a block, where the diagonal is."""
    rows = scores.shape[-2]
    scores[..., -rows:] += mask[:rows, :rows]


def row_sums(p: Array) -> Array:
    """Return p.sum(axis=-1, keepdims=True), as a product with ones: in half the time (decisions.md)."""
    ones = xp.ones((p.shape[-1], 1), dtype=p.dtype)
    return xp.matmul(p, ones)


def merge(out_1: Array, lse_1: Array, out_2: Array, lse_2: Array) -> tuple[Array, Array]:
    """Merge the results of `attend` for two sets of keys: out (..., T, d) and lse (..., T).

    The shares of both add up to 1 to the last bit. exp(lse_1 - lse) and exp(lse_2 - lse) would miss
    that by a rounding of lse, which backward multiplies by the size of the scores. A row that sees
    no key has lse = -inf and out = 0.
    """
    lse = xp.logaddexp(lse_1, lse_2)
    sees_none = lse == -xp.inf  # -inf - -inf would be nan
    difference = xp.where(sees_none, 0, lse_2)
    difference -= xp.where(sees_none, 0, lse_1)
    small = xp.exp(-xp.abs(difference))
    larger = 1 / (1 + small)
    smaller = small / (1 + small)
    share_1 = xp.where(difference > 0, smaller, larger)
    share_2 = xp.where(difference > 0, larger, smaller)
    out = out_1 * share_1[..., None]
    out += out_2 * share_2[..., None]
    return out, lse


# ---- the node ------------------------------------------------------------------------------------


class BlockwiseAttention(Function):
    """Attention by two functions that are called as `attend` and `attend_backward` are.

    It keeps no scores: q, k, v, the result, and one log-sum-exp for each row.
    """

    def forward(
        self,
        qkv: Array,
        heads: int,
        kv_heads: int,
        forward: Callable[..., tuple[Array, ...]],
        backward: Callable[..., tuple[Array, ...]],
    ) -> Array:  # fmt: skip
        self.heads = heads
        self.kv_heads = kv_heads
        self.array_backward = backward
        q, k, v = split_heads(qkv, heads, kv_heads)
        out, lse = forward(q, k, v, scale_of(q))
        self.save_for_backward(qkv=qkv, out=out, lse=lse)
        return join_heads(out)

    def backward(self, grad: Array, qkv: Array, out: Array, lse: Array) -> Gradients:
        q, k, v = split_heads(qkv, self.heads, self.kv_heads)
        dout = separate_heads(grad, self.kv_heads, q.shape[-1])
        gradients = self.array_backward(dout, q, k, v, out, lse, scale_of(q))
        dqkv = xp.empty_like(qkv)
        views = split_heads(dqkv, self.heads, self.kv_heads)
        for view, gradient in zip(views, gradients, strict=True):
            view[...] = gradient
        return dqkv, None, None, None, None


# ---- a model's attention ---------------------------------------------------------------------------


def blockwise_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int | None = None,
    keep: Array | None = None,
    probability: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `causal_attention` in blocks of scores, which backward makes again.

    Up to one block of tokens, and with dropout, whose masks are whole matrices, it is
    `causal_attention` itself.
    """
    if keep is not None or qkv.shape[1] <= QUERY_BLOCK:
        return causal_attention(qkv, heads, kv_heads, keep, probability)
    if kv_heads is None:
        kv_heads = heads
    return BlockwiseAttention.apply(qkv, heads, kv_heads, attend, attend_backward)


def use_blockwise(model: Any) -> Any:
    """Let the attention layers of `model` compute `blockwise_attention`, in place; return the model.

    Call it before `context_parallel`, which replaces attention, too.
    """
    for _, module in model.named_modules():
        if isinstance(module, SelfAttention):
            module.attention = blockwise_attention
    return model
