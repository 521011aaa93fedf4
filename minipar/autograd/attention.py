"""Causal self-attention as one node: in blocks of scores, or on the whole matrix of them.

Shapes: B samples, T tokens per sample (S keys where that differs), a heads of d elements, h = a d. Keys and values have
n heads, each shared by a/n consecutive query heads (grouped-query attention; Hugging Face's repeat_kv).
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import numpy as np

from minipar.autograd.fused import product
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, xp

# Rows and columns of a block of scores (measured: docs/speed.md). KEY_BLOCK is a multiple of QUERY_BLOCK: then the
# diagonal meets only the last block of each row of blocks.
QUERY_BLOCK, KEY_BLOCK = 128, 1024
ALL = slice(None)
METHODS = ("auto", "blockwise", "full")


def attend(
    q: Array, k: Array, v: Array, causal: bool, scale: float, keep: Any = None, keep_scale: float = 1.0
) -> tuple[Array, Array]:
    """Compute softmax(scale q k^T) v, and the log-sum-exp of each row's scores: (B, a, T, d) and (B, a, T).

    In blocks, as FlashAttention (Dao et al. 2022, arXiv 2205.14135). q (B, a, T, d), k and v (B, n, S, d). If `causal`,
    q and k are at the same positions and no query sees a later key; otherwise each sees all keys. Memory grows as T +
    S. With `keep` (B, a, T, S), booleans or a Mask of nn, probabilities go through dropout; lse is that of all scores.
    """
    batch, heads, length, dim = q.shape
    out = xp.empty((batch, length, heads, dim), dtype=q.dtype).swapaxes(1, 2)  # a view (B, a, T, d) of (B, T, h)
    lse = xp.empty((batch, heads, length), dtype=q.dtype)
    ones = xp.ones((min(KEY_BLOCK, k.shape[2]), 1), dtype=q.dtype)
    for at in _heads(k):
        q_, k_, v_, out_, lse_ = (_group(x, k, at) for x in (q, k, v, out, lse))
        for rows, blocks in _blocks(q, k, causal):
            kept, results = _kept(keep, q, k, at, rows), []
            queries = q_[..., rows, :] * scale
            for columns, mask in blocks:
                p = _scores(queries, k_[..., columns, :], mask)
                top = p.max(axis=-1, keepdims=True)
                p -= top
                xp.exp(p, out=p)
                total = xp.matmul(p, ones[: p.shape[-1]])  # (..., rows, 1), in half the time of p.sum
                part = product(_dropped(p, kept, keep_scale, columns), v_[..., columns, :])
                part /= total
                results.append((part, (top + xp.log(total))[..., 0]))
            out_[..., rows, :], lse_[..., rows] = reduce(lambda one, other: merge(*one, *other), results)
    return out, lse


def attend_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool, scale: float,
    keep: Any = None, keep_scale: float = 1.0, gradients: Any = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute (dq, dk, dv) of `attend` from its inputs and results; the probabilities are computed again, in blocks.

    With `out` and `lse` of more keys than k (`merge`), these are the terms of the keys k. `gradients` are three arrays
    to write into.
    """
    dq, dk, dv = gradients or [xp.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
    for at in _heads(k):
        q_, k_, v_, dout_, out_, lse_, dq_ = (_group(x, k, at) for x in (q, k, v, dout, out, lse, dq))
        ones = xp.ones((*k_.shape[:-1], 1), dtype=k.dtype)
        k_1, v_1 = (xp.concatenate([x, ones], axis=-1) for x in (k_, v_))  # (..., S, d + 1)
        dk_, dv_ = (xp.zeros((*q_.shape[:-2], *k_.shape[-2:]), dtype=q.dtype) for _ in "kv")  # of each query head
        for rows, blocks in _blocks(q, k, causal):
            kept, queries, g = _kept(keep, q, k, at, rows), q_[..., rows, :] * scale, dout_[..., rows, :]
            # A column more in a product subtracts lse or delta, in less time than a pass over the block.
            row_lse, row_delta = lse_[..., rows, None], xp.einsum("...d,...d->...", g, out_[..., rows, :])[..., None]
            queries_lse, g_delta = (xp.concatenate([x, -y], axis=-1) for x, y in ((queries, row_lse), (g, row_delta)))
            dqueries = xp.zeros(queries.shape, dtype=q.dtype)
            for columns, mask in blocks:
                p = _scores(queries_lse, k_1[..., columns, :], mask)
                xp.exp(p, out=p)
                dv_[..., columns, :] += product(_dropped(p, kept, keep_scale, columns).swapaxes(-1, -2), g)
                # Softmax: ds = p (dp - sum_j p dp); the sum equals dout . out, a much smaller product (B.4).
                dscores = product(g_delta, v_1[..., columns, :].swapaxes(-1, -2))
                if keep is not None:  # dropout acts on dp alone
                    dscores += row_delta
                    dscores = _dropped(dscores, kept, keep_scale, columns)
                    dscores -= row_delta
                dscores *= p
                dqueries += product(dscores, k_[..., columns, :])
                dk_[..., columns, :] += product(dscores.swapaxes(-1, -2), queries)
            dqueries *= scale
            dq_[..., rows, :] = dqueries
        dk[at], dv[at] = dk_.sum(axis=-3), dv_.sum(axis=-3)
    return dq, dk, dv


def merge(out_1: Array, lse_1: Array, out_2: Array, lse_2: Array) -> tuple[Array, Array]:
    """Merge the results of `attend` for two sets of keys into that for both: out (..., T, d), lse (..., T).

    A row that sees no key has lse = -inf and out = 0.
    """
    lse = xp.logaddexp(lse_1, lse_2)
    finite = xp.where(lse == -xp.inf, 0, lse)  # -inf - -inf would be nan
    out = out_1 * xp.exp(lse_1 - finite)[..., None]
    out += out_2 * xp.exp(lse_2 - finite)[..., None]
    return out, lse


def _heads(k: Array) -> Iterable[Any]:
    """Return heads of keys as slices of (B, n): on the CPU one at a time (its blocks stay in caches), on a GPU all."""
    one = xp.module is np
    return itertools.product(*([slice(i, i + 1) for i in range(n)] if one else [slice(0, n)] for n in k.shape[:2]))


def _group(x: Any, k: Array, at: Any) -> Any:
    """Return x of (B, a or n, ...) for these heads of keys: (samples, heads, a/n or 1, ...)."""
    return None if x is None else x.reshape(*k.shape[:2], x.shape[1] // k.shape[1], *x.shape[2:])[at]


def _blocks(q: Array, k: Array, causal: bool) -> Iterator[tuple[slice, list[tuple[slice, Array | None]]]]:
    """Yield each block of rows, with the columns that it sees and what to add to the last scores of each block."""
    size = min(QUERY_BLOCK, q.shape[2])
    above_diagonal = xp.triu(xp.full((size, size), -xp.inf, dtype=q.dtype), 1)
    for start in range(0, q.shape[2], QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, q.shape[2]))
        seen, mask = rows.stop if causal else k.shape[2], above_diagonal[: rows.stop - start, : rows.stop - start]
        columns = [slice(i, min(i + KEY_BLOCK, seen)) for i in range(0, seen, KEY_BLOCK)]
        yield rows, [(c, mask if causal and c.stop == seen else None) for c in columns]


def _scores(queries: Array, keys: Array, mask: Array | None) -> Array:
    """Multiply queries, scaled already, with keys."""
    scores = product(queries, keys.swapaxes(-1, -2))
    if mask is not None:
        scores[..., -mask.shape[-1] :] += mask
    return scores


def _kept(keep: Any, q: Array, k: Array, at: Any, rows: slice) -> Array | None:
    """Return rows of the mask, with heads as in `_group`."""
    heads = slice(*(i * q.shape[1] // k.shape[1] for i in (at[1].start, at[1].stop)))
    return None if keep is None else _group(keep[at[0], heads, rows, ALL], k[at], ())


def _dropped(p: Array, keep: Array | None, scale: float, columns: slice = ALL) -> Array:
    """Apply dropout to probabilities, or to their gradient. It is recomputed instead of kept."""
    return p if keep is None else p * keep[..., columns] * scale


def _attend_full(q: Array, k: Array, v: Array, causal: bool, scale: float, keep: Any, keep_scale: float) -> Any:
    """Compute `attend` with whole matrices; the probabilities (B, n, a/n, T, T) take the log-sum-exp's place."""
    batch, heads, length, dim = q.shape
    q_, k_, v_, keep_ = (_group(x, k, ()) for x in (q, k, v, keep))
    p = product(q_, k_.swapaxes(-1, -2))
    p *= scale
    p += xp.triu(xp.full((length, length), -xp.inf, dtype=q.dtype), 1)
    p -= p.max(axis=-1, keepdims=True)  # each row's own maximum: a global one underflows far rows to 0/0
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    out = xp.empty((batch, length, heads, dim), dtype=q.dtype).swapaxes(1, 2)
    product(_dropped(p, keep_, keep_scale), v_, out=_group(out, k, ()))
    return out, p


def _full_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, p: Array, causal: bool, scale: float,
    keep: Any, keep_scale: float, gradients: Any,
) -> None:  # fmt: skip
    q_, k_, v_, keep_, g, out, dq, dk, dv = (_group(x, k, ()) for x in (q, k, v, keep, dout, out, *gradients))

    def transposed(x: Array, y: Array) -> tuple[Array, Array]:
        """Join the rows of the heads that share keys, (B, n, 1, a/n T, ...), and transpose x."""
        x, y = (z.reshape(*k.shape[:2], 1, -1, z.shape[-1]) for z in (x, y))
        return x.swapaxes(-1, -2), y

    product(*transposed(_dropped(p, keep_, keep_scale), g), out=dv)
    dscores = _dropped(product(g, v_.swapaxes(-1, -2)), keep_, keep_scale)  # so far the gradient of p
    dscores -= xp.einsum("...d,...d->...", g, out)[..., None]  # softmax, as in attend_backward
    dscores *= p
    dscores *= scale
    product(dscores, k_, out=dq)
    product(*transposed(dscores, q_), out=dk)


class CausalAttention(Function):
    """Attention of packed q, k and v by a pair of functions on arrays, which are called as attend, attend_backward."""

    def forward(self, qkv: Array, heads: int, kv_heads: int, keep: Any, keep_scale: float, functions: Any) -> Array:
        self.qkv, self.heads, self.kv_heads, self.keep, self.keep_scale = qkv, heads, kv_heads, keep, keep_scale
        q, k, v = self.split(qkv)
        self.scale, (compute, self.compute_backward) = q.shape[-1] ** -0.5, functions
        self.output, self.kept = compute(q, k, v, True, self.scale, keep, keep_scale)
        return self.output.swapaxes(1, 2).reshape(*qkv.shape[:2], heads * q.shape[-1])  # in memory already (B, T, h)

    def split(self, qkv: Array) -> Any:
        """Return views q (B, a, T, d), k and v (B, n, T, d)."""
        count, ends = self.heads + 2 * self.kv_heads, [self.heads, self.heads + self.kv_heads]
        return xp.split(qkv.reshape(*qkv.shape[:2], count, qkv.shape[2] // count).swapaxes(1, 2), ends, axis=1)

    def backward(self, grad: Array) -> Any:
        dqkv = xp.empty_like(self.qkv)
        dout = grad.reshape(*grad.shape[:2], self.heads, -1).swapaxes(1, 2)  # (B, a, T, d)
        options = self.output, self.kept, True, self.scale, self.keep, self.keep_scale
        self.compute_backward(dout, *self.split(self.qkv), *options, self.split(dqkv))
        return dqkv, None, None, None, None, None


def keeps_scores(method: str, length: int) -> bool:
    """Return whether `causal_attention` keeps the scores of sequences of `length` tokens for backward."""
    return method == "full" or (method == "auto" and length <= QUERY_BLOCK)


def causal_attention(
    qkv: Tensor, heads: int, kv_heads: int | None = None, keep: Any = None, probability: float = 0.0,
    method: str = "auto",
) -> Tensor:  # fmt: skip
    """Compute softmax(q k^T / sqrt(d) + causal mask) v for every head: (B, T, (a + 2n) d) -> (B, T, h).

    qkv has the `heads` of q next to the `kv_heads` (None: as many) of k and those of v. With `keep` (B, a, T, T), as in
    `attend`, the probabilities go through dropout. `method` is one of METHODS: "full" keeps scores and masks,
    "blockwise" makes them again in backward, and its memory grows as T; "auto" is full up to one block of tokens.
    """
    if method not in METHODS:
        raise ValueError(f"attention {method!r}: expected one of {', '.join(METHODS)}")
    full = keeps_scores(method, qkv.shape[1])
    functions = (_attend_full, _full_backward) if full else (attend, attend_backward)
    keep = keep[...] if full and keep is not None else keep
    return CausalAttention.apply(qkv, heads, kv_heads or heads, keep, 1 / (1 - probability), functions)
