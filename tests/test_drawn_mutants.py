"""Claims about mutants drawn at random: an operator changes one place, a seed draws the same ones, shares are right."""

import ast

import numpy as np
import pytest
from mutants import drawn as mutants_drawn
from mutants.drawing import code, difference, draw, every_change, line_number, source
from mutants.drawn import (
    EQUIVALENT,
    LISTED,
    NO_TEST,
    Outcome,
    changes_of,
    check_listed,
    chosen_for,
    groups_of,
    listed,
    of_package,
    proved,
    quickest,
    report,
    rounds,
    run,
    share,
    with_mistakes,
    with_reason,
    wrong_entries,
)
from mutants.first_failure import HANGS
from mutants.judge import CAUGHT, SURVIVED
from mutants.lines import MeasuredTest, moves
from mutants.operators import Change, changes, is_other_code
from mutation import ROOT

FUNCTION = '''
def scale(x, *, factor=3, whole=True):
    """Return 3 < 4."""
    if x < factor and whole:
        x = max(x, 1, key=abs) + 2.5
    return x
'''


def results(source):
    """What the operators make of a source."""
    return [(each.operator, each.apply(source)) for each in changes("a.py", source)]


@pytest.mark.parametrize(
    ("operator", "old", "new"),
    [
        ("compare", "x < factor and", "x <= factor and"),
        ("boolean", "factor and whole", "factor or whole"),
        ("negated", "if x < factor and whole:", "if not (x < factor and whole):"),
        ("arithmetic", ") + 2.5", ") - 2.5"),
        ("constant", "x, 1, key", "x, 2, key"),
        ("constant", "2.5", "5.0"),
        ("default", "factor=3", "factor=4"),
        ("default", "whole=True", "whole=False"),
        ("dropped_keyword", "max(x, 1, key=abs)", "max(x, 1)"),
        ("deleted_statement", "x = max(x, 1, key=abs) + 2.5", "pass"),
        ("deleted_statement", "return x", "pass"),
    ],
)
def test_an_operator_changes_its_place_and_nothing_else(operator, old, new):
    assert FUNCTION.count(old) == 1
    assert (operator, FUNCTION.replace(old, new)) in results(FUNCTION)


