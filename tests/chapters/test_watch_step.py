"""What chapters 1 and 2 watch and plant: each check passes what is right and notices what is wrong."""

import numpy as np
import pytest

from chapters.support.caught import catcher
from chapters.support.ch01.wrong_gradients import constant_statistics, other_gelu
from chapters.support.ch02.watch import ForgottenResidual, check_matrices_differ, check_slope, saved_bytes, watch_step
from minipar.autograd import Tensor, gelu, linear
from minipar.autograd.gradcheck import gradcheck
from minipar.nn import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=11, n_positions=7, n_embd=8, n_layer=3, n_head=2)
TOKENS = np.arange(10).reshape(2, 5)


def test_the_slope_notices_a_lost_skip_path():
    check_slope(GPT(CONFIG, dtype="float64"), TOKENS, TOKENS, tolerance=1e-5)
    with pytest.raises(AssertionError, match="slope by backward"):
        check_slope(ForgottenResidual(CONFIG, dtype="float64"), TOKENS, TOKENS, tolerance=1e-5)


def test_equal_matrices_are_named():
    model = GPT(CONFIG)
    check_matrices_differ(model)
    model.h[1].mlp.c_fc.weight.data[...] = model.h[0].mlp.c_fc.weight.data
    with pytest.raises(AssertionError, match=r"h\.1\.mlp\.c_fc\.weight holds the same values as h\.0\.mlp\.c_fc"):
        check_matrices_differ(model)


def test_saved_bytes_counts_each_storage_once():
    x, weight = Tensor(np.ones((2, 3)), requires_grad=True), Tensor(np.ones((3, 4)), requires_grad=True)
    y = gelu(linear(x, weight))  # keeps x, gelu's input and the tanh
    assert saved_bytes(y, [weight]) == 8 * (6 + 8 + 8)


def test_a_watched_step_counts_and_leaves_the_model_as_it_was():
    model = GPT(CONFIG, dtype="float64")
    runs = [segment.run for segment in model.segments]
    step = watch_step(model, TOKENS, TOKENS)
    n, h = TOKENS.size, CONFIG.n_embd
    block = 20 * n * h + 2 * n * 5 + 2 * n  # 2 heads, 5 tokens per sample
    assert step.kept == 8 * (3 * block + 2 * n * h + n + n * 11)
    assert step.operations == 3 * CONFIG.forward_flops(2, 5)
    forward, backward = [[f"{way} h.{i}" for i in range(3)] for way in ("forward", "backward")]
    assert [name for name, _, _ in step.moments] == ["start", *forward, "loss", *reversed(backward), "end"]
    assert step.peak >= step.held >= step.kept
    assert [segment.run for segment in model.segments] == runs


def test_planted_gradients_are_wrong():
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(shape) for shape in ((4, 6), 6, 6)]
    with pytest.raises(AssertionError, match="input 0"):
        gradcheck(constant_statistics, inputs)
    with pytest.raises(AssertionError, match="input 0"):
        gradcheck(other_gelu, inputs[:1])
    assert gradcheck(other_gelu, inputs[:1], tolerance=1e-2) > 1e-4


def test_a_mistake_that_nobody_notices_is_an_error():
    said = []
    caught = catcher(said.append)
    caught("division", lambda: 1 / 0, ZeroDivisionError)
    assert said == ["caught: division\n        division by zero"]
    with pytest.raises(AssertionError, match="not caught: nothing"):
        caught("nothing", lambda: None)
