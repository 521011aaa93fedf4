"""Grade the exercises in this directory. `pytest chapters/exercises -k e03` grades one of them."""

import importlib

import pytest

from chapters.exercises.grading import Hint, names


@pytest.mark.parametrize("name", names())
def test_exercise(name, record_property):
    try:
        solution = importlib.import_module(f"chapters.exercises.{name}")
    except SyntaxError as error:
        pytest.fail(f"{name}.py, line {error.lineno}: {error.msg}", pytrace=False)
    grader = importlib.import_module(f"chapters.exercises.graders.{name}")
    hint = ""
    try:
        score = grader.grade(solution)
        record_property("reached", f"{score}. {grader.SOLVED}" if score else grader.SOLVED)
    except Hint as error:
        hint = str(error)
    if hint:
        pytest.fail(hint, pytrace=False)
