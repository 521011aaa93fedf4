"""The museum's exhibits, read from docs/museum.md: what the document shows is what the tests plant and expect."""

import re
from dataclasses import dataclass
from functools import cache

from mutation import ROOT, Mutation

DOCUMENT = ROOT / "docs" / "museum.md"
INSTRUMENTS = ("loss", "norm", "compare", "ranks", "verify", "bytes", "memory", "schedule")
CELLS = {"yes": True, "": False, "–": None}  # an instrument detects the mistake, misses it, or has nothing to look at

SECTION = re.compile(r"^### Exhibit (\d+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"\*\*(.*?)\.\*\*", re.DOTALL)
THREAD = re.compile(r"\]\((https://github\.com/[\w./-]+/(?:pull|issues)/\d+)\)")
FLAGS = re.compile(r"`(--.*?)`")
DIFF = re.compile(r"^```diff\n([\w/.]+)\n- (.*)\n\+ (.*)\n```$", re.MULTILINE)


@dataclass(frozen=True)
class Exhibit:
    """A mistake: its thread, its mutation, the flags of a run, and what the tables say of it.

    `cells` has for each instrument what it says, and `found` is the row of the table of `compare`.
    """

    number: int
    thread: str
    flags: str
    mutation: Mutation
    cells: dict[str, bool | None]
    found: dict[str, str]


def table(text: str, first_columns: tuple[str, str]) -> dict[int, dict[str, str]]:
    """Read the markdown table that begins with these two columns: its rows, by exhibit, each a dict by column."""
    lines = text.splitlines()
    (start,) = (i for i, line in enumerate(lines) if cells(line)[:2] == list(first_columns))
    titles, rows = cells(lines[start]), {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        row = dict(zip(titles, cells(line), strict=True))
        (number, target) = re.fullmatch(r"\[(\d+)\]\(#exhibit-(\d+)\)", row["exhibit"]).groups()
        assert number == target
        rows[int(number)] = row
    return rows


def cells(line: str) -> list[str]:
    """Return the cells of a table's row."""
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" | ")]


@cache
def exhibits() -> tuple[Exhibit, ...]:
    """Read the document: a section for each exhibit, and its rows in the two tables."""
    text = DOCUMENT.read_text(encoding="utf-8")
    instruments, compare = table(text, ("exhibit", "mistake")), table(text, ("exhibit", "step"))
    found = []
    for number, body in ((int(number), body) for number, body in SECTION.findall(text)):
        title = " ".join(TITLE.search(body)[1].split())
        assert title == instruments[number]["mistake"], f"exhibit {number} has two titles"
        ((file, old, new),), (thread,) = DIFF.findall(body), THREAD.findall(body)
        says = {name: CELLS[instruments[number][name]] for name in INSTRUMENTS}
        mutation = Mutation(title, file, old, new)
        found.append(Exhibit(number, thread, FLAGS.search(body)[1], mutation, says, compare[number]))
    return tuple(found)
