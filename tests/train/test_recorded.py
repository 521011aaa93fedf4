"""A change that should change no training changes none: its lines, losses, norms and files are the recorded ones."""

import pytest
from run_cases import RECORDED, RUNS, as_text


@pytest.mark.parametrize("name", RUNS)
def test_a_run_says_and_measures_what_is_recorded(name):
    recorded = {part.partition(": [")[0]: part for part in RECORDED.read_text(encoding="utf-8").split("== ")[1:]}
    assert as_text(name).splitlines() == f"== {recorded[name]}".splitlines()
