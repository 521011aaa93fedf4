"""The operations of a Transformer but attention, each one node of the graph.

One node makes fewer passes over memory than several, and keeps fewer arrays for backward. Shapes:
B samples, T tokens per sample, h hidden, V vocabulary, N = B*T rows. Weight gradients are
LazyGradients.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from itertools import accumulate

from minipar.autograd.checks import IGNORE_INDEX, check_targets
from minipar.autograd.rules import Gradient, Gradients, LazyGradient, Result, add_rows
from minipar.autograd.tensor import Function, Tensor, operation
from minipar.backend import Array, setting, xp

GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)
GELU_CUBIC = 0.044715
_flop_counter: ContextVar[Callable[[int], None] | None] = ContextVar("flop_counter", default=None)


def flop_counter(count: Callable[[int], None]) -> AbstractContextManager[object]:
    """Call `count` with the operations of each matrix product in the block, attention's too."""
    return setting(_flop_counter, count)


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Multiply matrices (n, k) and (k, m), or stacks of them, and count the 2 n k m operations of each."""
    count = _flop_counter.get()
    if count is not None:
        count(2 * a.size * b.shape[-1])
    return xp.matmul(a, b, out=out)


def as_rows(x: Array) -> Array:
    """Return the rows of x as a matrix: (..., h) -> (N, h), a view if x's memory allows it."""
    return x.reshape(-1, x.shape[-1])


def getter(source: object, array: Array) -> Callable[[], Array]:
    """Return a function that returns an input, to be saved in the array's place.

    It is for an input that may be a leaf: ZeRO stage 3 frees a parameter between forward and
    backward, and gathers it again into another array.
    """
    if isinstance(source, Tensor):
        return lambda: source.data
    return lambda: array


class LinearFunction(Function):
    """The node of `linear`."""

    def forward(self, x: Array, weight: Array, bias: Array | None, transposed: bool) -> Array:
        self.transposed = transposed
        rows = as_rows(x)  # (N, in)
        self.save_for_backward(x=rows, weight=getter(self.inputs[1], weight))
        matrix = weight.T if transposed else weight  # (in, out)
        y = product(rows, matrix)  # (N, out)
        if bias is not None:
            y += bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, grad: Array, x: Array, weight: Callable[[], Array]) -> Gradients:
        g = as_rows(grad)  # (N, out)

        def compute_dweight(out: Array | None) -> Array:
            if self.transposed:
                return product(g.T, x, out)  # (out, in)
            return product(x.T, g, out)  # (in, out)

        def compute_dbias(out: Array | None) -> Array:
            return g.sum(axis=0, out=out)  # (out,)

        dx = None
        if self.needs[0]:
            w = weight()
            matrix = w if self.transposed else w.T  # (out, in)
            dx = product(g, matrix)
            dx = dx.reshape(*grad.shape[:-1], x.shape[-1])
        dweight = LazyGradient(compute_dweight) if self.needs[1] else None
        dbias = LazyGradient(compute_dbias) if self.needs[2] else None
        return dx, dweight, dbias, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:  # fmt: skip
    """Compute x @ weight + bias: (..., in) -> (..., out).

    weight is (in, out), as GPT-2's, or (out, in) if `transposed`.
    """
    return LinearFunction.apply(x, weight, bias, transposed)


@operation
def embedding(weight: Array, index: Array) -> Result:
    """Look up rows of `weight` (V, h) by an integer array of any shape: (...,) -> (..., h)."""
    shape = weight.shape

    def dweight(g: Array, index: Array) -> LazyGradient:
        rows = g.reshape(-1, shape[1])  # (N, h)

        def compute(out: Array | None) -> Array:
            if out is None:
                out = xp.empty(shape, dtype=rows.dtype)
            return add_rows(rows, index.reshape(-1), out)

        return LazyGradient(compute)

    return weight[index], Gradient(dweight, index=index)


