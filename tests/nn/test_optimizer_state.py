"""Claims about an optimizer's saved state: in torch's format, a copy, and continued from with the same bits."""

import numpy as np
import pytest
from training import MLP, bits

from minipar.nn import AdamW

DRAW = np.random.Generator(np.random.Philox(21)).standard_normal
GRADIENTS = [[DRAW(p.shape) for p in MLP().parameters()] for _ in range(6)]


def train(model, optimizer, steps):
    for step in steps:
        for p, gradient in zip(model.parameters(), GRADIENTS[step], strict=True):
            p.grad = gradient.astype(p.dtype)
        optimizer.step()


def saved(steps=3, **options):
    """A model after some steps and its optimizer's state."""
    model = MLP()
    optimizer = AdamW(model.parameters(), **options)
    train(model, optimizer, range(steps))
    return model, optimizer.state_dict()


def test_a_resumed_optimizer_trains_the_same_bits():
    model, state = saved(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    resumed = MLP()
    resumed.load_state_dict(model.state_dict())
    optimizer = AdamW(resumed.parameters())  # the settings come with the state
    optimizer.load_state_dict(state)
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (0.1, (0.8, 0.9), 1e-3, 0.5)
    train(resumed, optimizer, range(3, 6))
    expected, _ = saved(6, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    assert bits(resumed.state_dict()) == bits(expected.state_dict())


@pytest.mark.parametrize("forgets", ["step", "exp_avg", "exp_avg_sq"])
def test_every_part_of_the_state_is_needed(forgets):
    model, state = saved(lr=0.1)
    for entry in state["state"].values():
        entry[forgets] = entry[forgets] * 0 + (forgets == "step")
    resumed = MLP()
    resumed.load_state_dict(model.state_dict())
    optimizer = AdamW(resumed.parameters())
    optimizer.load_state_dict(state)
    train(resumed, optimizer, range(3, 6))
    assert bits(resumed.state_dict()) != bits(saved(6, lr=0.1)[0].state_dict())


def test_the_state_has_the_keys_of_torchs_adamw():
    _, state = saved(lr=0.1)
    (group,) = state["param_groups"]
    assert group["params"] == [0, 1, 2, 3] == list(state["state"])
    assert set(group) == {"lr", "betas", "eps", "weight_decay", "params"}
    assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in state["state"].values())
    assert [entry["step"] for entry in state["state"].values()] == [3] * 4


def test_torchs_extra_settings_and_float_steps_are_fine():
    _, state = saved(lr=0.1)
    state["param_groups"][0] |= {"amsgrad": False, "maximize": False}
    for entry in state["state"].values():
        entry["step"] = np.float32(3.0)
    del state["holds"]
    optimizer = AdamW(MLP().parameters())
    optimizer.load_state_dict(state)
    assert optimizer.steps == 3


def test_the_state_is_a_copy():
    model = MLP()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [0])
    state = optimizer.state_dict()
    before = [entry["exp_avg"].copy() for entry in state["state"].values()]
    train(model, optimizer, [1])
    assert all(np.array_equal(a, e["exp_avg"]) for a, e in zip(before, state["state"].values(), strict=True))
    optimizer.load_state_dict(state)
    train(model, optimizer, [2])
    assert all(np.array_equal(a, e["exp_avg"]) for a, e in zip(before, state["state"].values(), strict=True))


def test_a_state_before_the_first_step_starts_again():
    state = AdamW(MLP().parameters(), lr=0.1).state_dict()
    assert state["state"] == {}
    model = MLP()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, [5, 4])
    optimizer.load_state_dict(state)
    model.load_state_dict(MLP().state_dict())
    train(model, optimizer, range(3))
    assert bits(model.state_dict()) == bits(saved(3, lr=0.1)[0].state_dict())


def test_masters_of_two_byte_parameters_are_saved():
    def make():
        model = MLP()
        for p in model.parameters():
            p.data = p.data.astype("float16")
        return model

    whole, model = make(), make()
    whole_optimizer, optimizer = AdamW(whole.parameters(), lr=1e-4), AdamW(model.parameters(), lr=1e-4)
    train(whole, whole_optimizer, range(6))
    train(model, optimizer, range(3))
    resumed = make()
    for p, before in zip(resumed.parameters(), model.parameters(), strict=True):
        p.data[...] = before.data
    again = AdamW(resumed.parameters())
    again.load_state_dict(optimizer.state_dict())
    train(resumed, again, range(3, 6))
    for one, other in zip(again.masters, whole_optimizer.masters, strict=True):
        assert np.array_equal(one, other)


def drop(key):
    return lambda state: state.pop(key)


def misshape(state):
    state["state"][2]["exp_avg_sq"] = state["state"][2]["exp_avg_sq"].T[..., None]


WRONG = {
    "no state": (drop("state"), "without state: expected what optimizer.state_dict"),
    "no groups": (drop("param_groups"), "without param_groups"),
    "two groups": (lambda state: state["param_groups"].append({}), "of 2 param_groups: expected one"),
    "fewer parameters": (
        lambda state: state["param_groups"][0]["params"].pop(),
        "state of 3 parameters, but .* holds 4",
    ),
    "another shape": (misshape, "exp_avg_sq of parameter 2 with shape"),
    "one left out": (lambda state: state["state"].pop(3), "state of 3 of 4 parameters"),
    "other steps": (lambda state: state["state"][1].update(step=7), r"after \[3, 7\] steps"),
    "no moment": (lambda state: state["state"][0].pop("exp_avg"), "has no exp_avg of parameter 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_state_is_refused_and_changes_nothing(name):
    change, says = WRONG[name]
    _, state = saved(lr=0.1)
    change(state)
    model = MLP()
    optimizer = AdamW(model.parameters(), lr=0.3)
    train(model, optimizer, [4])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for one, other in zip(after["state"].values(), before["state"].values(), strict=True):
        assert one["step"] == other["step"] and np.array_equal(one["exp_avg"], other["exp_avg"])
