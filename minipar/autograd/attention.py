"""Causal self-attention as one node: in blocks of scores, or on the whole matrix of them.

Shapes: B samples, T tokens per sample (S keys where that differs), a heads of d elements, h = a d. Keys and values have
n heads, each shared by a/n consecutive query heads (grouped-query attention; Hugging Face's repeat_kv).
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np

from minipar.autograd.fused import count_flops
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, xp

# Rows and columns of a block of scores. KEY_BLOCK is a multiple of QUERY_BLOCK: then the diagonal meets only the last
# block of each row of blocks. docs/decisions.md has the measurements behind the three.
QUERY_BLOCK, KEY_BLOCK = 128, 1024
FULL_LENGTH = 256  # up to this length "auto" is "full"
METHODS = ("auto", "blockwise", "full")


# ---- on arrays, in blocks: FlashAttention (Dao et al. 2022, arXiv 2205.14135) ----------------------------------------


def attend(
    q: Array, k: Array, v: Array, causal: bool, scale: float, keep: Array | None = None, keep_scale: float = 1.0
) -> tuple[Array, Array]:
    """Compute softmax(scale q k^T) v, and the log-sum-exp of each row's scores: (B, a, T, d) and (B, a, T).

    q (B, a, T, d), k and v (B, n, S, d). If `causal`, q and k are at the same positions and no query sees a later key;
    otherwise each sees all keys. Memory grows as T + S. With `keep` (booleans (B, a, T, S)) the probabilities go
    through dropout; the log-sum-exp is that of all scores.
    """
    blocks = _Blocks(q, k, causal, keep, keep_scale)
    batch, heads, length, dim = q.shape
    out = xp.empty((batch, length, heads, dim), dtype=q.dtype).swapaxes(1, 2)  # a view (B, a, T, d) of (B, T, h)
    lse = xp.empty((batch, heads, length, 1), dtype=q.dtype)
    for at in blocks.heads():
        keys, values, group_q, group_out, group_lse = k[at], v[at], *(_grouped(x, k.shape[1])[at] for x in (q, out, lse))
        for rows in blocks.rows():
            queries = blocks.stacked(group_q, rows) * scale

            def part(columns: slice) -> tuple[Array, Array]:
                p = blocks.scores(queries, keys, rows, columns)
                top = p.max(axis=-1, keepdims=True)
                p -= top
                xp.exp(p, out=p)
                total = p.sum(axis=-1, keepdims=True)
                result = _product(blocks.dropped(p, at, rows, columns), values[..., columns, :])
                result /= total
                return result, (top + xp.log(total))[..., 0]

            results = reduce(lambda one, other: merge(*one, *other), map(part, blocks.columns(rows)))
            group_out[..., rows, :] = blocks.unstacked(results[0])
            group_lse[..., rows, :] = blocks.unstacked(results[1][..., None])
    return out, lse[..., 0]


def attend_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool, scale: float,
    keep: Array | None = None, keep_scale: float = 1.0, delta: Array | None = None, gradients: Any = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute (dq, dk, dv) of `attend` from its inputs and results, one block of probabilities at a time.

    With `out` and `lse` of more keys than k (`merge`), these are the terms of the keys k. `delta` is the sum of
    dout * out over d, (B, a, T), if the caller has it. `gradients` are three arrays to write into.
    """
    blocks = _Blocks(q, k, causal, keep, keep_scale)
    if delta is None:
        delta = xp.einsum("bhtd,bhtd->bht", dout, out)
    dq, dk, dv = gradients or [xp.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
    for at in blocks.heads():
        keys, values = k[at], v[at]
        group = [_grouped(x, k.shape[1])[at] for x in (q, dout, lse[..., None], delta[..., None])]
        dkeys, dvalues = xp.zeros(keys.shape, dtype=k.dtype), xp.zeros(values.shape, dtype=v.dtype)
        for rows in blocks.rows():
            queries, g, row_lse, row_delta = (blocks.stacked(x, rows) for x in group)
            queries = queries * scale
            dqueries = xp.zeros(queries.shape, dtype=q.dtype)
            for columns in blocks.columns(rows):
                p = blocks.scores(queries, keys, rows, columns)
                p -= row_lse
                xp.exp(p, out=p)
                dvalues[..., columns, :] += _product(blocks.dropped(p, at, rows, columns).swapaxes(-1, -2), g)
                dscores = _product(g, values[..., columns, :].swapaxes(-1, -2))  # so far the gradient of dropped(p)
                dscores = blocks.dropped(dscores, at, rows, columns)
                # Softmax: ds = p (dp - sum_j p dp); the sum equals dout . out, a much smaller product (B.4).
                dscores -= row_delta
                dscores *= p
                dqueries += _product(dscores, keys[..., columns, :])
                dkeys[..., columns, :] += _product(dscores.swapaxes(-1, -2), queries)
            dqueries *= scale
            _grouped(dq, k.shape[1])[at][..., rows, :] = blocks.unstacked(dqueries)
        dk[at][...], dv[at][...] = dkeys, dvalues
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


def _grouped(x: Array, kv_heads: int) -> Array:
    """Return a view (B, a, ...) -> (B, n, a/n, ...)."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def _product(a: Array, b: Array) -> Array:
    count_flops(a.size, b.shape[-1])
    return xp.matmul(a, b)


class _Blocks:
    """The blocks of one attention. The queries of the heads that share keys are stacked as the rows of one matrix."""

    def __init__(self, q: Array, k: Array, causal: bool, keep: Array | None, keep_scale: float) -> None:
        self.batch, self.kv_heads, self.keys = k.shape[:3]
        self.group, self.queries, self.causal = q.shape[1] // self.kv_heads, q.shape[2], causal
        self.keep, self.keep_scale = None if keep is None else _grouped(keep, self.kv_heads), keep_scale
        self.above_diagonal = xp.triu(xp.full((QUERY_BLOCK, QUERY_BLOCK), -xp.inf, dtype=q.dtype), 1)

    def heads(self) -> Any:
        """Return the indices to loop over: on the CPU each head's (its blocks stay in the cache), on a GPU one of all."""
        return np.ndindex(self.batch, self.kv_heads) if xp.module is np else [()]

    def rows(self) -> Iterator[slice]:
        for start in range(0, self.queries, QUERY_BLOCK):
            yield slice(start, min(start + QUERY_BLOCK, self.queries))

    def columns(self, rows: slice) -> Iterator[slice]:
        """Yield the blocks of the keys that these queries see."""
        seen = rows.stop if self.causal else self.keys
        for start in range(0, seen, KEY_BLOCK):
            yield slice(start, min(start + KEY_BLOCK, seen))

    def stacked(self, x: Array, rows: slice) -> Array:
        """Return these rows of all heads of a group: (..., a/n, T, x) -> (..., a/n * rows, x)."""
        return x[..., rows, :].reshape(*x.shape[:-3], -1, x.shape[-1])

    def unstacked(self, x: Array) -> Array:
        """Return a view (..., a/n * rows, x) -> (..., a/n, rows, x)."""
        return x.reshape(*x.shape[:-2], self.group, -1, x.shape[-1])

    def scores(self, queries: Array, keys: Array, rows: slice, columns: slice) -> Array:
        """Multiply stacked queries with a block of keys; scores above the diagonal are -inf."""
        scores = _product(queries, keys[..., columns, :].swapaxes(-1, -2))  # (..., a/n * rows, columns)
        if self.causal and columns.stop == rows.stop:
            size = rows.stop - rows.start
            last = self.unstacked(scores)[..., -size:]  # (..., a/n, rows, rows)
            last += self.above_diagonal[:size, :size]
        return scores

    def dropped(self, p: Array, at: Any, rows: slice, columns: slice) -> Array:
        """Apply dropout to a block of probabilities, or to its gradient."""
        if self.keep is None:
            return p
        return p * self.stacked(self.keep[at][..., columns], rows) * self.keep_scale


# ---- as one node -----------------------------------------------------------------------------------------------------


class _BlockwiseAttention(Function):
    """Attention of packed queries, keys and values: (B, T, (a + 2n) d) -> (B, T, h)."""

    def forward(self, qkv: Array, heads: int, kv_heads: int, keep: Array | None, keep_scale: float) -> Array:
        self.qkv, self.heads, self.kv_heads, self.keep, self.keep_scale = qkv, heads, kv_heads, keep, keep_scale
        q, k, v = self.split(qkv)
        self.scale = q.shape[-1] ** -0.5
        self.output = self.attend(q, k, v)  # (B, a, T, d), in memory (B, T, h): no transpose afterwards
        return self.output.swapaxes(1, 2).reshape(*qkv.shape[:2], heads * q.shape[-1])

    def backward(self, grad: Array) -> Any:
        dqkv = xp.empty_like(self.qkv)
        dout = grad.reshape(*grad.shape[:2], self.heads, -1).swapaxes(1, 2)  # (B, a, T, d)
        self.differentiate(dout, self.split(self.qkv), self.split(dqkv))
        return dqkv, None, None, None, None

    def split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return views q (B, a, T, d), k and v (B, n, T, d)."""
        a, n = self.heads, self.kv_heads
        x = qkv.reshape(*qkv.shape[:2], a + 2 * n, qkv.shape[2] // (a + 2 * n)).swapaxes(1, 2)
        return x[:, :a], x[:, a : a + n], x[:, a + n :]

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """Return the output (B, a, T, d), and keep what `differentiate` needs."""
        out, self.lse = attend(q, k, v, True, self.scale, self.keep, self.keep_scale)
        return out

    def differentiate(self, dout: Array, inputs: Sequence[Array], gradients: Sequence[Array]) -> None:
        """Write the gradients of q, k and v."""
        dropout = {"keep": self.keep, "keep_scale": self.keep_scale}
        attend_backward(dout, *inputs, self.output, self.lse, True, self.scale, **dropout, gradients=gradients)


class _FullAttention(_BlockwiseAttention):
    """The same with all scores in one array, (B, n, a/n, T, T), which is kept for backward."""

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        batch, heads, length, dim = q.shape
        scores = xp.matmul(_grouped(q, self.kv_heads), k[:, :, None].swapaxes(-1, -2))
        count_flops(2, scores.size, dim)  # this product and the one below
        scores *= self.scale
        scores += xp.triu(xp.full((length, length), -xp.inf, dtype=q.dtype), 1)
        scores -= scores.max(axis=-1, keepdims=True)  # each row's own maximum: a global one underflows far rows to 0/0
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        self.probabilities = scores
        out = xp.empty((batch, length, heads, dim), dtype=q.dtype).swapaxes(1, 2)
        xp.matmul(self.dropped(scores), v[:, :, None], out=_grouped(out, self.kv_heads))
        return out

    def dropped(self, p: Array) -> Array:
        """Apply dropout to the probabilities, or to their gradient. It is recomputed instead of kept."""
        return p if self.keep is None else p * self.keep.reshape(p.shape) * self.keep_scale

    def differentiate(self, dout: Array, inputs: Sequence[Array], gradients: Sequence[Array]) -> None:
        (q, k, v), (dq, dk, dv), p = inputs, gradients, self.probabilities

        def stacked(x: Array) -> Array:
            """Join the rows of a group: (B, a, T, x) or (B, n, a/n, T, x) -> (B, n, a/n T, x)."""
            return x.reshape(*k.shape[:2], -1, x.shape[-1])

        count_flops(4, p.size, q.shape[-1])  # four products of this size follow
        xp.matmul(stacked(self.dropped(p)).swapaxes(-1, -2), stacked(dout), out=dv)
        dscores = xp.matmul(_grouped(dout, self.kv_heads), v[:, :, None].swapaxes(-1, -2))
        dscores = self.dropped(dscores)  # (B, n, a/n, T, T), so far the gradient of p
        delta = xp.einsum("bhtd,bhtd->bht", dout, self.output)[..., None]
        dscores -= _grouped(delta, self.kv_heads)  # softmax, as in attend_backward
        dscores *= p
        dscores *= self.scale
        xp.matmul(dscores, k[:, :, None], out=_grouped(dq, self.kv_heads))
        xp.matmul(stacked(dscores).swapaxes(-1, -2), stacked(q), out=dk)


def causal_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int | None = None,
    keep: Array | None = None,
    probability: float = 0.0,
    method: str = "auto",
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) + causal mask) v for every head: (B, T, (a + 2n) d) -> (B, T, h).

    qkv has the `heads` of q next to the `kv_heads` (None: as many) of k and those of v. With `keep` (booleans
    (B, a, T, T)) the probabilities go through dropout. `method` is one of METHODS: "blockwise" takes memory that grows
    as T and computes the scores again in backward; "full" keeps them; "auto" is full up to FULL_LENGTH tokens.
    """
    if method not in METHODS:
        raise ValueError(f"attention {method!r}: expected one of {', '.join(METHODS)}")
    full = method == "full" or (method == "auto" and qkv.shape[1] <= FULL_LENGTH)
    node = _FullAttention if full else _BlockwiseAttention
    return node.apply(qkv, heads, heads if kv_heads is None else kv_heads, keep, 1 / (1 - probability))
