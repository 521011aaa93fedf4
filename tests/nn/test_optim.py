"""Claims about optimizers, clipping and the learning rate, against formulas written out here (and torch in
tests/reference).
"""

import math

import numpy as np
import pytest

from minipar.lone_steps import smallest_step, steps_so_far
from minipar.nn import SGD, AdamW, Linear, Optimizer, Parameter, clip_grad_norm, learning_rate
from minipar.nn.optim import BLOCK, squared_norm
from minipar.nn.parameter import Owner, owners_of

RANDOM = np.random.Generator(np.random.Philox(4))


def parameter(*shape):
    return Parameter(RANDOM.standard_normal(shape))


def test_adamws_defaults_are_torchs():
    optimizer = AdamW([parameter(2)])
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.01)


def test_sgds_defaults_are_torchs():
    optimizer = SGD([parameter(2)])
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay, optimizer.velocity) == (1e-3, 0, 0, [])
    assert Optimizer([parameter(2)]).lr == 0  # a rule without a learning rate changes nothing by one


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


def test_sgd_with_momentum_and_decay():
    p = parameter(2, 2)
    start = p.data.copy()
    optimizer = SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01)
    velocity, value = np.zeros((2, 2)), start
    for _ in range(3):
        p.grad = np.ones((2, 2))
        optimizer.step()
        velocity = 0.9 * velocity + 1 + 0.01 * value
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


def test_optimizers_fold_tied_gradients_before_they_step():
    p = Parameter(np.zeros((1, 1)))
    leaf = p.tie()
    p.grad, leaf.grad = np.ones((1, 1)), np.full((1, 1), 2.0)
    SGD([p], lr=1.0).step()
    assert p.data.item() == -3.0


def test_clipping_scales_all_gradients_by_one_factor():
    a, b, unused = parameter(2, 3), parameter(4), parameter(1)
    a.grad, b.grad = RANDOM.standard_normal((2, 3)), RANDOM.standard_normal(4)
    before = np.concatenate([a.grad.reshape(-1), b.grad])
    norm = float(np.linalg.norm(before))
    assert clip_grad_norm([a, b, unused], None) == pytest.approx(norm, rel=1e-14)
    assert clip_grad_norm([a, b, unused], norm * 2) == pytest.approx(norm, rel=1e-14)
    assert np.array_equal(np.concatenate([a.grad.reshape(-1), b.grad]), before)
    a.grad, b.grad = np.full((2, 3), 2.0), np.array([5.0, 0, 0, 0])
    assert clip_grad_norm(iter([a, b, unused]), 7.0) == 7.0
    assert (a.grad == 2).all() and b.grad[0] == 5  # a norm that is as large as allowed is not scaled
    a.grad, b.grad = before[:6].reshape(2, 3).copy(), before[6:].copy()
    clip_grad_norm(iter([a, b, unused]), 0.5)  # as from a model's generator
    np.testing.assert_allclose(np.concatenate([a.grad.reshape(-1), b.grad]), before * 0.5 / (norm + 1e-6), rtol=1e-13)


def test_clipping_counts_tied_gradients():
    p = Parameter(np.zeros(2))
    leaf = p.tie()
    p.grad, leaf.grad = np.array([1.0, 4.0]), np.array([2.0, 0.0])
    assert clip_grad_norm([p], None) == 5.0
    p.grad, leaf.grad = np.array([1.0, 4.0]), np.array([2.0, 0.0])
    assert clip_grad_norm([p], 1.0) == 5.0 and leaf.grad is None
    np.testing.assert_allclose(p.grad, [0.6, 0.8], rtol=1e-6)


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


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("total", [1, 4, 10])
def test_after_its_end_a_cosine_stays_at_a_tenth(warmup, total):
    """As where a loop takes more steps than the schedule has; a cosine alone would rise again."""
    settings = {"lr": 0.3, "schedule": "cosine", "warmup_steps": min(warmup, total - 1), "total_steps": total}
    after = [learning_rate(step, **settings) for step in range(total, 3 * total + 2)]
    assert after == [pytest.approx(0.03, rel=1e-12)] * len(after)


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
    with pytest.raises(ValueError, match="constant or cosine"):
        rates("linear", 0, 1)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_after_the_warm_up_the_rate_is_lr_itself(schedule):
    """It is lr to the last bit, which 0.1 * n / n is not for each n."""
    for warmup in range(50):
        settings = {"lr": 0.1, "schedule": schedule, "warmup_steps": warmup, "total_steps": 100}
        assert learning_rate(warmup, **settings) == 0.1


