"""Claims about what `minipar.compare` prints and writes, and about its command line."""

import json
import math
import runpy
import sys

import numpy as np
import pytest

from minipar.compare.causes import OTHER, Difference, causes
from minipar.compare.differences import ADVICE, Finding, as_text, compare, main
from minipar.compare.records import LARGEST, read_run
from minipar.compare.step_comparison import NOT_FINITE
from minipar.errors import UsageError
from minipar.record import Record


def finding(**changed):
    given = {"steps": 3, "recorded": (3, 3), "parameters": 9, "step": None, "differences": (), "ratios": {}}
    return Finding(**given | {"may_be_rounding": False} | changed)


DIFFERENCES = (
    Difference("gradient", 4.0, "the norms", ("a", "b"), ("4 = tp: x", "y"), ""),
    Difference("gradient", None, "block 1", ("c",), (OTHER,), ""),
    Difference("gradient", None, "d", ("d",), (NOT_FINITE,), "A and B"),
    Difference("loss", 1.0000001, "5 in A, 5 in B", (), (), ""),
    Difference("update", -1 / 3, "all parameters", tuple("abcdefghi"), (), ""),
)
TEXT = f"""\
compare: DIFFERENT from step 2 on (counted from 0; 3 steps compared)
  gradient: B = 4 A: the norms (2 of 9 parameters)
    4 = tp: x
    y
  gradient: no constant ratio: block 1 (1 of 9 parameters)
    {OTHER}
  gradient: not finite in A and B: d (1 of 9 parameters)
    {NOT_FINITE}
  loss: B is nearly A: 5 in A, 5 in B
  update: B = -0.33333 A: all parameters (9 of 9 parameters)
"""


def test_a_difference_has_a_line_and_one_for_each_cause():
    assert as_text(finding(step=2, differences=DIFFERENCES)) == TEXT
    assert as_text(finding(step=2, differences=DIFFERENCES, may_be_rounding=True)) == f"{TEXT}{ADVICE}\n"


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({}, "3 steps"),
        ({"steps": 1, "recorded": (1, 1)}, "1 step"),
        ({"steps": 2, "recorded": (2, 5)}, "2 steps, of 2 in A and 5 in B"),
        ({"recorded": (4, 4)}, "3 steps, of 4 in A and 4 in B"),
        ({"skipped": (1, 2)}, "3 steps, of which both runs skipped 2 (gradients that are not finite)"),
    ],
)
def test_what_was_compared_is_counted(changed, steps):
    assert as_text(finding(**changed)) == f"compare: equal within rounding: 9 parameters, {steps}\n"


# ---- causes ----------------------------------------------------------------------------------------------------------

RATE = "the learning rate: its schedule, its warm-up, or how often it is advanced"
TIMES_DP = "summed over dp, though each rank's is already that of the global mean"


@pytest.mark.parametrize(
    ("quantity", "ratio", "expected"),
    [
        ("gradient", 3, [f"3 = dp: the gradient is {TIMES_DP}"]),
        ("gradient", 1 / 3, ["1/3 = 1/dp: the gradient is divided by dp once too often"]),
        ("gradient", 9, []),
        ("gradient", math.sqrt(3), []),
        ("gradient", -1, ["a wrong sign"]),
        ("grad_norm", 3, [f"3 = dp: {TIMES_DP}"]),
        ("grad_norm", math.sqrt(3), [f"the root of 3 = dp: squares are {TIMES_DP}"]),
        ("update", 3, [f"3 = dp: {TIMES_DP}", RATE]),
        ("update", 0.9, [RATE]),
        ("update", 0, ["missing in B: detached, frozen, not sent, or never added"]),
        ("gradient", math.inf, ["missing in A: detached, frozen, not sent, or never added"]),
    ],
)
def test_these_are_all_causes_of_a_ratio(quantity, ratio, expected):
    """The run has dp = 3, and an axis of one rank, which causes nothing."""
    assert causes(quantity, ratio, {"dp": [1, 3], "tp": [1]}) == tuple(expected)


def test_an_axis_of_one_rank_causes_nothing():
    for quantity in ("gradient", "grad_norm", "loss"):
        assert causes(quantity, 1.0005, {"dp": [1], "pp": []}, 0.0) == ()


def test_the_difference_counts_for_a_loss_alone():
    logarithm = "B - A = log 3 = log dp: logits that a rank has whole are gathered once more"
    assert causes("loss", 1.5, {"dp": [3]}, math.log(3)) == (logarithm,)
    assert causes("gradient", 1.5, {"dp": [3]}, math.log(3)) == ()


