"""Claims about the gradient checker: the error that it returns, its limit, and what it costs."""

import numpy as np
import pytest

from minipar.autograd import Function, Tensor
from minipar.autograd.gradcheck import gradcheck

X = np.random.Generator(np.random.Philox(8)).standard_normal((3, 4))
STEP = 1e-6


class Scaled(Function):
    """x times `scale`, with a gradient that is wrong by the relative `error`. It notes what it is asked for."""

    moved, weights = [], []

    def forward(self, x, scale, error):
        self.scale, self.error = scale, error
        if not any(self.needs):
            self.moved.append(x)
        return x * scale

    def backward(self, grad):
        self.weights.append(grad)
        return grad * self.scale * (1 + self.error), None, None


def check(scale, error, **options):
    Scaled.moved.clear()
    Scaled.weights.clear()
    return gradcheck(lambda x: Scaled.apply(x, scale, error), [X], **options)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_result_is_the_largest_of_four_relative_errors(scale):
    """Relative to the derivative along u, or to 1 where that is smaller."""
    found = check(scale, 1e-3, tolerance=1.0)
    assert (len(Scaled.weights), len(Scaled.moved)) == (4, 8)
    errors = []
    for weights, ahead, behind in zip(Scaled.weights, Scaled.moved[::2], Scaled.moved[1::2], strict=True):
        np.testing.assert_allclose(ahead - X, X - behind, rtol=1e-7, atol=1e-15)
        direction = (ahead - behind) / (2 * STEP)
        assert 0.3 < direction.std() < 2  # a standard normal one
        slope = scale * abs(float(np.sum(weights * direction)))
        errors.append(1e-3 * slope / max(1.0, 1.001 * slope))
    assert found == pytest.approx(max(errors), rel=1e-3)


def test_an_error_of_more_than_a_ten_millionth_is_refused():
    assert check(1e3, 0.8e-7) == pytest.approx(0.8e-7, rel=0.1)
    with pytest.raises(AssertionError, match="relative error 1.2.*e-07 > 1e-07"):
        check(1e3, 1.2e-7)


def test_an_input_that_is_not_used_has_a_slope_of_zero():
    assert gradcheck(lambda x, _: x * 2.0, [X, X]) < 1e-8
    assert gradcheck(lambda x: Tensor(np.ones(2), requires_grad=True) * 2.0, [X]) == 0


def test_an_error_as_large_as_the_tolerance_is_fine():
    assert gradcheck(lambda x: Tensor(np.ones(2), requires_grad=True) * 2.0, [X], tolerance=0.0) == 0
    with pytest.raises(AssertionError, match=r"input 0 of shape \(3, 4\): backward gives .* > 0\)"):
        gradcheck(lambda x: x.exp(), [X], tolerance=0.0)
