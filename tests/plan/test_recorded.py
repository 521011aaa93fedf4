"""A change that should change no plan changes none: each question has the recorded answer, in words and as JSON."""

import pytest
from plan_cases import QUESTIONS, RECORDED, answer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_the_recorded_one(name):
    assert answer(QUESTIONS[name]).splitlines() == (RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines()
