"""What chapter 14 tells of: the recorded layouts and runs come out again, and the exercise's answers are true."""

import subprocess
import sys

import numpy as np
import pytest
from launcher import ROOT

from chapters.exercises.graders.e20_broken_runs import ANSWERS
from chapters.support.ch14 import figures, layouts, patients
from minipar.compare.differences import compare

EPSILON = {"float64": 2**-52, "float32": 2**-23}
STEPS = 5
ROWS = [(layout, dtype) for layout in layouts.LAYOUTS for dtype in EPSILON if "cp" not in layout]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("layout", "dtype"), ROWS)
def test_a_recorded_row_of_a_layout_comes_out_again(layout, dtype):
    recorded = layouts.recorded("3e-3")[dtype][layout]["losses"][:STEPS]
    losses = layouts.run(layout, dtype, "3e-3", steps=STEPS).losses
    assert losses == pytest.approx(recorded, rel=1000 * STEPS * EPSILON[dtype])


def test_every_layout_is_recorded():
    assert len(layouts.LAYOUTS) == 18
    for rate in layouts.RATES:
        for found in layouts.recorded(rate).values():
            assert list(found) == list(layouts.LAYOUTS)
            assert all(len(run["losses"]) == layouts.STEPS for run in found.values())
            assert all(len(run["gradients"]) == len(layouts.LOOKED_AT) for run in found.values())
    assert set(layouts.recorded("3e-3")) == set(layouts.DTYPES)


def test_float64_tells_that_no_layout_has_a_mistake():
    found = layouts.recorded("3e-3")
    assert layouts.spread(found["float64"]).max() < 1e-11
    assert 1e-4 < layouts.spread(found["float32"])[-1] < 1e-3


def test_readme_has_the_largest_differences():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for dtype, text in (("float64", "9e-13 in float64"), ("float32", "6e-4 in float32"), ("bfloat16", "0.03 in bf16")):
        last = [run["losses"][-1] for run in layouts.recorded("3e-3")[dtype].values()]
        assert float(f"{np.ptp(last):.0e}") == float(text.split()[0]) and text in readme


def test_five_of_the_six_runs_have_a_mistake():
    found = patients.recorded()
    ratio = {name: run["largest"] / found["float64"][name]["largest"] for name, run in found["float32"].items()}
    assert [name for name, value in ratio.items() if value > 1e6] == ["C"] and patients.PATIENTS["C"].answer == 0
    assert all(0.99 < value < 1.01 for name, value in ratio.items() if name != "C")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", list("ABDEF"))
def test_a_recorded_run_comes_out_again(name, tmp_path):
    recorded = patients.recorded()["float64"][name]
    run = patients.record_pair(name, str(tmp_path), "float64", steps=3)
    for which in (0, 1):
        assert run["run"][which] == pytest.approx(recorded["run"][which][:3], rel=1e-9)
    finding = compare(tmp_path / "right", tmp_path / "run")
    assert (finding.step, finding.differences[0].quantity) == (recorded["step"], recorded["quantity"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(ANSWERS))
def test_the_exercises_runs_have_the_graders_answers(name, tmp_path):
    patients.record_pair(name, str(tmp_path), steps=3)
    finding = compare(tmp_path / "right", tmp_path / "run")
    assert (finding.step, finding.differences[0].quantity, patients.PATIENTS[name].answer) == ANSWERS[name]


def test_the_spread_is_the_largest_difference_of_a_step():
    found = {"single": {"losses": [4.0, 2.0]}, "a": {"losses": [4.0, 1.0]}, "b": {"losses": [5.0, 2.5]}}
    assert layouts.spread(found).tolist() == [0.25, 0.5]


def test_a_band_leaves_out_layouts_of_equal_bits():
    found = {"single": {"gradients": [0, 0]}, "a": {"gradients": [0, 2.0]}, "b": {"gradients": [1.0, 3.0]}}
    assert layouts.gradient_range(found).tolist() == [[1.0, 2.0], [1.0, 3.0]]


def test_each_run_is_drawn_upon_the_right_one():
    runs = {"A": {"right": [[2, 1], [3, 4]], "run": [[2, 1.5], [5, 6]]}, "B": {"right": [[9, 1]], "run": [[9, 1]]}}
    axes = figures.plot_six(runs, 0, "loss").axes
    assert [list(line.get_ydata()) for line in axes[0].lines] == [[2, 1], [2, 1.5]]
    assert axes[0].get_title(loc="right") == "differs by up to 50.00 %"
    assert [each.get_yscale() for each in axes] == ["linear", "log"]


def test_the_judge_draws_each_run_at_its_two_differences():
    (axes,) = figures.plot_judge({"A": (3.0, 3.0), "C": (1.0, 2e-9)}, 2.0**29).axes
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"}
    assert points == {(3.0, 3.0), (1.0, 2e-9)}


def test_layouts_are_drawn_as_differences_to_one_device():
    found = {"float32": {"single": {"losses": [3.0, 2.0]}, "tp2": {"losses": [3.0, 2.5]}}}
    (axes,) = figures.plot_eighteen(found, {"single": (4, 3, 2), "tp2": (4, 3, 1)}, (1, 2, 3)).axes[:1]
    assert np.array_equal(axes.lines[0].get_ydata(), [0, 0.5])
    assert np.array_equal(axes.lines[1].get_ydata(), [0, 0, -1])


def test_every_check_has_its_row():
    (axes,) = figures.draw_checks().axes
    shown = {text.get_text() for text in axes.texts}
    assert {text for check in figures.CHECKS for text in check} <= shown


@pytest.mark.long
def test_the_torch_loop_equals_minipar_and_its_mistake_is_seen(tmp_path):
    pytest.importorskip("torch")
    file = layouts.file_of("3e-3").with_name("check_torch.py")
    command = [sys.executable, str(file), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal within rounding: 21 parameters, 5 steps" in result.stdout and "DIFFERENT from step 0" in result.stdout


def test_without_torch_the_loop_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')\n")
    file = layouts.file_of("3e-3").with_name("check_torch.py")
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(file)!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1 and "torch is not installed, so nothing was compared" in result.stderr
