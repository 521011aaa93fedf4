"""Drawing mutants: every mistake that the operators can put into the code, some of them at random, and their places."""

import difflib
import random
from collections.abc import Sequence
from functools import cache

from mutants.operators import Change, changes, is_other_code
from mutation import ROOT


@cache
def source(file: str) -> str:
    """Return the text of a file below the root."""
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def every_change(file: str) -> list[Change]:
    """Return every mistake that the operators can put into a file below the root."""
    return changes(file, source(file))


def code() -> list[str]:
    """Return the files that are changed."""
    paths = [path for package in ("minipar", "visualize") for path in (ROOT / package).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def draw(files: Sequence[str], seed: int, count: int) -> list[Change]:
    """Draw mutants from all that the operators can make of these files. A seed draws the same ones of the same code."""
    every = [change for file in files for change in every_change(file)]
    random.Random(seed).shuffle(every)
    drawn = []
    for change in every:
        if len(drawn) < count and is_other_code(change, source(change.file)):
            drawn.append(change)
    return drawn


def package(file: str) -> str:
    """Return the package that a file belongs to; the files directly in minipar are one."""
    parts = file.split("/")
    if parts[0] == "minipar" and len(parts) > 2:
        return parts[1]
    return parts[0]


def line_number(change: Change) -> int:
    """Return the line in which a mistake begins."""
    return source(change.file)[: change.start].count("\n") + 1


def difference(change: Change) -> list[str]:
    """Return the lines that a mistake takes out and puts in, each after its sign and without its indent."""
    before = source(change.file)
    lines = difflib.unified_diff(before.splitlines(), change.apply(before).splitlines(), n=0, lineterm="")
    changed = [line for line in list(lines)[2:] if not line.startswith("@@")]
    return [f"{line[0]} {line[1:].strip()}" for line in changed]
