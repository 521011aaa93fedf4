"""A gradient checker: it compares a backward with its forward along random directions."""

from collections.abc import Callable, Sequence

import numpy as np

from minipar.autograd.modes import no_grad
from minipar.autograd.tensor import Tensor
from minipar.backend import from_host, to_host

STEP = 1e-6
PROJECTIONS = 4  # random pairs of u and w for each input


def gradcheck(
    function: Callable[..., Tensor], inputs: Sequence[np.ndarray], *, tolerance: float = 1e-7
) -> float:  # fmt: skip
    """Compare <vjp(w), u> with the central difference of <w, f(x + STEP u)> for random u and w.

    Returns the largest relative error. `inputs` are float64 host arrays, all of which get a
    gradient. Each input is checked alone, so that one input's error cannot hide in another's. A
    random projection sees every element for the price of two forwards. AssertionError beyond
    `tolerance`, naming the input; ValueError for another dtype.
    """
    for i, x in enumerate(inputs):
        if x.dtype != np.float64:
            raise ValueError(f"gradcheck needs float64 inputs, but input {i} is {x.dtype}")
    random = np.random.Generator(np.random.Philox(0))
    worst = 0.0
    for _ in range(PROJECTIONS):
        leaves = [Tensor(from_host(x.copy()), requires_grad=True) for x in inputs]
        output = function(*leaves)
        weights = random.standard_normal(output.shape)
        output.backward(from_host(np.asarray(weights)))
        for i, leaf in enumerate(leaves):
            direction = random.standard_normal(leaf.shape)
            ahead = evaluate_moved(function, inputs, i, STEP * direction)
            behind = evaluate_moved(function, inputs, i, -STEP * direction)
            numeric = float(np.sum(weights * (ahead - behind)) / (2 * STEP))
            analytic = 0.0
            if leaf.grad is not None:
                analytic = float(np.sum(to_host(leaf.grad) * direction))
            error = abs(numeric - analytic) / max(1.0, abs(numeric), abs(analytic))
            if not error <= tolerance:  # also catches NaN
                raise AssertionError(
                    f"input {i} of shape {leaf.shape}: backward gives {analytic:.12g} along a "
                    f"random direction, the difference quotient {numeric:.12g} "
                    f"(relative error {error:.3g} > {tolerance:g})"
                )
            worst = max(worst, error)
    return worst


def evaluate_moved(
    function: Callable[..., Tensor], inputs: Sequence[np.ndarray], i: int, step: np.ndarray
) -> np.ndarray:  # fmt: skip
    """Return the function's values where input i is moved by `step`."""
    moved = list(inputs)
    moved[i] = inputs[i] + step
    with no_grad():
        output = function(*[Tensor(from_host(x)) for x in moved])
    return to_host(output.data)
