"""The map from a line of the code to the tests that execute it, measured when it is needed and kept in out/mutants.

The map has one file for each file of tests, and is measured again when that changes. When the code changes, lines are
found again in the new text by their content; a new line is taken to be executed by the tests of those around it. The
choice of tests is all that depends on the map, so what it lacks can make a survivor, and never hides one.
"""

import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import coverage
from mutants.judge import WITHOUT_PLUGINS
from mutants.record_lines import FOLDER
from mutation import ROOT, environment

KEPT = ROOT / "out" / "mutants"
MEASURED_CODE = KEPT / "code"  # the texts of the files that were measured, named by their digests
# These compare the code's text, or measure it: they notice that it has changed, and not what it does.
READ_TEXT = ("tests/chapters/test_stored_listings.py", "tests/test_measures.py", "tests/test_style.py")
# One for each file of tests: mutants are judged at the same time, and may need the same file's lines.
LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
PYTEST = [sys.executable, *"-m pytest -q --tb=short -p no:cacheprovider -p mutants.record_lines".split()]


@dataclass(frozen=True)
class MeasuredTest:
    """A test's name, how many seconds it takes, and the lines that it executes, as a set of bits for each file."""

    name: str
    seconds: float
    lines: dict[str, int]

    def executes(self, file: str, numbers: Sequence[int]) -> bool:
        """Say whether the test executes one of these lines."""
        bits = self.lines.get(file, 0)
        return any(bits >> number & 1 for number in numbers)


@cache
def digest(file: str) -> str:
    """Return the digest of a file below the root; the empty string for none."""
    path = ROOT / file
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def files_of_tests() -> list[str]:
    """Return the files of tests that `make test` runs, without those that read the code as text."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if not file.startswith("tests/reference/") and file not in READ_TEXT]


def tests_that_execute(files: Sequence[str]) -> list[MeasuredTest]:
    """Return all tests of these files with their lines, the quickest first. Measure what is not known."""
    tests = []
    for file in files:
        with LOCKS[file]:
            tests += tests_of(file)
    return sorted(tests, key=lambda test: test.seconds)


@cache
def tests_of(file: str) -> list[MeasuredTest]:
    """Return the tests of a file with their lines."""
    kept = KEPT / (file.replace("/", ".") + ".json")
    if not is_true_still(kept, file):
        print(f"measuring the lines that {file} executes", flush=True)
        MEASURED_CODE.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(measured(file)), encoding="utf-8")
    found = json.loads(kept.read_text(encoding="utf-8"))
    tests = []
    for name, (seconds, lines) in found["tests"].items():
        now = {path: lines_now(int(bits, 16), path, found["digests"][path]) for path, bits in lines.items()}
        tests.append(MeasuredTest(name, seconds, now))
    return tests


def is_true_still(kept: Path, file: str) -> bool:
    """Say whether what was measured is of the file of tests as it is."""
    return kept.exists() and json.loads(kept.read_text(encoding="utf-8"))["digests"][file] == digest(file)


def lines_now(bits: int, path: str, then: str) -> int:
    """Return where the lines of a file, measured when its digest was `then`, are today."""
    if then == digest(path):
        return bits
    moves = moves_of_lines(path, then)
    now = 0
    for number, places in enumerate(moves):
        if bits >> number & 1:
            now |= places
    return now


@cache
def moves_of_lines(path: str, then: str) -> list[int]:
    """Return the places today of each line of the file whose digest was `then`, as sets of bits."""
    file = ROOT / path
    old = (MEASURED_CODE / then).read_text(encoding="utf-8").splitlines()
    new = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return moves(old, new)


def moves(old: Sequence[str], new: Sequence[str]) -> list[int]:
    """Return where in `new` the lines of `old` are, as sets of bits; lines count from 1.

    One that was replaced is at all lines of what replaced it. Lines that were put in belong to those on both sides.
    """
    places = [0] * (len(old) + 2)
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        all_new = sum(1 << number for number in range(new_start + 1, new_end + 1))
        if kind == "equal":
            for i in range(end - start):
                places[start + 1 + i] |= 1 << new_start + 1 + i
        else:
            around = range(start, end + 2) if kind == "insert" else range(start + 1, end + 1)
            for number in around:
                places[number] |= all_new
    return places[: len(old) + 1]


def measured(file: str) -> dict:
    """Run a file of tests under coverage.py; return each test's seconds and lines, and the digests of all files."""
    with tempfile.TemporaryDirectory(prefix="minipar-lines-") as folder:
        variables = environment(ROOT) | WITHOUT_PLUGINS | {FOLDER: folder}
        done = subprocess.run([*PYTEST, file], cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode not in (0, 5):  # 5: it has no test that `make test` runs
            print(f"{file} fails while it is measured:\n{done.stdout[-2000:]}", file=sys.stderr)
        seconds = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
        lines = lines_of_tests(Path(folder))
    tests = {name: (seconds[name], lines.get(name, {})) for name in seconds}
    executed = {path for of_test in lines.values() for path in of_test}
    for path in executed:
        (MEASURED_CODE / digest(path)).write_bytes((ROOT / path).read_bytes())
    return {"digests": {path: digest(path) for path in sorted({file, *executed})}, "tests": tests}


def lines_of_tests(folder: Path) -> dict[str, dict[str, str]]:
    """Read what coverage.py has left in a folder: for each test and file the executed lines, as hexadecimal bits."""
    found = coverage.Coverage(data_file=str(folder / "all"), config_file=False)
    found.combine([str(path) for path in folder.glob(".coverage*")])
    data = found.get_data()
    lines: dict[str, dict[str, int]] = {}
    for path in data.measured_files():
        file = os.path.relpath(path, ROOT)
        for number, names in data.contexts_by_lineno(path).items():
            for name in names:
                of_test = lines.setdefault(name, {})
                of_test[file] = of_test.get(file, 0) | 1 << number
    return {name: {file: f"{bits:x}" for file, bits in of_test.items()} for name, of_test in lines.items()}
