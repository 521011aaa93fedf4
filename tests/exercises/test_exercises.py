"""The graders pass every reference solution, fail every skeleton, and give each planted mistake its own hint."""

import importlib
import re
import subprocess
import sys
import threading
import types

import pytest
from chapter_code import script_of
from exercises.mistakes import MISTAKES
from launcher import ROOT

from chapters.exercises import grading
from chapters.exercises.grading import Hint, NotWritten, names, on_ranks
from chapters.exercises.test_exercises import test_exercise as run_exercise

SOLUTIONS = ROOT / "tests" / "exercises" / "solutions"


def module_of(name, source):
    """Make a module of a solution's source text."""
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def grade(name, source):
    """Grade a solution's source text. Return its score, if it has one."""
    return importlib.import_module(f"chapters.exercises.graders.{name}").grade(module_of(name, source))


def solution_of(exercise):
    """Return the name and the text of the reference solution of "e01", or of its full name."""
    (path,) = SOLUTIONS.glob(f"{exercise}*.py")
    return path.stem, path.read_text()


def test_each_exercise_has_a_solution_and_mistakes():
    assert names() == sorted(path.stem for path in SOLUTIONS.glob("e*.py"))
    assert list(MISTAKES) == [name[:3] for name in names()]
    assert min(map(len, MISTAKES.values())) >= 2


@pytest.mark.parametrize("name", names())
def test_the_reference_solution_passes(name):
    grade(*solution_of(name))


@pytest.mark.parametrize("name", names())
def test_the_skeleton_fails_and_says_that_it_is_empty(name):
    with pytest.raises(NotWritten, match=f"{name}.py"):
        importlib.import_module(f"chapters.exercises.graders.{name}").grade(
            importlib.import_module(f"chapters.exercises.{name}")
        )


@pytest.mark.parametrize(("exercise", "old", "new", "hint"), [(key, *row) for key in MISTAKES for row in MISTAKES[key]])
def test_a_mistake_gets_its_own_hint(exercise, old, new, hint):
    name, source = solution_of(exercise)
    assert old in source
    with pytest.raises(Hint, match=re.escape(hint)):
        grade(name, source.replace(old, new))


def test_a_solved_exercise_names_a_section_that_exists(monkeypatch):
    reached = {name: importlib.import_module(f"chapters.exercises.graders.{name}").SOLVED for name in names()}
    for chapter, number in re.findall(r"section (\d+)\.(\d+)", " ".join(reached.values())):
        assert f"\n# ## {chapter}.{number} " in script_of(f"{int(chapter):02}")
    name, source = solution_of("e02")
    monkeypatch.setitem(sys.modules, f"chapters.exercises.{name}", module_of(name, source))
    found = {}
    run_exercise(name, found.__setitem__)
    assert found == {"reached": reached[name]}


def test_known_schedules_have_their_scores():
    name, source = solution_of("e26")
    assert grade(name, source).startswith("time 112, memory 3;")
    exercise, grader = (importlib.import_module(f"chapters.exercises.{where}{name}") for where in ("", "graders."))
    module = module_of(name, source)
    for memory, known in exercise.KNOWN.items():
        time, held = grader.score(grader.checked(module.scheduled(*module.FOUND[memory])))
        assert held <= memory and round(float(time), 2) == known
    rows = re.findall(r"^ {4}([a-z1][\w-]+) +([\d.]+) +([\d.]+)$", exercise.__doc__, re.MULTILINE)
    assert {row: (float(time), float(held)) for row, time, held in rows} == grader.table()


def test_each_timetable_has_one_first_broken_action():
    """Exercise 27 says that no rank has two at the same time."""
    name, source = solution_of("e27")
    grader = importlib.import_module(f"chapters.exercises.graders.{name}")
    all_broken = module_of(name, source.replace("min(broken, default=None)", "broken")).first_broken
    for what, timetable, right in grader.timetables():
        broken = all_broken(timetable)
        first = min((found[:2] for found in broken), default=None)
        at_once = [found for found in broken if found[:2] == first]
        assert at_once == ([] if right is None else [right]), what


def test_the_command_lists_every_exercise_and_its_hint():
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rN", "--tb=no", "chapters/exercises"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert result.returncode == 1 and f"0 of {len(names())} exercises solved" in result.stdout
    for name in names():
        assert f"{name:28}not written yet" in result.stdout


def test_a_syntax_error_is_a_line_with_its_place(monkeypatch):
    def broken(name):
        raise SyntaxError("unexpected indent", (f"{name}.py", 88, 1, ""))

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(pytest.fail.Exception, match=r"^e23_early_hook.py, line 88: unexpected indent$"):
        run_exercise("e23_early_hook", None)


def test_a_rank_that_never_returns_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr(grading, "DEADLINE", 0.2)
    module = types.ModuleType("stuck")
    module.__file__ = "stuck.py"
    source = "def stuck(comm, stop):\n    stop.wait()\n"
    exec(compile(source, "stuck.py", "exec"), module.__dict__)
    stop = threading.Event()
    with pytest.raises(Hint, match="rank 1 is in line 2"):
        on_ranks(module, 2, module.stuck, stop)
    stop.set()