def test_these_are_all_the_mistakes_of_the_function():
    assert len(results(FUNCTION)) == 11


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2."""',
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = 3",
        "class A:\n    def __repr__(self):\n        return 3",
        "x: Literal[3]",
        "def f(x: Literal[3]) -> Literal[4]:\n    '''Text.'''",
        "x = f'{3 + 4}'",
        "x = 'a' + name",
        "error = UsageError(3, code=4)",
        "def f():\n    import torch\n    x = 3",
    ],
)
def test_texts_annotations_and_messages_are_left_alone(source):
    assert results(source) == []


def test_an_open_size_has_a_sign_and_no_number():
    """NumPy reads -2 as it reads -1; an index of -2 is another one."""
    assert [text for _, text in results("y = x.reshape(-1, 3)")] == ["y = x.reshape(1, 3)", "y = x.reshape(-1, 4)"]
    assert np.array_equal(np.arange(6).reshape(-2, 3), np.arange(6).reshape(-1, 3))
    assert "y = x[-2]" in [text for _, text in results("y = x[-1]")]


def test_in_drawings_sizes_and_places_are_left_alone():
    source = "axes.text(x, fontsize=9, color=INK)\nTOP = 0.25\nMOST = 4\n"
    assert [each.apply(source) for each in changes("visualize/a.py", source)] == [
        source.replace("axes.text(x, fontsize=9, color=INK)", "pass"),
        source.replace("4", "5"),
    ]
    assert len(changes("minipar/a.py", source)) == 3


def test_of_a_raise_only_the_whole_is_deleted():
    assert results("raise UsageError(3 + 4)") == [("deleted_statement", "pass")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("(a) <= (b)  # < c", "(a) < (b)  # < c"),
        ("a not in b", "a in b"),
        ("é is not x", "é is x"),
        ("f(\n    k=g(x),\n)", "f(\n    \n)"),
        ("f(x, k=g(x), **z)", "f(x, **z)"),
        ("x = not y", "x = y"),
        ("x = -y", "x = y"),
        ("x //= y", "x *= y"),
        ("[a for a in b if a]", "[a for a in b if not (a)]"),
    ],
)
def test_a_change_is_as_small_as_this(source, expected):
    assert expected in [result for _, result in results(source)]


@pytest.fixture(scope="module")
def drawn():
    return draw(code(), 1, 60)


def test_each_drawn_mutant_is_python_and_one_span_differs(drawn):
    assert len(drawn) == 60 and len({each.operator for each in drawn}) >= 5
    for each in drawn:
        text = (ROOT / each.file).read_text(encoding="utf-8")
        result = each.apply(text)
        ast.parse(result)
        assert result[: each.start] == text[: each.start] and result != text
        assert result.endswith(text[each.end :])
        removed = [line for line in difference(each) if line.startswith("- ")]
        assert set(removed) <= {f"- {line.strip()}" for line in text.splitlines()}


def test_a_seed_draws_the_same_mutants_and_another_others(drawn):
    assert draw(code(), 1, 60) == drawn
    assert len(set(draw(code(), 2, 60)) & set(drawn)) < 10


def test_what_is_the_same_code_is_not_drawn():
    assert not is_other_code(Change("a.py", "compare", 0, 1, "(x)", ()), "x")
    assert not is_other_code(Change("a.py", "compare", 0, 1, "x(", ()), "x")


def test_tests_that_execute_the_line_run_the_quickest_first():
    tests = [
        MeasuredTest("quick", 0.1, {"a.py": 1 << 5}),
        MeasuredTest("elsewhere", 0.1, {"a.py": 1 << 6, "b.py": 1 << 5}),
        MeasuredTest("slow", 30.0, {"a.py": 0b111 << 4}),
        MeasuredTest("too slow", 300.0, {"a.py": 1 << 5}),
    ]
    change = Change("a.py", "compare", 0, 1, "", (5,))
    names = [[test.name for test in group] for group in chosen_for(change, tests)]
    assert names == [["quick"], ["slow"]]
    assert [[test.name for test in group] for group in chosen_for(change, tests[3:])] == [[], ["too slow"]]


def test_a_line_that_nobody_measured_is_for_all_of_the_package():
    names = ["tests/comm/test_launch.py::test_a", "tests/nn/test_gpt.py::test_b"]
    tests = [MeasuredTest(name, 300.0, {"minipar/comm/launch.py": 1}) for name in names]
    change = Change("minipar/comm/launch.py", "compare", 0, 1, "", (5,))
    assert chosen_for(change, tests) == ([], [])
    assert of_package(change, tests) == tests[:1]


def test_a_mistake_at_import_is_for_all_tests_of_the_package(tmp_path):
    """Here a table's constant, which only other modules read: the tests of its own module's functions pass."""
    every = every_change("minipar/plan/programs.py")
    change = next(each for each in every if source(each.file)[each.start : each.end] == "4.32")
    names = ["tests/plan/test_units.py", "tests/plan/test_recorded_layouts.py"]
    own, other = [MeasuredTest(name, 1.0, {}) for name in names]
    own.lines[change.file] = 1 << change.lines[0]
    (found,) = run([change], lambda _: [[own, other]], 1, tmp_path / "trees")
    assert found.outcome == CAUGHT and found.note.startswith(other.name)


def test_tests_that_name_the_module_come_first():
    files = [f"tests/train/test_{name}.py" for name in ("train", "data", "lock", "verify")]
    files += ["tests/test_errors.py", "tests/nn/test_gpt.py"]
    first, second, last = rounds(Change("minipar/train/lock.py", "compare", 0, 1, "", (5,)), files)
    assert "tests/train/test_lock.py" in first and all(file.startswith("tests/train/") for file in first + second)
    assert last == files[4:] and sorted(first + second + last) == sorted(files)
    assert rounds(Change("minipar/errors.py", "compare", 0, 1, "", (5,)), files)[0] == ["tests/test_errors.py"]


def test_measured_lines_are_found_again_in_changed_code():
    """Lines count from 1, as bits do from 0; a new line belongs to those around it."""
    old = ["a", "b", "c", "d"]
    assert moves(old, old) == [0, 1 << 1, 1 << 2, 1 << 3, 1 << 4]
    assert moves(old, ["a", "new", "b", "C", "d"]) == [0, 0b110, 0b1100, 1 << 4, 1 << 5]
    assert moves(old, ["b", "d"]) == [0, 0, 1 << 1, 0, 1 << 2]
    assert moves(old, []) == [0] * 5


def test_no_lines_are_measured_that_a_mutant_does_not_need(condition, tmp_path):
    def one_round(change):
        yield [MeasuredTest("tests/nn/test_module.py", 1.0, {change.file: 1 << line_number(change)})]
        raise AssertionError("the first round has caught it")

    assert run([condition], one_round, 1, tmp_path / "trees")[0].outcome == CAUGHT


def test_only_a_mutant_that_all_tests_of_its_line_pass_survives(condition, tmp_path):
    """What a round has no time for runs after the last round."""
    here = {condition.file: 1 << line_number(condition)}
    passing = [MeasuredTest("tests/autograd/test_operations.py", 59.0, here)]
    failing = [MeasuredTest("tests/nn/test_module.py", 70.0, here)]
    (found,) = run([condition], lambda _: [passing + failing], 1, tmp_path / "one round")
    assert found.outcome == CAUGHT and found.note.startswith("tests/nn/test_module.py")
    elsewhere = [MeasuredTest("tests/nn/test_module.py", 70.0, {condition.file: 1})]
    (found,) = run([condition], lambda _: [passing + elsewhere], 1, tmp_path / "other lines")
    assert found.outcome == EQUIVALENT


def test_a_listed_mutant_needs_the_quickest_tests_alone(condition):
    here = {condition.file: 1 << line_number(condition)}
    elsewhere = [MeasuredTest("elsewhere", 0.1, {"minipar/errors.py": 1})]
    some = [MeasuredTest("quick", 0.1, here), MeasuredTest("slow", 30.0, here)]

    def three_rounds():
        yield elsewhere
        yield some
        raise AssertionError("the second round has quick tests")

    assert list(quickest(condition, three_rounds())) == [some[:1]]
    assert list(quickest(condition, [elsewhere, some[1:]])) == []


def test_a_mistake_at_import_is_seen_by_tests_of_functions():
    source = "LIMIT = 3\n\n\ndef f(x=1):\n    return x\n"
    assert {each.operator: each.lines for each in changes("a.py", source)} == {
        "constant": (5,),
        "default": (5,),
        "deleted_statement": (5,),
    }


def test_the_list_of_equivalents_is_found_by_content(drawn):
    change = drawn[0]
    text = "\n".join(["# A comment.", "", change.file, *difference(change), "Both are", "the same."])
    assert listed(text) == {(change.file, *difference(change)): "Both are the same."}
    with pytest.raises(ValueError, match="expected a file"):
        listed("minipar/a.py\n- x\n+ y\n")


def test_each_listed_equivalent_is_a_mutant_of_the_code():
    entries = listed(LISTED.read_text(encoding="utf-8"))
    assert [entry for entry in entries if not changes_of(entry)] == []


@pytest.fixture
def condition(monkeypatch, tmp_path):
    """A mutant that a test notices, and that the list calls equivalent."""
    every = [each for each in every_change("minipar/nn/guards.py") if each.operator == "negated"]
    change = next(each for each in every if "shape[-1] != inputs" in each.new)
    monkeypatch.setattr(mutants_drawn, "LISTED", tmp_path / "equivalent.txt")
    text = "\n".join([change.file, *difference(change), "Nobody can notice it."])
    mutants_drawn.LISTED.write_text(text, encoding="utf-8")
    return change


@pytest.mark.parametrize(
    ("test", "outcome", "wrong"),
    [("tests/nn/test_module.py", CAUGHT, 1), ("tests/autograd/test_operations.py", EQUIVALENT, 0)],
)
def test_a_listed_mutant_runs_and_its_entry_can_be_wrong(condition, tmp_path, test, outcome, wrong):
    tests = [MeasuredTest(test, 1.0, {condition.file: 1 << line_number(condition)})]
    (found,) = run([condition], lambda _: [tests], 1, tmp_path / "trees")
    assert (found.outcome, found.reason) == (outcome, "Nobody can notice it.")
    messages = wrong_entries([found])
    assert len(messages) == wrong
    assert all("nn/guards.py" in message and found.note in message for message in messages)


def test_mistakes_of_one_tree_are_all_in_it(tmp_path):
    """Several in one file too, where each but the last moves the others."""
    every = [each for each in every_change("minipar/nn/guards.py") if each.operator == "deleted_statement"]
    group, alone = groups_of([*every, every[0]])
    assert group == every and alone == every[:1]
    elsewhere = every_change("minipar/errors.py")[0]
    tree = with_mistakes([*group, elsewhere], tmp_path / "tree")
    text = (tree / every[0].file).read_text(encoding="utf-8")
    assert sum(isinstance(node, ast.Pass) for node in ast.walk(ast.parse(text))) == len(every) > 5
    assert (tree / elsewhere.file).read_text(encoding="utf-8") == elsewhere.apply(source(elsewhere.file))


@pytest.mark.parametrize(("outcome", "trees"), [(SURVIVED, 1), (CAUGHT, 3)])
def test_listed_mutants_run_alone_only_if_a_test_fails(condition, outcome, trees, tmp_path, monkeypatch):
    other = next(each for each in every_change(condition.file) if line_number(each) > line_number(condition))
    tests = [MeasuredTest("a test", 1.0, {condition.file: 1 << line_number(each)}) for each in (condition, other)]
    ran = []

    def run_tests(tree, chosen):
        ran.append((tree / condition.file).read_text(encoding="utf-8"))
        return outcome, "a test"

    monkeypatch.setattr(mutants_drawn, "run_with_deadlines", run_tests)
    noticed = check_listed([condition, other], lambda _: [tests], 1, tmp_path)
    assert len(ran) == trees and all(condition.new in text for text in ran[:2])
    assert [each.outcome for each in noticed] == [outcome] * (trees - 1)


def test_the_list_never_turns_a_caught_mutant_into_another(drawn):
    reasons = {(each.file, *difference(each)): "a reason" for each in drawn}
    kinds = [(CAUGHT, "a test", CAUGHT), (SURVIVED, "passed by 3 tests", EQUIVALENT), (SURVIVED, NO_TEST, SURVIVED)]
    for before, note, after in kinds:
        outcome = Outcome(drawn[0], before, note, 1.0)
        assert with_reason(outcome, reasons).outcome == after
        assert with_reason(outcome, {}) == outcome


def test_the_share_is_of_those_that_are_not_equivalent(drawn):
    kinds = [CAUGHT] * 3 + [SURVIVED] + [EQUIVALENT] * 4
    outcomes = [Outcome(change, kind, "note", 1.0) for change, kind in zip(drawn, kinds, strict=False)]
    assert share(outcomes) == 0.75
    assert share(outcomes[4:]) == 1
    text = report(outcomes)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.endswith("%")}
    assert rows["all"] == ["8", "4", "3", "0", "75.0%"]
    assert sum(int(row[0]) for name, row in rows.items() if name != "all") == 8
    survivor = drawn[3]
    assert all(line in text for line in difference(survivor))


def test_what_only_a_failing_test_caught_is_a_survivor(drawn):
    outcomes = [Outcome(drawn[0], CAUGHT, note, 1.0) for note in ("a test", "another", f"a test{HANGS}")]
    assert [proved(each, ["a test"]).outcome for each in outcomes] == [SURVIVED, CAUGHT, SURVIVED]


def test_those_caught_by_a_test_that_hangs_are_counted(drawn):
    notes = ["a test", f"a test{HANGS}", f"the tests{HANGS}"]
    outcomes = [Outcome(change, CAUGHT, note, 1.0) for change, note in zip(drawn, notes, strict=False)]
    assert report(outcomes).splitlines()[-1].split() == ["all", "3", "0", "3", "2", "100.0%"]