# ---- owners: strategies that look after parameters -------------------------------------------------------------------


class Recorder:
    """An owner that records when it is called, and the parameter's value at that time."""

    def __init__(self, parameter, events, sharded=False):
        self.parameter, self.events, self.sharded = parameter, events, sharded

    def check_optimizer(self, parameters):
        assert self.parameter in parameters

    def before_step(self, optimizer, parameters):
        self.events.append(("before", self.parameter.data.item()))
        self.parameter.grad = np.full((1, 1), 2.0)  # an owner may complete the gradient here

    def after_step(self):
        self.events.append(("after", self.parameter.data.item()))

    def forget_gradients(self):
        self.events.append(("forget", self.parameter.grad))


def test_a_serial_parameter_has_no_owner_and_no_placement():
    assert all(p.owners == [] and p.placement is None for p in Linear(2, 3, name="layer").parameters())


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_step_without_an_owner_is_counted_by_its_elements(make):
    parameters = [parameter(2, 3), parameter(5)]
    optimizer, before = make(parameters, lr=1.0), steps_so_far()
    for index, elements in ((0, 6), (1, 5)):
        optimizer.zero_grad()
        parameters[index].grad = np.ones(parameters[index].shape)
        optimizer.step()
        assert smallest_step(before) == elements
    assert steps_so_far() == before + 2
    owned = Parameter(np.zeros((1, 1)))
    owned.owners = [Recorder(owned, [])]
    make([owned]).step()
    assert steps_so_far() == before + 2 and smallest_step(before + 2) == 0


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_step_calls_each_owner_once_before_and_after(make):
    a, b, c = (Parameter(np.zeros((1, 1))) for _ in range(3))
    events = []
    recorder = Recorder(a, events)
    a.owners, b.owners = [recorder], [recorder]
    optimizer = make([a, b, c], lr=1.0)
    optimizer.step()
    assert [name for name, _ in events] == ["before", "after"]
    assert events[0][1] == 0 and events[1][1] == a.data.item() < 0
    optimizer.zero_grad()
    assert events[2:] == [("forget", None)]


def test_owners_come_once_and_in_the_order_of_the_parameters():
    a, b, c, d = (Parameter(np.zeros((1, 1))) for _ in range(4))
    first, second = Owner(), Owner()
    a.owners, b.owners, c.owners = [first], [second], [second, first]
    assert owners_of([b, d, a, c]) == [second, first]
    assert owners_of([a, b, c]) == [first, second]


def test_an_optimizers_zero_grad_clears_parameters_and_ties():
    p = Parameter(np.zeros((1, 1)))
    leaf = p.tie()
    p.grad = leaf.grad = np.ones((1, 1))
    SGD([p]).zero_grad()
    assert p.grad is None and leaf.grad is None


def test_an_optimizer_without_an_update_says_so():
    parameter = Parameter(np.zeros(1))
    parameter.grad = np.ones(1)
    with pytest.raises(TypeError, match="Optimizer does not define update"):
        Optimizer([parameter]).step()


def test_clipping_refuses_to_guess_the_norm_of_shards():
    p = Parameter(np.zeros((1, 1)))
    p.grad, p.owners = np.full((1, 1), 3.0), [Recorder(p, [], sharded=True)]
    with pytest.raises(ValueError, match="only shards.*call clip_grad_norm of the wrapper"):
        clip_grad_norm([p], 1.0)
    assert clip_grad_norm([p], None, norm=5.0) == 5.0
    p.owners[0].sharded = False
    assert clip_grad_norm([p], None) == 3.0
