"""Claims about style that a program can check: plain docstrings, few and short files, short names of tests."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = sorted(path for package in ("minipar", "visualize") for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

MOST_FILES = 100  # in minipar and visualize together
MOST_LINES = 400  # of one file
MOST_LINES_OF_MINIPAR = 10_500  # without plan and bench
MOST_BAD_OPENINGS = 3  # of 100 docstrings
LONGEST_NAME = 60  # of a test

# A docstring's first sentence has its subject or its verb first.
BAD_OPENING = re.compile(
    r"(What|Which|Who|Whose|Where|When|How|If|Of|In|On|For|With|By|Into|From|To|At|After|Before|Until|While|As)\b"
)


def docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for text in texts if text]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_few_docstrings_open_with_a_clause_or_a_preposition():
    texts = [(path, text) for path in CODE for text in docstrings(path.read_text(encoding="utf-8"))]
    bad = [f"{name(path)}: {text.splitlines()[0]}" for path, text in texts if BAD_OPENING.match(text)]
    assert len(bad) * 100 <= MOST_BAD_OPENINGS * len(texts), f"{len(bad)} of {len(texts)}:\n" + "\n".join(bad)


@pytest.mark.parametrize("path", CODE, ids=name)
def test_a_file_has_at_most_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_there_are_at_most_100_files():
    assert len(CODE) <= MOST_FILES


def test_minipar_stays_within_its_budget_of_lines():
    core = [path for path in CODE if name(path).split("/")[:2] not in (["minipar", "plan"], ["minipar", "bench"])]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in core if name(path).startswith("minipar/")]
    assert sum(lines) < MOST_LINES_OF_MINIPAR


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_names_of_tests_are_short(path):
    names = re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [each for each in names if len(each) > LONGEST_NAME] == []


def test_a_bad_opening_is_seen():
    source = '"""What is printed of it."""\ndef f():\n    """In short."""\ndef g():\n    """Install it."""'
    assert [bool(BAD_OPENING.match(text)) for text in docstrings(source)] == [True, True, False]
