"""Plant two mistakes in section 1.7: a right forward with a wrong backward, as found in real code."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.autograd import Gradient, Tensor, fused, operation
from minipar.backend import Array


class ConstantStatistics(fused._LayerNorm):
    """LayerNorm whose backward treats the mean and the deviation as constants."""

    def backward(self, grad: Array, xhat: Array, rstd: Array, weight: Callable[[], Array]) -> Any:
        _, dgain, dbias, _ = super().backward(grad, xhat, rstd, weight)
        return grad * weight() * rstd, dgain, dbias, None


def constant_statistics(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Apply LayerNorm, with two of the three paths back to x missing."""
    return ConstantStatistics.apply(x, gain, bias, 1e-5)


@operation
def other_gelu(x: Array) -> Any:
    """Apply the tanh approximation of GELU with the derivative of x Phi(x), which is Phi(x) + x phi(x)."""

    def gradient(g: Array, x: Array) -> Array:
        distribution = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return g * (distribution + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))

    return fused.gelu(Tensor(x)).data, Gradient(gradient, x=x)