# ---- the command -----------------------------------------------------------------------------------------------------


def write(directory, steps=(0,), factor=1.0, **facts):
    values = {"w": np.arange(1.0, 7.0).reshape(2, 3)}
    record = Record(directory, values, **facts)
    for step in steps:
        record.step(step, 5.0, 1.0, {"w": factor * values["w"]}, values)


def test_the_whole_result_is_in_the_json(capsys, tmp_path):
    """The runs do not differ at all, so that they are equal even within a bound of 0."""
    write(tmp_path / "a")
    write(tmp_path / "b")
    text = tmp_path / "report.json"
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--bound", "0", "--json", str(text)]) == 0
    assert capsys.readouterr().out == "compare: equal within rounding: 1 parameters, 1 step\n"
    assert json.loads(text.read_text()) == {
        "equal": True,
        "steps": 1,
        "recorded": [1, 1],
        "parameters": 1,
        "step": None,
        "differences": [],
        "ratios": {"0": {"w": None}},
        "may_be_rounding": False,
        "skipped": [],
    }


def test_python_m_runs_the_command(monkeypatch, capsys, tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", factor=2.0)
    for words, code, line in (
        (["--help"], 0, "usage: python -m minipar.compare [-h]"),
        ([str(tmp_path / "a"), str(tmp_path / "b")], 1, "compare: DIFFERENT from step 0 on"),
    ):
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_module("minipar.compare", run_name="__main__")
        assert leaving.value.code == code and capsys.readouterr().out.startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["a"], "the following arguments are required: B"),
        (["a", "b", "--bou", "0.5"], "unrecognized arguments: --bou 0.5"),
        (["a", "b", "--bound", "much"], "argument --bound: invalid float value: 'much'"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, line, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"minipar: error: {line}") and error.count("\n") == 1


# ---- steps and sizes -------------------------------------------------------------------------------------------------


def test_records_without_a_common_step_are_refused(tmp_path):
    write(tmp_path / "a", (0, 2))
    write(tmp_path / "b", (1, 3))
    with pytest.raises(UsageError, match=f"^{tmp_path}/a and {tmp_path}/b have no step in common$"):
        compare(tmp_path / "a", tmp_path / "b")


def test_only_the_steps_of_both_are_compared(tmp_path):
    write(tmp_path / "a", (0, 2, 3, 5), tp=2)
    write(tmp_path / "b", (1, 2, 5), 2.0)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.steps, found.recorded, found.parameters, found.step) == (2, (4, 3), 1, 2)
    assert found.ratios == {2: {"w": pytest.approx(2)}, 5: {"w": pytest.approx(2)}}
    (one,) = found.differences
    assert one == Difference(
        "gradient", pytest.approx(2), "all parameters", ("w",), causes("gradient", 2, {"tp": [1, 2]})
    )
    assert not found.may_be_rounding and found.skipped == ()


def test_a_parameter_of_b_alone_is_another_model(tmp_path):
    values = {"w": np.ones(3), "v": np.ones(3)}
    Record(tmp_path / "a", {"w": np.ones(3)}).step(0, 1.0, 1.0, {"w": np.ones(3)}, {"w": np.ones(3)})
    Record(tmp_path / "b", values).step(0, 1.0, 1.0, values, values)
    for first, second, shapes in (("a", "b", "missing in A, (3,) in B"), ("b", "a", "(3,) in A, missing in B")):
        with pytest.raises(UsageError) as caught:
            compare(tmp_path / first, tmp_path / second)
        assert str(caught.value) == f"the records are of different models: v is {shapes}"


def test_a_size_is_at_most_a_billion_billion(tmp_path):
    write(tmp_path / "a")
    file = tmp_path / "a" / "run.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"dp": 10**18}))
    assert read_run(tmp_path / "a").sizes["dp"] == LARGEST == 10**18
    file.write_text(json.dumps(content | {"dp": 10**18 + 1}))
    with pytest.raises(UsageError, match="a is not a record: .*a size of more than 1000000000000000000"):
        read_run(tmp_path / "a")


def test_a_record_without_parameters_is_one_without_a_step(tmp_path):
    write(tmp_path / "a")
    file = tmp_path / "a" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shapes": {}}))
    with pytest.raises(UsageError, match="a is a record without a step$"):
        read_run(tmp_path / "a")
