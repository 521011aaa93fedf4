"""Claims about the mutants of `make mutants`: they fit the code and all packages, and survivors are explained."""

import ast
from collections import Counter
from functools import cache

import pytest
from mutants.every import EVERY, PACKAGES
from mutants.judge import CAUGHT, SURVIVED, Judgement
from mutants.mutant import Mutant
from mutants.run import explained, problems
from mutation import ROOT

NAMES = [mutant.name for _, mutant in EVERY]


@cache
def parsed(file):
    """The text of a file, and what Python reads in it."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return text, ast.dump(ast.parse(text))


def changes_one_place(mutant):
    """Whether the text stands in the file once, and what comes out is still Python, and other Python than before."""
    text, code = parsed(mutant.file)
    try:
        return ast.dump(ast.parse(mutant.apply(text))) != code
    except (ValueError, SyntaxError):
        return False


def test_each_mutant_changes_one_place_of_the_code():
    assert [mutant.name for _, mutant in EVERY if not changes_one_place(mutant)] == []


@pytest.mark.parametrize("before", ["no such text of memory.py", "def ", "MemoryLedger:"])
def test_a_mutant_that_changes_no_one_place_is_seen(before):
    assert not changes_one_place(Mutant("m", "minipar/memory.py", before, before, ()))


def test_every_mutant_has_a_name_of_its_own_and_tests():
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []
    paths = {path for _, mutant in EVERY for path in mutant.first}
    paths |= {path for tests, _ in PACKAGES.values() for path in tests}
    assert [path for path in paths if not (ROOT / "tests" / path).exists()] == []


def test_there_are_a_hundred_and_every_package_has_some():
    folders = [path for path in (ROOT / "minipar").rglob("*") if (path / "__init__.py").exists()]
    names = [folder.relative_to(ROOT).as_posix() for folder in [*folders, ROOT / "visualize"]]
    files = [mutant.file for _, mutant in EVERY]
    assert len(EVERY) >= 100
    assert f"`tests/mutants` has {len(EVERY)} of them" in (ROOT / "docs" / "proofs.md").read_text(encoding="utf-8")
    assert [name for name in names if not any(file.startswith(f"{name}/") for file in files)] == []


def test_every_survivor_of_the_document_is_a_mutant():
    assert explained() <= set(NAMES)


def test_a_run_fails_with_a_survivor_that_is_not_explained():
    mutant = Mutant("no such mistake", "minipar/memory.py", "a", "b", ())
    caught, survivor = (Judgement("nn", mutant, outcome, "tests/a.py::b", 1.0) for outcome in (CAUGHT, SURVIVED))
    assert problems([caught], [], True) == []
    assert ["SURVIVED, and proofs.md does not say why" in each for each in problems([survivor], [], False)] == [True]
    assert len(problems([survivor], [], True)) == 2  # and too few are caught
    assert problems([caught], ["tests/a.py::b"], False) == ["tests/a.py::b fails without a mistake too"]
