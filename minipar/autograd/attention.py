"""Causal self-attention as one node of the graph, with the whole matrix of scores.

Shapes: B samples, T tokens per sample, a heads of d elements, h = a d. Keys and values have n
heads, each shared by g = a/n consecutive query heads (grouped-query attention; Hugging Face's
repeat_kv). In this file queries are (B, n, g, T, d), keys and values are (B, n, 1, T, d):
broadcasting gives each group its keys.
"""

from numpy.typing import DTypeLike

from minipar.autograd.fused import dropped, product
from minipar.autograd.rules import Gradients
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, xp

# ---- heads side by side in packed columns, and as dims of an array: views of the same memory -----


def split_heads(qkv: Array, heads: int, kv_heads: int) -> list[Array]:
    """Return views of packed q, k and v: (B, n, g, T, d) and twice (B, n, 1, T, d).

    qkv is (B, T, (a + 2n) d).
    """
    size = qkv.shape[-1] // (heads + 2 * kv_heads)
    columns = xp.split(qkv, [heads * size, (heads + kv_heads) * size], axis=-1)
    return [separate_heads(part, kv_heads, size) for part in columns]


def separate_heads(x: Array, kv_heads: int, size: int) -> Array:
    """Return a view of an array (B, T, h) as heads of d = `size` elements: (B, n, g, T, d)."""
    batch, length, width = x.shape
    group = width // (kv_heads * size)
    by_token = x.reshape(batch, length, kv_heads, group, size)
    return by_token.transpose(0, 2, 3, 1, 4)


def join_heads(out: Array) -> Array:
    """Put heads next to each other: (B, n, g, T, d) -> (B, T, h).

    The inverse of `separate_heads`; a view if the memory is ordered as (B, T, h), as that of
    `split_heads` and of `empty_like` of it.
    """
    batch, kv_heads, group, length, size = out.shape
    by_token = out.transpose(0, 3, 1, 2, 4)  # (B, T, n, g, d)
    return by_token.reshape(batch, length, kv_heads * group * size)


# ---- the whole matrix ----------------------------------------------------------------------------


def scale_of(q: Array) -> float:
    """Return by what scores are multiplied: 1 / sqrt(d)."""
    return q.shape[-1] ** -0.5


def above_diagonal(length: int, dtype: DTypeLike) -> Array:
    """Return what to add to scores (T, T) so that no token sees a later one: -inf there, else 0."""
    everywhere = xp.full((length, length), -xp.inf, dtype=dtype)
    return xp.triu(everywhere, 1)


class FullAttention(Function):
    """softmax(q k^T / sqrt(d) + causal mask) v. All probabilities are kept for backward.

    `keep` and `probability` are those of `dropped`.
    """

    def forward(
        self, qkv: Array, heads: int, kv_heads: int, keep: Array | None, probability: float
    ) -> Array:  # fmt: skip
        self.heads = heads
        self.kv_heads = kv_heads
        self.probability = probability
        q, k, v = split_heads(qkv, heads, kv_heads)
        p = product(q, transposed(k))  # the scores: (B, n, g, T, T)
        p *= scale_of(q)
        p += above_diagonal(q.shape[-2], q.dtype)
        # Each row's own maximum: a global one would underflow far rows to 0/0.
        p -= p.max(axis=-1, keepdims=True)
        xp.exp(p, out=p)
        p /= p.sum(axis=-1, keepdims=True)
        if keep is not None:
            keep = keep.reshape(p.shape)  # (B, a, T, T) -> (B, n, g, T, T)
        out = xp.empty_like(q)
        product(dropped(p, keep, probability), v, out=out)
        self.save_for_backward(qkv=qkv, p=p, keep=keep, out=out)
        return join_heads(out)

    def backward(self, grad: Array, qkv: Array, p: Array, keep: Array | None, out: Array) -> Gradients:
        q, k, v = split_heads(qkv, self.heads, self.kv_heads)
        dqkv = xp.empty_like(qkv)
        dq, dk, dv = split_heads(dqkv, self.heads, self.kv_heads)
        dout = separate_heads(grad, self.kv_heads, q.shape[-1])
        p_dropped = join_rows(dropped(p, keep, self.probability))  # (B, n, 1, g T, T)
        product(transposed(p_dropped), join_rows(dout), out=dv)
        # Softmax: dscores = p (dp - sum_j p dp). The sum equals dout . out, a much smaller product.
        dp = product(dout, transposed(v))  # (B, n, g, T, T)
        dscores = dropped(dp, keep, self.probability)
        dscores -= row_products(dout, out)
        dscores *= p
        dscores *= scale_of(q)
        product(dscores, k, out=dq)
        dscores = join_rows(dscores)
        product(transposed(dscores), join_rows(q), out=dk)
        return dqkv, None, None, None, None


def transposed(x: Array) -> Array:
    """Return a view with the last two dims swapped: (..., m, n) -> (..., n, m)."""
    return x.swapaxes(-1, -2)


def join_rows(x: Array) -> Array:
    """Put the rows of heads that share keys one below another: (B, n, g, T, w) -> (B, n, 1, g T, w).

    A product of two such arrays over their rows adds up the terms of the group's heads.
    """
    batch, kv_heads, group, length, width = x.shape
    return x.reshape(batch, kv_heads, 1, group * length, width)


def row_products(x: Array, y: Array) -> Array:
    """Return the dot product of each row of x with that of y: (..., T, d) -> (..., T, 1)."""
    return xp.einsum("...d,...d->...", x, y)[..., None]


def causal_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int | None = None,
    keep: Array | None = None,
    probability: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute softmax(q k^T / sqrt(d) + causal mask) v for every head: (B, T, h).

    qkv (B, T, (a + 2n) d) has the `heads` of q next to the `kv_heads` (None: as many) of k and
    those of v. With `keep` (B, a, T, T), booleans, the probabilities go through dropout. The scores
    are kept for backward.
    """
    if kv_heads is None:
        kv_heads = heads
    return FullAttention.apply(qkv, heads, kv_heads, keep, probability)
