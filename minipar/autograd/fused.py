"""The operations of a GPT but attention, each as one node: fewer passes over memory, fewer arrays kept for backward.

Shapes: B samples, T tokens per sample, h hidden, V vocabulary, N = B*T rows. Weight gradients are LazyGradients.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from minipar.autograd.backward import LazyGradient
from minipar.autograd.tensor import Function, Tensor, operation
from minipar.backend import Array, setting, xp

IGNORE_INDEX = -100  # PyTorch's and Hugging Face's mark for "no target here"
GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)
GELU_CUBIC = 0.044715
_flop_counter: ContextVar[Callable[[int], None] | None] = ContextVar("flop_counter", default=None)


def flop_counter(count: Callable[[int], None]) -> AbstractContextManager[Any]:
    """Call `count` with the operations of each matrix product of these layers and of attention in the block."""
    return setting(_flop_counter, count)


def count_flops(*sizes: int) -> None:
    """Count a product of matrices (n, k) and (k, m), or a stack of them: 2 n k m operations."""
    count = _flop_counter.get()
    if count is not None:
        count(2 * math.prod(sizes))


class LinearFunction(Function):
    def forward(self, x: Array, weight: Array, bias: Array | None, transposed: bool) -> Array:
        self.transposed, self.shape = transposed, x.shape
        self.matrix = self.at_backward(1, weight)  # (in, out), or (out, in) if transposed
        self.x = x.reshape(-1, x.shape[-1])  # (N, in)
        y = xp.matmul(self.x, weight.T if transposed else weight)  # (N, out)
        count_flops(*self.x.shape, y.shape[-1])
        if bias is not None:
            y += bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, grad: Array) -> Any:
        x, g = self.x, grad.reshape(-1, grad.shape[-1])  # (N, in), (N, out)
        dx = None
        if self.needs[0]:
            w = self.matrix()
            dx = xp.matmul(g, w if self.transposed else w.T).reshape(self.shape)
            count_flops(*x.shape, g.shape[-1])
        left, right = (g, x) if self.transposed else (x, g)

        def product(out: Array | None) -> Array:
            count_flops(*left.shape, right.shape[-1])
            return xp.matmul(left.T, right, out=out)

        dweight = LazyGradient(product) if self.needs[1] else None
        dbias = LazyGradient(lambda out: g.sum(axis=0, out=out)) if self.needs[2] else None
        return dx, dweight, dbias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """Compute x @ weight + bias: (..., in) -> (..., out). weight is (in, out) as GPT-2's, (out, in) if `transposed`."""
    return LinearFunction.apply(x, weight, bias, transposed)


class _Embedding(Function):
    def forward(self, weight: Array, index: Array) -> Array:
        self.index, self.shape = index, weight.shape
        return weight[index]

    def backward(self, grad: Array) -> Any:
        index, shape = self.index.reshape(-1), self.shape
        rows = grad.reshape(-1, shape[1])  # (N, h)

        def scatter(out: Array | None) -> Array:
            """Set out[v] to the sum of the rows whose index is v, in a third of the time of `add.at`."""
            if out is None:
                out = xp.empty(shape, dtype=rows.dtype)
            out[...] = 0
            order = xp.argsort(index, kind="stable")
            ordered = index[order]
            starts = xp.flatnonzero(xp.diff(ordered, prepend=-1))  # of each token
            out[ordered[starts]] = xp.add.reduceat(rows[order], starts, axis=0)
            return out

        return LazyGradient(scatter), None


def embedding(weight: Tensor, index: Array) -> Tensor:
    """Look up rows of `weight` (V, h) by an integer array of any shape: (...,) -> (..., h)."""
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
    """Normalize over the last dim (Ba et al. 2016): (..., h) -> (..., h). The variance divides by h, as PyTorch's."""
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
    """Apply GPT-2's `gelu_new`, the tanh approximation (Hendrycks and Gimpel 2016)."""
    return _Gelu.apply(x)


@operation
def dropout(x: Any, keep: Array, probability: float) -> Any:
    """Zero x where `keep` (booleans) is False, and scale the rest by 1/(1 - probability) (Srivastava et al. 2014)."""
    scale = 1 / (1 - probability)
    return x * keep * scale, lambda g: g * keep * scale


class CrossEntropyFunction(Function):
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
        self.probabilities, self.one_hot = p, 1  # each row's one-hot vector is 1 at its target
        return xp.where(self.counted, xp.log(total[:, 0]) - correct, 0).sum()

    def backward(self, grad: Array) -> Any:
        dlogits = self.probabilities  # overwritten: nobody else holds it and backward runs once
        dlogits[self.rows, self.targets] -= self.one_hot
        dlogits *= xp.where(self.counted, grad, 0)[:, None]
        return dlogits.reshape(self.shape), None


def cross_entropy_sum(logits: Tensor, targets: Array) -> Tensor:
    """Sum -log softmax(logits)[target], in nats, over the positions whose target is not -100.

    logits (..., V), integer targets (...,). Ranks may hold unequal counts of targets, so the mean is left to the sum
    over all ranks.
    """
    return CrossEntropyFunction.apply(logits, targets)


def cross_entropy(logits: Tensor, targets: Array) -> Tensor:
    """Average `cross_entropy_sum` over the positions that count, as torch.nn.functional.cross_entropy does."""
    return cross_entropy_sum(logits, targets) * (1 / max(1, int((targets != IGNORE_INDEX).sum())))
