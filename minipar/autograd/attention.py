"""Causal self-attention as one node. Shapes: B samples, T tokens per sample, h hidden, a heads of h/a elements."""

from typing import Any

from minipar.autograd.fused import count_flops
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, xp


def _split_heads(x: Array, heads: int) -> Array:
    """Return a view with one matrix per head: (B, T, h) -> (B, a, T, h/a)."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


class _CausalAttention(Function):
    def forward(self, qkv: Array, heads: int, keep: Array | None, keep_scale: float) -> Array:
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        self.qkv, self.heads, self.scale = qkv, heads, (width // heads) ** -0.5
        q, k, v = (_split_heads(part, heads) for part in xp.split(qkv, 3, axis=-1))  # (B, a, T, h/a)
        scores = xp.matmul(q, k.swapaxes(-1, -2))  # (B, a, T, T)
        count_flops(2, batch, length, length, width)  # this product and the one below
        scores *= self.scale
        scores += xp.triu(xp.full((length, length), -xp.inf, dtype=qkv.dtype), 1)
        scores -= scores.max(axis=-1, keepdims=True)  # each row's own maximum: a global one underflows far rows to 0/0
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        self.probabilities, self.keep, self.keep_scale = scores, keep, keep_scale
        self.output = xp.empty((batch, length, width), dtype=qkv.dtype)
        # Written as (B, T, h): no transpose afterwards.
        xp.matmul(self._dropped(scores), v, out=_split_heads(self.output, heads))
        return self.output

    def _dropped(self, p: Array) -> Array:
        """Apply dropout to the probabilities, or to their gradient. It is recomputed instead of kept."""
        return p if self.keep is None else p * self.keep * self.keep_scale

    def backward(self, grad: Array) -> Any:
        p, heads = self.probabilities, self.heads
        batch, length, width = grad.shape
        q, k, v = (_split_heads(part, heads) for part in xp.split(self.qkv, 3, axis=-1))
        dqkv = xp.empty_like(self.qkv)
        dq, dk, dv = (_split_heads(part, heads) for part in xp.split(dqkv, 3, axis=-1))  # views: written in place
        dout = _split_heads(grad, heads)  # (B, a, T, h/a)
        count_flops(4, batch, length, length, width)  # four products of this size follow
        xp.matmul(self._dropped(p).swapaxes(-1, -2), dout, out=dv)
        dscores = self._dropped(xp.matmul(dout, v.swapaxes(-1, -2)))  # (B, a, T, T), so far the gradient of p
        # Softmax: ds = p (dp - sum_j p dp); the sum equals dout . output, a much smaller product (FlashAttention, B.4).
        dscores -= xp.einsum("bhtd,bhtd->bht", dout, _split_heads(self.output, heads))[..., None]
        dscores *= p
        dscores *= self.scale
        xp.matmul(dscores, k, out=dq)
        xp.matmul(dscores.swapaxes(-1, -2), q, out=dk)
        return dqkv, None, None, None


def causal_attention(qkv: Tensor, heads: int, keep: Array | None = None, probability: float = 0.0) -> Tensor:
    """Compute softmax(q k^T / sqrt(h/a) + causal mask) v for every head: (B, T, 3h), q, k and v together -> (B, T, h).

    With `keep` (booleans (B, a, T, T)) the probabilities go through dropout.
    """
    return _CausalAttention.apply(qkv, heads, keep, 1 / (1 - probability))
