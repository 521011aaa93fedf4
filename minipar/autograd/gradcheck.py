"""A gradient checker: it compares a backward with its forward along random directions."""

from collections.abc import Callable, Sequence

import numpy as np

from minipar.autograd.tensor import Tensor, no_grad
from minipar.backend import from_host, to_host

STEP = 1e-6


def gradcheck(
    function: Callable[..., Tensor], inputs: Sequence[np.ndarray], *, tolerance: float = 1e-7
) -> float:  # fmt: skip
    """Compare <vjp(w), u> with the central difference of <w, f(x + STEP u)> for random u and w.

    Returns the largest relative error. `inputs` are float64 host arrays, all of which get a
    gradient. Each input is checked alone, so that one input's error cannot hide in another's. A
    random projection sees every element for the price of two forwards. AssertionError beyond
    `tolerance`, naming the input.
    """
    random = np.random.Generator(np.random.Philox(0))
    leaves = [Tensor(from_host(x.copy()), requires_grad=True) for x in inputs]
    output = function(*leaves)
    weights = np.asarray(random.standard_normal(output.shape))
    output.backward(from_host(weights))

    def evaluate(i: int, step: np.ndarray) -> np.ndarray:
        """Return the function's values where input i is moved by `step`."""
        moved = list(inputs)
        moved[i] = inputs[i] + step
        with no_grad():
            return to_host(function(*[Tensor(from_host(x)) for x in moved]).data)

    worst = 0.0
    for i, leaf in enumerate(leaves):
        direction = random.standard_normal(leaf.shape)
        difference = evaluate(i, STEP * direction) - evaluate(i, -STEP * direction)
        numeric = float(np.sum(weights * difference) / (2 * STEP))
        gradient = 0.0 if leaf.grad is None else to_host(leaf.grad)
        analytic = float(np.sum(gradient * direction))
        error = abs(numeric - analytic) / max(1.0, abs(numeric), abs(analytic))
        if not error <= tolerance:  # also catches NaN
            slopes = f"backward gives {analytic:.12g}, the difference quotient {numeric:.12g}"
            raise AssertionError(f"input {i}: {slopes} (relative error {error:.3g} > {tolerance:g})")
        worst = max(worst, error)
    return worst