class _LayerNorm(Function):
    """The node of `layer_norm`; without a bias of `rms_norm`, which does not center."""

    def forward(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        self.centers = bias is not None
        xhat = x - x.mean(axis=-1, keepdims=True) if self.centers else x.copy()
        variance = xp.einsum("...i,...i->...", xhat, xhat)[..., None] / x.shape[-1]  # (..., 1)
        rstd = 1 / xp.sqrt(variance + eps)
        xhat *= rstd
        self.save_for_backward(xhat=xhat, rstd=rstd, weight=getter(self.inputs[1], weight))
        y = xhat * weight
        if bias is not None:
            y += bias
        return y

    def backward(
        self, grad: Array, xhat: Array, rstd: Array, weight: Callable[[], Array]
    ) -> Gradients:  # fmt: skip
        # With y = xhat w + b:  dx = rstd (g - mean(g) - xhat mean(g xhat)),  g = grad w,  means
        # over the last dim. RMSNorm has no mean(g), which comes from centering.
        w = weight()
        rows = tuple(range(grad.ndim - 1))
        gx = grad * xhat
        dweight = gx.sum(axis=rows)
        gx *= w
        dx = grad * w
        if self.centers:
            dx -= dx.mean(axis=-1, keepdims=True)
        dx -= xhat * gx.mean(axis=-1, keepdims=True)
        dx *= rstd
        dbias = grad.sum(axis=rows) if self.centers else None
        return dx, dweight, dbias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize over the last dim (Ba et al. 2016): (..., h) -> (..., h).

    The variance divides by h, as PyTorch's.
    """
    return _LayerNorm.apply(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the root of the mean square over the last dim: (..., h) -> (..., h).

    Source: Zhang and Sennrich 2019.
    """
    return _LayerNorm.apply(x, weight, None, eps)


@operation
def gelu(x: Array) -> Result:
    """Apply GPT-2's `gelu_new`, the tanh approximation (Hendrycks and Gimpel 2016)."""
    # With t = tanh(s (x + c x^3)), gelu = x (1 + t) / 2.
    # Products, not powers: x**3 is many times slower than x*x*x.
    t = x * x
    t *= GELU_CUBIC
    t += 1
    t *= x
    t *= GELU_SCALE
    xp.tanh(t, out=t)
    y = (t + 1) * x
    y *= 0.5

    def dx(g: Array, x: Array, t: Array) -> Array:
        # d gelu / dx = (1 + t)/2 + x (1 - t^2) s (1 + 3 c x^2) / 2
        #             = (1 + t) (1 + (1 - t) x s (1 + 3 c x^2)) / 2
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
        inner *= g
        return inner

    return y, Gradient(dx, x=x, t=t)


@operation
def _concatenate(*arrays: Array, dim: int) -> Result:
    ends = list(accumulate(array.shape[dim] for array in arrays))

    def part(i: int, g: Array) -> Array:
        """Return the gradient of array i."""
        return xp.split(g, ends[:-1], axis=dim)[i]

    gradients = [partial(part, i) for i in range(len(arrays))]
    return xp.concatenate(arrays, axis=dim), *gradients


def concatenate(tensors: Sequence[Tensor | Array], dim: int = 0) -> Tensor:
    """Join tensors along a dim; the other dims agree. NB: torch.cat."""
    return _concatenate(*tensors, dim=dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors of one shape along a new dim. NB: torch.stack."""
    at = dim % (tensors[0].ndim + 1)
    rows = [x.reshape(*x.shape[:at], 1, *x.shape[at:]) for x in tensors]
    return concatenate(rows, at)


def dropped(x: Array, keep: Array | None, probability: float) -> Array:
    """Apply dropout to values, or to their gradient; x itself if `keep` is None."""
    if keep is None:
        return x
    return x * keep * (1 / (1 - probability))


@operation
def dropout(x: Array, keep: Array, probability: float) -> Result:
    """Zero x where `keep` (booleans) is False, and scale the rest by 1/(1 - probability).

    Source: Srivastava et al. 2014.
    """

    def dx(g: Array, keep: Array) -> Array:
        return dropped(g, keep, probability)

    return dropped(x, keep, probability), Gradient(dx, keep=keep)


class CrossEntropyFunction(Function):
    """The node of `cross_entropy_sum`."""

    def forward(self, logits: Array, targets: Array) -> Array:
        self.shape = logits.shape
        logits = as_rows(logits)  # (N, V)
        targets = targets.reshape(-1)
        counted = targets != IGNORE_INDEX
        targets = xp.where(counted, targets, 0)
        rows = xp.arange(targets.size)
        p = logits - logits.max(axis=-1, keepdims=True)
        correct = p[rows, targets]
        xp.exp(p, out=p)
        total = p.sum(axis=-1, keepdims=True)
        p /= total
        self.save_for_backward(
            probabilities=p,
            rows=rows,
            targets=targets,
            counted=counted,
            one_hot=1,  # each row's one-hot vector is 1 at its target
        )
        return xp.where(counted, xp.log(total[:, 0]) - correct, 0).sum()

    def backward(
        self,
        grad: Array,
        probabilities: Array,
        rows: Array,
        targets: Array,
        counted: Array,
        one_hot: Array | int,
    ) -> Gradients:
        dlogits = probabilities  # overwritten: nobody else holds it and backward runs once
        dlogits[rows, targets] -= one_hot
        dlogits *= xp.where(counted, grad, 0)[:, None]
        return dlogits.reshape(self.shape), None


def cross_entropy_sum(logits: Tensor, targets: Array) -> Tensor:
    """Sum -log softmax(logits)[target], in nats, over the positions whose target is not -100.

    logits (..., V), integer targets (...,). As ranks may have unequal counts of targets, a mean is
    left to the caller. UsageError for a target that is not below V, and for targets of another shape
    (flat ones are fine).
    """
    logits.check_whole()
    check_targets(targets, logits.shape[:-1], logits.shape[-1])
    return CrossEntropyFunction.apply(logits, targets)
