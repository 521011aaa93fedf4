"""Claims about style that a program can check: plain docstrings and comments, short files and names of tests."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = sorted(path for package in ("minipar", "visualize") for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# A docstring's first sentence has its subject or its verb first, and so has a comment.
BAD_OPENING = re.compile(
    r"(What|Which|Who|Whose|Where|When|How|If|Of|In|On|For|With|By|Into|From|To|At|After|Before|Until|While|As"
    r"|That|Those)\b"
)
FRAGMENT = re.compile(r"#\s(of|that|those)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_docstrings_open_with_their_subject():
    found = []
    for path in CODE:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, WITH_DOCSTRING)]
        found += [f"{name_of(path)}: {text.splitlines()[0]}" for text in texts if BAD_OPENING.match(text)]
    assert found == []


def test_comments_open_with_their_subject():
    """A comment of several lines may have such a word at the beginning of a later line."""
    found, before = [], ""
    for path in CODE:
        for line in path.read_text(encoding="utf-8").splitlines():
            is_later_line = before.strip().startswith("#") and line.strip().startswith("#")
            if FRAGMENT.search(line) and not is_later_line and path.is_relative_to(ROOT / "minipar"):
                found.append(f"{name_of(path)}: {line.strip()}")
            before = line
    assert found == []


def test_a_file_has_at_most_400_lines():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in CODE + TESTS}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_names_of_tests_are_short():
    found = [re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE) for path in TESTS]
    assert [name for names in found for name in names if len(name) > 60] == []


def test_files_of_tests_open_with_what_they_claim():
    assert [name_of(path) for path in TESTS if not path.read_text(encoding="utf-8").startswith('"""')] == []
