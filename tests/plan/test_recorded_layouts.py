"""Reports of layouts that no search would choose have every program, schedule and axis, in words and as JSON."""

import pytest
from layout_cases import CASES, RECORDED, reported


@pytest.mark.parametrize("name", CASES)
def test_a_layouts_report_is_the_recorded_one(name):
    assert reported(CASES[name]).splitlines() == (RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines()
