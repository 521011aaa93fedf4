"""Claims about the gradient checker: the error that it returns, and its limit."""

import numpy as np
import pytest

from minipar.autograd import Function, Tensor
from minipar.autograd.gradcheck import gradcheck

X = np.random.Generator(np.random.Philox(8)).standard_normal((3, 4))


class Scaled(Function):
    """x times `scale`, with a gradient that is wrong by the relative `error`."""

    def forward(self, x, scale, error):
        self.scale, self.error = scale, error
        return x * scale

    def backward(self, grad):
        return grad * self.scale * (1 + self.error), None, None


def check(scale, error, **options):
    return gradcheck(lambda x: Scaled.apply(x, scale, error), [X], **options)


def test_an_error_is_relative_to_the_derivative_or_to_1():
    assert check(1e3, 1e-3, tolerance=1.0) == pytest.approx(1e-3, rel=1e-2)
    assert 1e-8 < check(1e-3, 1e-3, tolerance=1.0) < 2e-5


def test_an_error_of_more_than_a_ten_millionth_is_refused():
    assert check(1e3, 0.8e-7) == pytest.approx(0.8e-7, rel=0.1)
    with pytest.raises(AssertionError, match="input 0:"):
        check(1e3, 1.2e-7)
    with pytest.raises(AssertionError, match="input 1:"):
        gradcheck(lambda a, b: a * b.detach(), [X, X])


def test_an_input_that_is_not_used_has_a_slope_of_zero():
    assert gradcheck(lambda x, _: x * 2.0, [X, X]) < 1e-8
    assert gradcheck(lambda x: Tensor(np.ones(2), requires_grad=True) * 2.0, [X], tolerance=0.0) == 0
