"""No value that is infinite, nan, huge or complex is ever "equal", and a skipped step is compared as one."""

import math

import numpy as np
import pytest

from minipar.compare.differences import compare
from minipar.compare.record import Record
from minipar.errors import UsageError

pytestmark = pytest.mark.filterwarnings("error")

NAMES = {"w": (6, 4), "b": (4,), "scale": ()}


def write(directory, spoil=None, steps=3, dtype="float32", **facts):
    """Record `steps` steps; `spoil(step, values)` changes the loss, norm, gradients and new parameters of each."""
    parameters = {name: np.random.default_rng(0).normal(size=shape) for name, shape in NAMES.items()}
    written = Record(directory, parameters, dtype=dtype, **facts)
    for step in range(steps):
        random = np.random.default_rng([1, step])
        gradients = {name: random.normal(size=shape) for name, shape in NAMES.items()}
        values = {
            "loss": 5.0,
            "grad_norm": 2.0,
            "gradients": gradients,
            "parameters": {name: parameters[name] - 0.01 * gradients[name] for name in NAMES},
        }
        if spoil is not None:
            spoil(step, values)
        written.step(step, **values)
        parameters = values["parameters"]


def put(key, value, step=1, name=None, place=()):
    """Return a function that puts a value in one step into one array, or in place of the loss or the norm."""

    def spoil(now, values):
        if now != step:
            return
        if name is None:
            values[key] = value
        else:
            values[key][name] = np.array(values[key][name])
            values[key][name][place] = value

    return spoil


WHERE = {
    "loss": ({"key": "loss"}, ()),
    "grad_norm": ({"key": "grad_norm"}, ()),
    "gradient": ({"key": "gradients", "name": "w", "place": (2, 3)}, ("w",)),
    "update": ({"key": "parameters", "name": "b", "place": 1}, ("b",)),
}


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("quantity", WHERE)
@pytest.mark.parametrize("runs", ["A", "B", "A and B"])
def test_one_value_that_is_not_finite_is_a_difference(runs, quantity, value, tmp_path):
    where, parameters = WHERE[quantity]
    for run in "AB":
        write(tmp_path / run, put(value=value, **where) if run in runs.split() else None)
    for bound in (None, 0.9):
        finding = compare(tmp_path / "A", tmp_path / "B", bound)
        found = finding.differences[0]
        assert not finding.equal and finding.step == 1
        assert (found.quantity, found.parameters, found.not_finite) == (quantity, parameters, runs)


def test_what_else_differs_is_named_beside_what_is_infinite(tmp_path):
    """B's gradients are -7 times A's, with one infinite element; its loss and norm are infinite."""

    def overflow(step, values):
        if step == 2:
            values["gradients"] = {name: -7 * gradient for name, gradient in values["gradients"].items()}
            values["gradients"]["b"][3] = np.inf
            values["loss"] = values["grad_norm"] = np.inf

    write(tmp_path / "A")
    write(tmp_path / "B", overflow)
    finding = compare(tmp_path / "A", tmp_path / "B")
    seen = [(each.quantity, each.ratio, each.parameters, each.not_finite) for each in finding.differences]
    assert finding.step == 2 and seen == [
        ("gradient", None, ("b",), "B"),
        ("loss", None, (), "B"),
        ("grad_norm", None, (), "B"),
        ("gradient", pytest.approx(-7), ("w", "scale"), ""),
    ]


def skips(step, values):
    """Skip the update of step 1, as fp16 does when a gradient is infinite."""
    if step == 1:
        values["gradients"]["w"] = np.full((6, 4), np.inf)
        values["grad_norm"] = np.inf
        before = {name: values["parameters"][name] + 0.01 * values["gradients"][name] for name in ("b", "scale")}
        values["parameters"] = before | {"w": skips.before["w"]}
    skips.before = values["parameters"]


def test_a_step_that_both_runs_skip_is_no_difference(tmp_path):
    write(tmp_path / "A", skips)
    write(tmp_path / "B", skips)
    finding = compare(tmp_path / "A", tmp_path / "B")
    assert finding.equal and finding.skipped == (1,) and set(finding.ratios[1].values()) == {None}


@pytest.mark.parametrize(
    ("quantity", "where"),
    [("loss", {"key": "loss", "value": 9.0}), ("gradient", {"key": "gradients", "value": 9.0, "name": "b"})],
)
def test_in_a_step_that_both_skip_all_else_is_compared(quantity, where, tmp_path):
    def spoil(step, values):
        skips(step, values)
        put(**where)(step, values)

    write(tmp_path / "A", skips)
    write(tmp_path / "B", spoil)
    found = compare(tmp_path / "A", tmp_path / "B").differences[0]
    assert (found.quantity, found.not_finite) == (quantity, "")


# ---- values of any size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-100, 1e300])
def test_a_factor_is_found_in_huge_and_in_tiny_values(size, tmp_path):
    for run, factor in (("A", size), ("same", size), ("B", 4 * size)):

        def spoil(step, values, factor=factor):
            values["gradients"] = {name: factor * gradient for name, gradient in values["gradients"].items()}

        write(tmp_path / run, spoil)
    assert compare(tmp_path / "A", tmp_path / "same").equal
    finding = compare(tmp_path / "A", tmp_path / "B")
    assert [(each.ratio, each.group) for each in finding.differences] == [(pytest.approx(4), "all parameters")]
    assert finding.ratios[0]["w"] == pytest.approx(4)


@pytest.mark.parametrize(("values", "error"), [(1j * np.ones((6, 4)), TypeError), (np.ones((4, 6)), ValueError)])
def test_a_complex_array_or_one_of_another_shape_is_refused(values, error, tmp_path):
    def spoil(step, written):
        written["gradients"]["w"] = values

    with pytest.raises(error, match="w"):
        write(tmp_path / "A", spoil)


def test_a_file_without_real_values_is_refused(tmp_path):
    write(tmp_path / "A")
    write(tmp_path / "B")
    path = tmp_path / "B" / "step-0.npz"
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"update/w": arrays["update/w"].astype("U5")})
    with pytest.raises(UsageError, match="step-0.npz.*update/w"):
        compare(tmp_path / "A", tmp_path / "B")
