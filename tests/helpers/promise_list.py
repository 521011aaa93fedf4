"""The promises of docstrings in minipar/, and the list in tests/promises that says which test checks each.

A line of the list is `path:qualified name | the sentence or its beginning | test, test`, where a test is
`tests/file.py::name`, or MISSING, or DESCRIPTION for a sentence that promises nothing of minipar. Run as a program,
this file prints a line for each promise that is not listed. Sentences of documents are in a list of their own,
documents.txt: `docs/FILE.md | the sentence or its beginning | test, test`. Nothing says which of them are missing.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / "tests" / "promises"
OF_DOCUMENTS = LISTS / "documents.txt"
MISSING = "MISSING"
DESCRIPTION = "DESCRIPTION"
LONGEST = 120  # characters of a sentence in the list
# Words with which a sentence promises an error, an order, a limit, or what holds in every case.
PROMISE = re.compile(
    r"\b(?:[A-Z]\w*Error|CommunicationError)\b"
    r"|\b(?:[Nn]ever|[Aa]lways|at most|restores?|refuses?|refused|in the order|same bits|bit for bit)\b"
    r"|\bat least\b"
    r"|\beven (?:if|in|inside|when|after|where|while|without|over)\b"
    r"|(?:\bexactly|\bonly|\beach|\bis \w+|\)`|\bevery \w+|,) once\b(?! (?:it|the|more))"
    r"|\b(?:sends?|changes?|adds?|does|draws?|writes?|prints?|gets|receives?) nothing\b|\bnothing (?:but|else)\b"
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Promise:
    """One sentence of the docstring of `name`, which is `path:qualified name`."""

    name: str
    sentence: str


@dataclass(frozen=True)
class Entry:
    """One line of the list."""

    name: str
    beginning: str
    tests: tuple[str, ...]

    def is_of(self, promise: Promise) -> bool:
        """Say whether this line is about a promise."""
        return self.name == promise.name and promise.sentence.startswith(self.beginning)


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring, each on one line.

    A paragraph ends a sentence too, and so does the next row of a table, which has two spaces after its name.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=[ ]*\S+(?:, \S+)*[ ]{2,}\S)", text):
        line = " ".join(paragraph.split())
        found += re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])", line)
    return [sentence for sentence in found if sentence]


def docstrings(tree: ast.AST, above: str = "") -> list[tuple[str, str]]:
    """Return the docstring of a module and of all that it defines, each with its qualified name."""
    found = []
    if isinstance(tree, DOCUMENTED) and ast.get_docstring(tree):
        found.append((above, ast.get_docstring(tree)))
    for child in ast.iter_child_nodes(tree):
        name = above
        if isinstance(child, DOCUMENTED):
            name = f"{above}.{child.name}".lstrip(".")
        found += docstrings(child, name)
    return found


def promises_of(path: str, source: str) -> list[Promise]:
    """Return the sentences of a file's docstrings that promise something."""
    found = []
    for name, text in docstrings(ast.parse(source)):
        for sentence in sentences(text):
            if PROMISE.search(sentence):
                found.append(Promise(f"{path}:{name}", sentence))
    return found


def promises() -> list[Promise]:
    """Return every promise of a docstring in minipar/."""
    found = []
    for path in sorted((ROOT / "minipar").rglob("*.py")):
        found += promises_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    return found


def entries() -> list[Entry]:
    """Return all lines of the list about docstrings."""
    found = []
    for path in sorted(LISTS.glob("*.txt")):
        if path != OF_DOCUMENTS:
            found += entries_of(path)
    return found


def entries_of(path: Path) -> list[Entry]:
    """Return the lines of one file of the list."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [entry(line) for line in lines if line and not line.startswith("#")]


def promises_of_document(name: str, text: str) -> list[Promise]:
    """Return every sentence of a document; a point of a list and a row of a table begin a paragraph."""
    text = re.sub(r"^\s*(?:-|\d+\.|\|)\s+", "\n\n", text, flags=re.MULTILINE)
    return [Promise(name, sentence) for sentence in sentences(text)]


def entry(line: str) -> Entry:
    """Read one line of the list. ValueError if it has not three parts."""
    parts = [part.strip() for part in line.split(" | ")]
    if len(parts) != 3:
        raise ValueError(f"expected `path:name | sentence | test`: {line}")
    return Entry(parts[0], parts[1], tuple(test.strip() for test in parts[2].split(", ")))


def line_of(promise: Promise, tests: str = MISSING) -> str:
    """Return a promise as a line of the list, a long sentence cut after a word."""
    beginning = promise.sentence
    if len(beginning) > LONGEST:
        beginning = beginning[:LONGEST].rpartition(" ")[0]
    return f"{promise.name} | {beginning} | {tests}"


def list_of(promise: Promise) -> Path:
    """Return the file of the list to which a promise belongs: one for each package."""
    parts = promise.name.partition(":")[0].split("/")
    return LISTS / f"{parts[1] if len(parts) > 2 else parts[0]}.txt"


def unlisted() -> list[Promise]:
    """Return the promises that the list does not have."""
    every = entries()
    return [promise for promise in promises() if not any(each.is_of(promise) for each in every)]


def names_of_tests() -> set[str]:
    """Return every test as `tests/file.py::name`, a method of a class as `tests/file.py::Class::name`."""
    names = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(ROOT).as_posix()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names.add(f"{file}::{node.name}")
    return names


if __name__ == "__main__":
    for promise in unlisted():
        print(line_of(promise))
