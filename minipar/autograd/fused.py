"""The operations a GPT is made of, each as one node: fewer passes over memory, fewer arrays kept for backward.

Shapes: B batch, T sequence, h hidden, V vocabulary, H heads, d = h/H head size, N = B*T rows.
Weight gradients are LazyGradients: written straight into the gradient buffer, or put off (see tensor.LazyGradient).
"""

from __future__ import annotations

from typing import Any

from minipar.autograd.modes import LazyGradient, spend
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, xp

IGNORE_INDEX = -100  # PyTorch's and Hugging Face's mark for "no target here"
GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)
GELU_CUBIC = 0.044715


class _Linear(Function):
    def forward(self, x: Array, weight: Array, bias: Array | None, transposed: bool) -> Array:
        self.transposed, self.shape = transposed, x.shape
        self.matrix = self.at_backward(1, weight)  # (in, out), or (out, in) if transposed
        self.x = x.reshape(-1, x.shape[-1])  # (N, in)
        y = xp.matmul(self.x, weight.T if transposed else weight)  # (N, out)
        spend(*self.x.shape, y.shape[-1])
        if bias is not None:
            y += bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, grad: Array) -> Any:
        x, g = self.x, grad.reshape(-1, grad.shape[-1])  # (N, in), (N, out)
        dx = None
        if self.needs[0]:
            w = self.matrix()
            dx = xp.matmul(g, w if self.transposed else w.T).reshape(self.shape)
            spend(*x.shape, g.shape[-1])
        left, right = (g, x) if self.transposed else (x, g)
        dweight = LazyGradient(lambda out: outer_product(left, right, out)) if self.needs[1] else None
        dbias = LazyGradient(lambda out: g.sum(axis=0, out=out)) if self.needs[2] else None
        return dx, dweight, dbias, None


