"""Claims about style that a program can check: plain docstrings, few and short files, short names of tests."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = sorted(path for package in ("minipar", "visualize") for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

MOST_LINES = 400  # of one file
LONGEST_NAME = 60  # of a test

# A docstring's first sentence has its subject or its verb first.
BAD_OPENING = re.compile(
    r"(What|Which|Who|Whose|Where|When|How|If|Of|In|On|For|With|By|Into|From|To|At|After|Before|Until|While|As"
    r"|That|Those)\b"
)


def docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for text in texts if text]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_docstring_opens_with_a_clause_or_a_preposition():
    found = {}
    for path in CODE:
        texts = docstrings(path.read_text(encoding="utf-8"))
        bad = [text.splitlines()[0] for text in texts if BAD_OPENING.match(text)]
        if bad:
            found[name(path)] = bad
    assert found == {}


def test_a_file_has_at_most_400_lines():
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in CODE}
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}


def test_names_of_tests_are_short():
    texts = [path.read_text(encoding="utf-8") for path in TESTS]
    names = [each for text in texts for each in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)]
    assert len(names) > 1000 and [each for each in names if len(each) > LONGEST_NAME] == []


def test_folders_of_tests_mirror_the_code():
    """A folder of tests is named as a folder of the code. Three hold tests of the whole."""
    whole = {"fuzz", "museum", "reference"}
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in TESTS} - {"."} - whole
    places = (ROOT, ROOT / "minipar", ROOT / "chapters")
    assert [folder for folder in sorted(folders) if not any((place / folder).is_dir() for place in places)] == []


def test_a_bad_opening_is_seen():
    source = '"""What is printed of it."""\ndef f():\n    """In short."""\ndef g():\n    """Install it."""'
    assert [bool(BAD_OPENING.match(text)) for text in docstrings(source)] == [True, True, False]


# A comment that begins so has left its subject out.
FRAGMENT = re.compile(r"#\s(of|that|those)\b")


def test_no_comment_begins_with_of_that_or_those():
    """A comment of several lines may have such a word at the beginning of a later line."""
    found = []
    for path in CODE:
        if path.is_relative_to(ROOT / "minipar"):
            before = ""
            for line in path.read_text(encoding="utf-8").splitlines():
                is_later_line = before.strip().startswith("#") and line.strip().startswith("#")
                if FRAGMENT.search(line) and not is_later_line:
                    found.append(f"{name(path)}: {line.strip()}")
                before = line
    assert found == []
