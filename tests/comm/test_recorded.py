"""On the model clock a program takes the recorded time: each operation's start, end, bytes, and wait, on every rank."""

import pytest
from timeline_cases import PROGRAMS, RECORDED, as_text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_programs_trace_is_the_recorded_one(name):
    assert as_text(*PROGRAMS[name]).splitlines() == (RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines()
