"""Claims about optimizers, clipping and the learning rate, against formulas written out here (and torch in
tests/reference).
"""

import math

import numpy as np
import pytest
from training import MLP, bits

from minipar.more.precision import MixedPrecisionAdamW, enable_two_bytes
from minipar.nn import SGD, AdamW, Parameter, learning_rate
from minipar.parallel.grad_norm import BLOCK, clip_grad_norm, squared_norm

enable_two_bytes()

RANDOM = np.random.Generator(np.random.Philox(4))


def parameter(*shape):
    return Parameter(RANDOM.standard_normal(shape))


def test_defaults_are_torchs():
    adamw, sgd = AdamW([parameter(2)]), SGD([parameter(2)])
    assert (adamw.lr, adamw.betas, adamw.eps, adamw.weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.01)
    assert (sgd.lr, sgd.momentum, sgd.kept) == (1e-3, 0, {})


def test_adamw_is_the_published_update_and_decays_matrices_only():
    matrix, vector = parameter(3, 4), parameter(5)
    optimizer = AdamW([matrix, vector], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    expected = []
    for p in (matrix, vector):
        expected.append([p.data.copy(), np.zeros(p.shape), np.zeros(p.shape)])
    for t in (1, 2, 3):
        for p, e, decay in zip((matrix, vector), expected, (0.5, 0.0), strict=True):
            g = p.grad = RANDOM.standard_normal(p.shape)
            e[1] = 0.8 * e[1] + 0.2 * g
            e[2] = 0.9 * e[2] + 0.1 * g**2
            m, v = e[1] / (1 - 0.8**t), e[2] / (1 - 0.9**t)
            e[0] = e[0] * (1 - 0.1 * decay) - 0.1 * m / (np.sqrt(v) + 1e-3)
        optimizer.step()
    np.testing.assert_allclose(matrix.data, expected[0][0], rtol=1e-13)
    np.testing.assert_allclose(vector.data, expected[1][0], rtol=1e-13)


def test_adamw_gives_the_same_bits_wherever_the_array_is_cut():
    """ZeRO rests on this: an element's update depends on that element alone, not on its place in a block."""
    size = 2 * BLOCK + 77
    data, grads = RANDOM.standard_normal(size), RANDOM.standard_normal((3, size))
    whole = Parameter(data.copy())
    cuts = [0, 1, 1000, BLOCK + 5, size]
    pieces = [Parameter(data[a:b].copy()) for a, b in zip(cuts, cuts[1:], strict=False)]
    for optimizer, owned in (
        (AdamW([whole]), [(whole, 0, size)]),
        (AdamW(pieces), list(zip(pieces, cuts, cuts[1:], strict=False))),
    ):
        for g in grads:
            for p, a, b in owned:
                p.grad = g[a:b].copy()
            optimizer.step()
    assert np.array_equal(whole.data, np.concatenate([p.data for p in pieces]))


def test_updates_are_in_place_and_skip_parameters_without_grad():
    for make in (AdamW, SGD):
        used, unused = parameter(2, 2), parameter(2, 2)
        place, before = used.data, unused.data.copy()
        used.grad = np.ones((2, 2))
        make([used, unused]).step()
        assert used.data is place and np.array_equal(unused.data, before)


def test_sgd_with_momentum():
    p = parameter(2, 2)
    start = p.data.copy()
    optimizer = SGD([p], lr=0.1, momentum=0.9)
    velocity, value = np.zeros((2, 2)), start
    for _ in range(3):
        p.grad = np.ones((2, 2))
        optimizer.step()
        velocity = 0.9 * velocity + 1
        value = value - 0.1 * velocity
    np.testing.assert_allclose(p.data, value, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_computes_in_the_parameters_dtype(dtype, momentum):
    """A gradient may be wider: in flat storage it is float32 for parameters in 2 bytes."""
    values, g = RANDOM.standard_normal((2, 40)).astype(dtype)
    p = Parameter(values.copy())
    optimizer = SGD([p], lr=0.25, momentum=momentum)
    for factor in (1.0, 1.0 + momentum):
        wide = (g.astype("float64") + 1e-4).astype("float32" if p.dtype.itemsize == 2 else "float64")
        p.grad = wide
        before = p.data.copy()
        optimizer.step()
        expected = before - 0.25 * (factor * wide.astype(dtype)).astype(dtype)
        assert p.dtype == dtype and p.data.tobytes() == expected.astype(dtype).tobytes()


def tied():
    """A parameter of zeros with two ties, and gradients whose sum is [3, 4]."""
    p = Parameter(np.zeros(2))
    ties = [p.tie(), p.tie()]
    p.grad, ties[0].grad, ties[1].grad = np.array([1.0, 4.0]), np.array([2.0, 2.0]), np.array([0.0, -2.0])
    return p, ties


def test_optimizers_fold_tied_gradients_before_they_step():
    p, ties = tied()
    optimizer = SGD([p], lr=1.0)
    optimizer.step()
    assert p.data.tolist() == [-3.0, -4.0] and [tie.grad for tie in ties] == [None, None]
    ties[0].grad = np.ones(2)
    optimizer.zero_grad()
    assert p.grad is None and ties[0].grad is None


def test_clipping_counts_tied_gradients():
    p, ties = tied()
    assert clip_grad_norm([p], 1.0) == 5.0 and [tie.grad for tie in ties] == [None, None]
    np.testing.assert_allclose(p.grad, [0.6, 0.8], rtol=1e-6)


def test_clipping_scales_all_gradients_by_one_factor():
    a, b, unused = parameter(2, 3), parameter(4), parameter(1)
    a.grad, b.grad = RANDOM.standard_normal((2, 3)), RANDOM.standard_normal(4)
    before = np.concatenate([a.grad.reshape(-1), b.grad])
    norm = float(np.linalg.norm(before))
    assert clip_grad_norm([a, b, unused], None) == pytest.approx(norm, rel=1e-14)
    assert clip_grad_norm([a, b, unused], norm * 2) == pytest.approx(norm, rel=1e-14)
    assert np.array_equal(np.concatenate([a.grad.reshape(-1), b.grad]), before)
    a.grad, b.grad = np.full((2, 3), 2.0), np.array([5.0, 0, 0, 0])
    assert clip_grad_norm([a, b, unused], 7.0) == 7.0
    assert (a.grad == 2).all() and b.grad[0] == 5  # a norm that is as large as allowed is not scaled
    a.grad, b.grad = before[:6].reshape(2, 3).copy(), before[6:].copy()
    clip_grad_norm([a, b, unused], 0.5)
    np.testing.assert_allclose(np.concatenate([a.grad.reshape(-1), b.grad]), before * 0.5 / (norm + 1e-6), rtol=1e-13)


def test_squares_of_float32_are_summed_in_float64():
    squares = np.full(10_000, 0.1, np.float32) * np.float32(0.1)
    assert squared_norm([np.full(10_000, 0.1, np.float32)]) == float(squares.sum(dtype=np.float64))
    assert float(squares.sum()) != float(squares.sum(dtype=np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_squares_of_two_byte_values_are_those_of_float32(dtype):
    """Neither is a square rounded to 2 bytes, nor does it overflow or vanish there."""
    for scale in (1.0, 300.0, 1e-4):  # 300^2 is more than float16's largest value, 1e-8 less than its smallest
        values = (scale * RANDOM.standard_normal(1000)).astype(dtype)
        exact = values.astype(np.float32)
        assert squared_norm([values]) == float((exact * exact).sum(dtype=np.float64))
        assert clip_grad_norm([with_gradient(values)], None) == math.sqrt(squared_norm([exact]))


def with_gradient(array):
    p = Parameter(array)
    p.grad = array
    return p


def test_the_rate_warms_up_then_stays_or_follows_a_cosine():
    def rates(schedule, warmup, total):
        return [
            learning_rate(s, lr=1.0, schedule=schedule, warmup_steps=warmup, total_steps=total) for s in range(total)
        ]

    assert rates("constant", 0, 3) == [1.0, 1.0, 1.0]
    assert rates("constant", 3, 5) == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = rates("cosine", 1, 6)
    assert cosine[0] == 0.5 and cosine[1] == 1.0 and cosine[-1] == pytest.approx(0.1)
    assert cosine[3] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 2)))
    assert rates("cosine", 0, 1) == [1.0]
    for warmup, total in ((0, 2), (1, 3), (3, 5)):  # it falls in one step
        assert rates("cosine", warmup, total)[warmup:] == [1.0, pytest.approx(0.1)]


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (3, 10), (10, 10)])
def test_a_cosine_falls_to_a_tenth_and_stays_there(warmup, total):
    """As where a loop takes more steps than the schedule has; a cosine alone would rise again."""
    settings = {"lr": 0.3, "schedule": "cosine", "warmup_steps": warmup, "total_steps": total}
    rates = [learning_rate(step, **settings) for step in range(3 * total + 2)]
    after = rates[max(total, warmup + 1) :]
    assert after == [pytest.approx(0.03, rel=1e-12)] * len(after)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_after_the_warm_up_the_rate_is_lr_itself(schedule):
    """It is lr to the last bit, which 0.1 * n / n is not for each n."""
    for warmup in range(50):
        settings = {"lr": 0.1, "schedule": schedule, "warmup_steps": warmup, "total_steps": 100}
        assert learning_rate(warmup, **settings) == 0.1


