"""What chapter 14 tells of comes out again: recorded layouts and runs, the exercise's answers, README's differences."""

import subprocess
import sys

import numpy as np
import pytest
from launcher import ROOT

from chapters.exercises.graders.e20_broken_runs import ANSWERS
from chapters.support.ch14 import layouts, patients
from minipar.compare.differences import compare

EPSILON = {"float64": 2**-52, "float32": 2**-23}
STEPS = 5


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("layout", [name for name in layouts.LAYOUTS if "cp" not in name])
def test_a_recorded_row_of_a_layout_comes_out_again(layout, dtype):
    recorded = layouts.recorded("3e-3")[dtype][layout]["losses"][:STEPS]
    losses = layouts.run(layout, dtype, "3e-3", steps=STEPS).losses
    assert losses == pytest.approx(recorded, rel=1000 * STEPS * EPSILON[dtype])


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


@pytest.mark.parametrize("name", list("ABDEF"))
def test_a_recorded_run_comes_out_again(name, tmp_path):
    recorded = patients.recorded()["float64"][name]
    run = patients.record_pair(name, str(tmp_path), "float64", steps=3)
    for which in (0, 1):
        assert run["run"][which] == pytest.approx(recorded["run"][which][:3], rel=1e-9)
    finding = compare(tmp_path / "right", tmp_path / "run")
    assert (finding.step, finding.differences[0].quantity) == (recorded["step"], recorded["quantity"])


@pytest.mark.parametrize("name", list(ANSWERS))
def test_the_exercises_runs_have_the_graders_answers(name, tmp_path):
    patients.record_pair(name, str(tmp_path), steps=3)
    finding = compare(tmp_path / "right", tmp_path / "run")
    assert (finding.step, finding.differences[0].quantity, patients.PATIENTS[name].answer) == ANSWERS[name]


def test_the_torch_loop_equals_minipar_and_its_mistake_is_seen(tmp_path):
    pytest.importorskip("torch")
    file = layouts.file_of("3e-3").with_name("check_torch.py")
    command = [sys.executable, str(file), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal within rounding: 21 parameters, 5 steps" in result.stdout and "DIFFERENT from step 0" in result.stdout