def outer_product(left: Array, right: Array, out: Array | None) -> Array:
    """The weight gradient of a product, (N, a), (N, b) -> (a, b): what may be put off."""
    spend(*left.shape, right.shape[-1])
    return xp.matmul(left.T, right, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """x @ weight + bias: (..., in) -> (..., out), weight (in, out) as GPT-2 stores it, or (out, in) when
    `transposed`.
    """
    return _Linear.apply(x, weight, bias, transposed)


class _Embedding(Function):
    def forward(self, weight: Array, index: Array) -> Array:
        self.index, self.shape = index, weight.shape
        return weight[index]

    def backward(self, grad: Array) -> Any:
        index, shape = self.index.reshape(-1), self.shape
        rows = grad.reshape(-1, shape[1])  # (N, h)

        def scatter(out: Array | None) -> Array:
            """out[v] = the sum, in order, of the rows whose index is v. Sorting first, then summing runs, took a third
            of the time of `add.at`."""
            if out is None:
                out = xp.empty(shape, dtype=rows.dtype)
            out[...] = 0
            if index.size == 0:
                return out
            order = xp.argsort(index, kind="stable")
            ordered = index[order]
            starts = xp.flatnonzero(xp.concatenate((xp.ones(1, dtype=bool), ordered[1:] != ordered[:-1])))
            out[ordered[starts]] = xp.add.reduceat(rows[order], starts, axis=0)
            return out

        return LazyGradient(scatter), None


def embedding(weight: Tensor, index: Array) -> Tensor:
    """Rows of `weight` (V, h) by an integer array `index` of any shape: (...,) -> (..., h)."""
    return _Embedding.apply(weight, index)


class _LayerNorm(Function):
    def forward(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        self.gain = self.at_backward(1, weight)
        centered = x - x.mean(axis=-1, keepdims=True)
        variance = xp.einsum("...i,...i->...", centered, centered)[..., None] / x.shape[-1]  # (..., 1)
        self.rstd = 1 / xp.sqrt(variance + eps)
        centered *= self.rstd
        self.xhat = centered
        y = self.xhat * weight
        y += bias
        return y

    def backward(self, grad: Array) -> Any:
        # With y = xhat w + b:  dx = rstd (g - mean(g) - xhat mean(g xhat)),  g = grad w,  means over the last dim.
        xhat, gain, rows = self.xhat, self.gain(), tuple(range(grad.ndim - 1))
        product = grad * xhat
        dweight = product.sum(axis=rows)
        product *= gain
        mean_gx = product.mean(axis=-1, keepdims=True)
        dx = grad * gain
        dx -= dx.mean(axis=-1, keepdims=True)
        xp.multiply(xhat, mean_gx, out=product)
        dx -= product
        dx *= self.rstd
        return dx, dweight, grad.sum(axis=rows), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dim (Ba et al. 2016): (..., h) -> (..., h); the variance divides by h, as PyTorch's
    does.
    """
    return _LayerNorm.apply(x, weight, bias, eps)


class _Gelu(Function):
    def forward(self, x: Array) -> Array:
        # t = tanh(s (x + c x^3)); gelu = x (1 + t) / 2. Products, not powers: x**3 is many times slower than x*x*x.
        t = x * x
        t *= GELU_CUBIC
        t += 1
        t *= x
        t *= GELU_SCALE
        xp.tanh(t, out=t)
        self.x, self.t = x, t
        y = t + 1
        y *= x
        y *= 0.5
        return y

    def backward(self, grad: Array) -> Array:
        # d gelu / dx = (1 + t)/2 + x (1 - t^2) s (1 + 3 c x^2) / 2 = (1 + t) (1 + (1 - t) x s (1 + 3 c x^2)) / 2
        x, t = self.x, self.t
        inner = x * x
        inner *= 3 * GELU_CUBIC * GELU_SCALE
        inner += GELU_SCALE
        inner *= x
        xp.subtract(1, t, out=t)  # overwritten: nobody else holds it and backward runs once
        inner *= t
        inner += 1
        xp.subtract(2, t, out=t)
        inner *= t
        inner *= 0.5
        inner *= grad
        return inner


def gelu(x: Tensor) -> Tensor:
    """`gelu_new` of GPT-2, the tanh approximation (Hendrycks and Gimpel 2016)."""
    return _Gelu.apply(x)


def _split_heads(x: Array, heads: int) -> Array:
    """(B, T, h) -> (B, H, T, d), a view."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


class _Dropout(Function):
    def forward(self, x: Array, keep: Array, scale: float) -> Array:
        self.keep, self.scale = keep, scale
        y = x * keep
        y *= scale
        return y

    def backward(self, grad: Array) -> Any:
        dx = grad * self.keep
        dx *= self.scale
        return dx, None, None


def dropout(x: Tensor, keep: Array, probability: float) -> Tensor:
    """x where `keep` (booleans of x's shape), else 0, times 1/(1 - probability) (Srivastava et al. 2014)."""
    return _Dropout.apply(x, keep, 1 / (1 - probability))


class _CausalAttention(Function):
    def forward(self, qkv: Array, heads: int, keep: Array | None, keep_scale: float) -> Array:
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        self.qkv, self.heads, self.scale = qkv, heads, (width // heads) ** -0.5
        q, k, v = (_split_heads(part, heads) for part in xp.split(qkv, 3, axis=-1))  # (B, H, T, d)
        scores = xp.matmul(q, k.swapaxes(-1, -2))  # (B, H, T, T)
        spend(2, batch, length, length, width)  # this product and the one below
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
        """Dropout on the probabilities, or on their gradient; recomputed rather than kept."""
        if self.keep is None:
            return p
        dropped = p * self.keep
        dropped *= self.keep_scale
        return dropped

    def backward(self, grad: Array) -> Any:
        p, heads = self.probabilities, self.heads
        batch, length, width = grad.shape
        q, k, v = (_split_heads(part, heads) for part in xp.split(self.qkv, 3, axis=-1))
        dqkv = xp.empty_like(self.qkv)
        dq, dk, dv = (_split_heads(part, heads) for part in xp.split(dqkv, 3, axis=-1))  # views: written in place
        dout = _split_heads(grad, heads)  # (B, H, T, d)
        spend(4, batch, length, length, width)  # four products of this size follow
        xp.matmul(self._dropped(p).swapaxes(-1, -2), dout, out=dv)
        dscores = self._dropped(xp.matmul(dout, v.swapaxes(-1, -2)))  # (B, H, T, T), so far the gradient of p
        # Softmax: ds = p (dp - sum_j p dp); the sum equals dout . output, a much smaller product (FlashAttention, B.4).
        dscores -= xp.einsum("bhtd,bhtd->bht", dout, _split_heads(self.output, heads))[..., None]
        dscores *= p
        dscores *= self.scale
        xp.matmul(dscores, k, out=dq)
        xp.matmul(dscores.swapaxes(-1, -2), q, out=dk)
        return dqkv, None, None, None


def causal_attention(qkv: Tensor, heads: int, keep: Array | None = None, probability: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(d) + causal mask) v for every head: (B, T, 3h) holding q, k, v side by side -> (B, T, h).

    With `keep` (booleans (B, H, T, T)) the probabilities go through dropout.
    """
    return _CausalAttention.apply(qkv, heads, keep, 1 / (1 - probability))


class _CrossEntropy(Function):
    def forward(self, logits: Array, targets: Array) -> Array:
        self.shape = logits.shape
        logits = logits.reshape(-1, logits.shape[-1])  # (N, V)
        targets = targets.reshape(-1)
        self.counted = targets != IGNORE_INDEX
        self.targets = xp.where(self.counted, targets, 0)
        self.rows = xp.arange(targets.size)
        top = logits.max(axis=-1, keepdims=True)
        p = logits - top
        correct = p[self.rows, self.targets]
        xp.exp(p, out=p)
        total = p.sum(axis=-1, keepdims=True)
        p /= total
        self.probabilities = p
        return xp.where(self.counted, xp.log(total[:, 0]) - correct, 0).sum()

    def backward(self, grad: Array) -> Any:
        dlogits = self.probabilities  # overwritten: nobody else holds it and backward runs once
        dlogits[self.rows, self.targets] -= 1
        dlogits *= xp.where(self.counted, grad, 0)[:, None]
        return dlogits.reshape(self.shape), None


def cross_entropy_sum(logits: Tensor, targets: Array) -> Tensor:
    """Sum over positions of -log softmax(logits)[target], in nats; positions whose target is -100 count nothing.

    logits (..., V), integer targets (...,). A sum, not a mean: ranks that hold unequal counts divide by the global
    count.
    """
    return _CrossEntropy.apply(logits, targets)


def cross_entropy(logits: Tensor, targets: Array) -> Tensor:
    """The mean of `cross_entropy_sum` over the positions that count, as `torch.nn.functional.cross_entropy`."""
    return cross_entropy_sum(logits, targets) * (1 / max(1, int((targets != IGNORE_INDEX).sum())))
