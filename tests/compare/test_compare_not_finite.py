"""Claims about `minipar.compare` and values that are infinite, nan, huge or complex: none of them is ever "equal"."""

import json
import math

import numpy as np
import pytest

from minipar.compare.differences import as_text, compare, main
from minipar.compare.records import read_run, read_step
from minipar.errors import UsageError
from minipar.record import Record
from visualize import plot_comparison, read_comparison

pytestmark = pytest.mark.usefixtures("warnings_are_errors")

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


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
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
        assert f"{quantity}: not finite in {runs}: " in as_text(finding)


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
    assert finding.differences[0].group.startswith("1 of 4 strips (3 to 3) along dim 0 of b")


@pytest.mark.parametrize("run", "AB")
def test_the_tp_rank_that_is_not_finite_is_named(run, tmp_path):
    columns = (slice(None), slice(2, 4))  # those of rank 1 of 2
    for name in "AB":
        facts = {"tp": 2} if name == run else {}
        write(tmp_path / name, put("gradients", math.nan, name="w", place=columns) if name == "B" else None, **facts)
    found = compare(tmp_path / "A", tmp_path / "B").differences[0]
    assert found.group == "tp rank 1's part (of 2) of w"


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
    assert "3 steps, of which both runs skipped 1 (gradients that are not finite)" in as_text(finding)


def test_in_a_step_that_both_skip_all_else_is_compared(tmp_path):
    write(tmp_path / "A", skips)

    def changed(key, name, factor):
        def spoil(step, values):
            skips(step, values)
            if step == 1 and name is None:
                values[key] = values[key] * factor
            elif step == 1:
                values[key] = values[key] | {name: values[key][name] * factor}

        return spoil

    cases = {
        "loss": (changed("loss", None, 2.0), ("loss", "")),
        "infinite loss": (changed("loss", None, math.inf), ("loss", "B")),
        "another gradient": (changed("gradients", "b", 3.0), ("gradient", "")),
        "inf in another gradient": (changed("gradients", "b", math.inf), ("gradient", "B")),
        "an update": (changed("parameters", "b", 1.1), ("gradient", "A and B")),
    }
    for name, (spoil, expected) in cases.items():
        write(tmp_path / name, spoil)
        finding = compare(tmp_path / "A", tmp_path / name)
        assert not finding.equal, name
        assert (finding.differences[0].quantity, finding.differences[0].not_finite) == expected, name


def test_only_skipped_steps_prove_nothing(tmp_path, capsys):
    for name in "AB":
        write(tmp_path / name, skips)
        for step in (0, 2):
            (tmp_path / name / f"step-{step}.npz").unlink()
    assert main([str(tmp_path / "A"), str(tmp_path / "B")]) == 2
    assert "both skipped every step" in capsys.readouterr().err


def test_json_and_picture_show_what_is_not_finite(tmp_path, capsys):
    write(tmp_path / "A")
    write(tmp_path / "B", put("gradients", math.nan, name="w", place=0))
    out = str(tmp_path / "x.json")
    assert main([str(tmp_path / "A"), str(tmp_path / "B"), "--json", out]) == 1
    values = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert values["differences"][0]["not_finite"] == "B" and values["ratios"]["1"]["w"] == "NaN"
    labels = [text.get_text() for text in plot_comparison(read_comparison(out)).legends[0].get_texts()]
    assert labels == ["equal within rounding", "not finite"]


# ---- values of any size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-100, 1e150, 1e300])
def test_a_factor_is_found_in_huge_and_in_tiny_values(size, tmp_path):
    def times(factor):
        def spoil(step, values):
            values["gradients"] = {name: factor * gradient for name, gradient in values["gradients"].items()}

        return spoil

    write(tmp_path / "A", times(size))
    write(tmp_path / "same", times(size))
    write(tmp_path / "B", times(4 * size), tp=4)
    assert compare(tmp_path / "A", tmp_path / "same").equal
    finding = compare(tmp_path / "A", tmp_path / "B")
    found = finding.differences
    assert [(each.ratio, each.group) for each in found] == [(pytest.approx(4), "all parameters")]
    assert finding.ratios[0]["w"] == pytest.approx(4)


def test_a_huge_value_in_one_run_is_never_equal(tmp_path):
    write(tmp_path / "A")
    for value in (1e30, 1e200, 1.7e308):
        write(tmp_path / f"{value}", put("gradients", value, name="w", place=(0, 0)))
        assert ("gradient", "w") in [
            (each.quantity, name)
            for each in compare(tmp_path / "A", tmp_path / f"{value}").differences
            for name in each.parameters
        ]


def test_a_record_of_huge_values_is_exact(tmp_path):
    write(tmp_path / "A", put("gradients", 3e200, name="b", place=...), steps=2)
    run = read_run(tmp_path / "A")
    arrays = read_step(run.steps[1], run.shapes)
    np.testing.assert_allclose(arrays["gradient/b"][0], 3e200)


@pytest.mark.parametrize("key", ["gradients", "parameters"])
def test_a_complex_array_is_refused_with_its_name(key, tmp_path):
    def spoil(step, values):
        values[key]["w"] = values[key]["w"] * 1j

    with pytest.raises(TypeError, match="^w is complex"):
        write(tmp_path / "A", spoil)


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_a_complex_loss_or_norm_is_refused(key, tmp_path):
    with pytest.raises(TypeError, match="complex"):
        write(tmp_path / "A", put(key, 5 + 1j))


@pytest.mark.parametrize(("key", "what"), [("gradients", "gradient w"), ("parameters", "parameter w")])
@pytest.mark.parametrize("value", [np.ones((4, 6)), np.ones(4), None])
def test_an_array_of_another_shape_is_refused(key, what, value, tmp_path):
    def spoil(step, values):
        values[key]["w"] = value

    with pytest.raises(ValueError, match=f"^{what} has shape .*, expected \\(6, 4\\)$"):
        write(tmp_path / "A", spoil)


@pytest.mark.parametrize("dtype", [np.complex128, np.bool_, "U5"])
def test_a_file_without_real_values_is_refused(dtype, tmp_path):
    write(tmp_path / "A")
    write(tmp_path / "B")
    path = tmp_path / "B" / "step-0.npz"
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"update/w": arrays["update/w"].astype(dtype)})
    with pytest.raises(UsageError, match="is not a step of a record: .*update/w holds"):
        compare(tmp_path / "A", tmp_path / "B")