# ---- saved state -----------------------------------------------------------------------------------------------------

GRADIENTS = [[RANDOM.standard_normal(p.shape) for p in MLP().parameters()] for _ in range(6)]
SETTINGS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.5}


def train(model, optimizer, steps):
    for step in steps:
        for p, gradient in zip(model.parameters(), GRADIENTS[step], strict=True):
            p.grad = gradient.astype(p.dtype)
        optimizer.step()


def trained(steps, dtype="float64", kind=AdamW):
    """A model after some steps, and its optimizer."""
    model = MLP()
    for p in model.parameters():
        p.data = p.data.astype(dtype)
    optimizer = kind(model.parameters(), **SETTINGS)
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize(("dtype", "kind"), [("float64", AdamW), ("float16", MixedPrecisionAdamW)])
def test_a_resumed_optimizer_trains_the_same_bits(dtype, kind):
    """Parameters in 2 bytes have masters in the state."""
    first, expected = trained(3, dtype, kind)[1].state_dict(), trained(6, dtype, kind)
    resumed = trained(3, dtype, kind)[0]
    optimizer = kind(resumed.parameters(), **SETTINGS)
    optimizer.load_state_dict(first)
    train(resumed, optimizer, range(3, 6))
    assert bits(resumed.state_dict()) == bits(expected[0].state_dict())
    for one, other in zip(optimizer.values(), expected[1].values(), strict=True):
        assert one.dtype != dtype or dtype == "float64"
        assert np.array_equal(one, other)


def test_the_state_is_a_copy():
    model, optimizer = trained(1)
    state = optimizer.state_dict()
    before = [array.copy() for array in state["exp_avg"]]
    train(model, optimizer, [1])
    optimizer.load_state_dict(state)
    train(model, optimizer, [2])
    assert all(np.array_equal(one, other) for one, other in zip(before, state["exp_avg"], strict=True))


WRONG = {  # what is done to the state
    "fewer parameters": lambda state: state["holds"].pop(),
    "another rank's": lambda state: state.update(holds=["first.weight[0:7]", *state["holds"][1:]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_state_is_refused_and_changes_nothing(name):
    state = trained(3)[1].state_dict()
    WRONG[name](state)
    optimizer = trained(1)[1]
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="same layout"):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["steps"] == before["steps"]
    for one, other in zip(after["exp_avg"], before["exp_avg"], strict=True):
        assert np.array_equal(one, other)
