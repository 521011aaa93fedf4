"""Claims about the small parts of a step: the loss scale, the balance of experts, the phases and the recorder."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from minipar import memory
from minipar.autograd.fused import product
from minipar.comm import DeviceMesh, run_local, serial
from minipar.train import balance
from minipar.train.balance import RouterBalance
from minipar.train.phases import model_clock, phase, start_step
from minipar.train.precision import LossScaler, is_finite

# ---- the loss scale --------------------------------------------------------------------------------------------------


def scaler_of(dtype, skip=False, manifest=None):
    run = SimpleNamespace(dtype=dtype, skip_nonfinite=skip)
    return LossScaler(run, None if manifest is None else SimpleNamespace(manifest=manifest))


def state(scaler):
    return scaler.scale, scaler.good_steps, scaler.skipped


def test_the_scale_starts_and_resumes_with_its_counts():
    assert state(scaler_of("float16")) == (65536.0, 0, 0)
    assert state(scaler_of("float32")) == state(scaler_of("bfloat16", skip=True)) == (1.0, 0, 0)
    assert state(scaler_of("float16", manifest={})) == (65536.0, 0, 0)
    assert state(scaler_of("float16", manifest={"loss_scale": [8.0, 5], "skipped": 3})) == (8.0, 5, 3)
    allowed = [scaler_of(dtype, skip).can_skip for dtype in ("float16", "float32") for skip in (False, True)]
    assert allowed == [True, True, False, True]


def test_fp16_halves_its_scale_at_each_overflow_down_to_1():
    scaler = scaler_of("float16", manifest={"loss_scale": [4.0, 5]})
    answers = []
    for finite in (True, False, False, False):
        answers.append((scaler.update(finite), *state(scaler)))
    assert answers == [(True, 4.0, 6, 0), (True, 2.0, 0, 1), (True, 1.0, 0, 2), (False, 0.5, 0, 3)]


def test_fp16_doubles_its_scale_after_2000_good_steps():
    scaler = scaler_of("float16", manifest={"loss_scale": [4.0, 1998]})
    assert [(scaler.update(True), *state(scaler)) for _ in range(3)] == [
        (True, 4.0, 1999, 0), (True, 8.0, 0, 0), (True, 8.0, 1, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("skip", [False, True])
def test_other_dtypes_count_and_have_no_scale(skip):
    scaler = scaler_of("float32", skip, {"loss_scale": [1.0, 1999]})
    assert [(scaler.update(finite), *state(scaler)) for finite in (True, True, False, True)] == [
        (True, 1.0, 2000, 0), (True, 1.0, 2001, 0), (skip, 1.0, 0, 1), (True, 1.0, 1, 1),
    ]  # fmt: skip


def test_gradients_are_divided_where_they_are():
    for scale, expected in ((8.0, [1.0, 2.0]), (0.5, [16.0, 32.0]), (1.0, [8.0, 16.0]), (2.0, [4.0, 8.0])):
        gradient = np.array([8.0, 16.0], np.float32)
        p = SimpleNamespace(grad=gradient)
        scaler_of("float16", manifest={"loss_scale": [scale, 0]}).unscale([p])
        assert p.grad is gradient and gradient.tolist() == expected


def test_a_step_is_finite_if_its_loss_and_norm_are():
    for bad in (math.inf, -math.inf, math.nan):
        assert [is_finite(*values) for values in ((1.0, bad), (bad, 1.0), (bad, bad))] == [False] * 3
    assert is_finite(0.0, 1e300)


# ---- the balance of experts ------------------------------------------------------------------------------------------


def layer(*loads, dropped=0):
    return SimpleNamespace(load=np.array(loads), dropped=dropped, bias=np.zeros(len(loads)), capacity_factor=None)


def balance_of(monkeypatch, layers, mesh=None, **changes):
    """The balance of these layers with these flags; a step has 24 tokens."""
    monkeypatch.setattr(balance, "moe_layers", lambda model: layers)
    flags = SimpleNamespace(**{"router_bias": 0.0, "capacity_factor": None, "aux_loss": 0.5} | changes)
    return RouterBalance(None, flags, DeviceMesh(serial()) if mesh is None else mesh, 24)


def test_loads_are_counted_if_a_flag_needs_them(monkeypatch):
    for changes, counts in (
        ({}, False),
        ({"router_bias": 0.01}, True),
        ({"router_bias": 1.0}, True),
        ({"capacity_factor": 1.5}, True),
    ):
        layers = [layer(3, 1, dropped=2)]
        made = balance_of(monkeypatch, layers, **changes)
        assert made.counts_loads is counts and made.loads.shape == (0,) and made.loads.dtype == np.int64
        assert layers[0].capacity_factor == changes.get("capacity_factor")
        assert made.finish_step() == (2 if "capacity_factor" in changes else None)
        assert made.loads.tolist() == ([[3, 1, 2]] if counts else [])


def test_biases_move_towards_the_mean_load(monkeypatch):
    layers = [layer(3, 1, 2), layer(0, 6, 0, dropped=1)]
    made = balance_of(monkeypatch, layers, router_bias=0.25)
    assert made.finish_step() is None and made.finish_step() is None
    assert [each.bias.tolist() for each in layers] == [[-0.5, 0.5, 0.0], [0.5, -0.5, 0.5]]
    assert made.loads.tolist() == [[3, 1, 2, 0], [0, 6, 0, 1]]


def test_all_that_experts_dropped_is_reported(monkeypatch):
    made = balance_of(monkeypatch, [layer(3, 1, dropped=2), layer(4, 4, dropped=5)], capacity_factor=1.0)
    assert made.finish_step() == 7


def test_a_step_begins_without_loads_with_its_share_of_the_loss(monkeypatch):
    """0.5 of the loss scale 8, over 2 layers, 24 tokens and 3 ranks that route the same ones."""
    layers = [layer(3, 1, dropped=2), layer(4, 4, dropped=5)]
    made = balance_of(monkeypatch, layers, mesh=SimpleNamespace(etp=SimpleNamespace(size=3)))
    made.start_step(8.0)
    assert [(each.load.tolist(), each.dropped, each.aux_loss) for each in layers] == [([0, 0], 0, 4 / 144)] * 2


def test_loads_of_all_ranks_are_added(monkeypatch):
    """Over the ranks with other tokens, and those with other layers, which count nothing for a layer."""
    monkeypatch.setattr(balance, "moe_layers", lambda model: model)
    flags = SimpleNamespace(router_bias=0.5, capacity_factor=2.0, aux_loss=0.0)

    def rank(comm):
        own = layer(comm.rank, 1, dropped=comm.rank)
        made = RouterBalance([own], flags, DeviceMesh(comm, dp=2, pp=2), 24)
        return made.finish_step(), made.loads.tolist(), own.bias.tolist()

    assert run_local(4, rank) == [(6, [[6, 4, 6]], [-0.5, 0.5])] * 4


# ---- phases ----------------------------------------------------------------------------------------------------------


def test_products_alone_take_time_on_a_model_clock():
    """2 n k m operations at 1e12 in a second."""

    def rank(comm):
        with model_clock(comm):
            product(np.ones((3, 4)), np.ones((4, 5)))
        product(np.ones((3, 4)), np.ones((4, 5)))
        return comm.clock.now()

    assert run_local(1, rank, clock="model") == [120 / 1e12]


def test_other_clocks_are_left_alone():
    comm = serial()
    with model_clock(comm):
        product(np.ones((3, 4)), np.ones((4, 5)))


def test_a_step_forgets_the_moments_of_the_last_one():
    comm = serial()
    with memory.MemoryLedger().recording() as ledger:
        start_step()
        with phase(comm, "backward"):
            pass
        assert [name for name, _ in ledger.moments] == ["forward", "backward"]
        start_step()
        assert [name for name, _ in ledger.moments] == ["forward"]
