"""The core path: what each chapter's core sections hold, and whether they can be read without the deeper ones.

`python -m chapters.support.core_path` writes the minutes of chapters/README.md and of the site's start page anew, and
prints what is wrong in the chapters.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chapters.support.fold import with_headings_alone

CHAPTERS = Path(__file__).parents[1]
PAGES = (CHAPTERS / "README.md", CHAPTERS.parent / "docs" / "site" / "start.md")
LONGEST_CELL = 40  # lines that are not blank
MOST_WORDS = 2800  # of a chapter's core
FEWEST_WORDS = 1800  # of a chapter, which is a session of about an hour; those of more/ may be short
HEADING = re.compile(r"(#+) .*\n+(?:\*(Core|Deeper)(?:, (\d+) minutes?)?\b.*\*\n)?")


@dataclass
class Cell:
    """A cell of a script. `level` is that of a heading's cell, else 0; `minutes` are those that its mark states."""

    line: int
    text: str
    markdown: bool
    core: bool
    level: int = 0
    minutes: int = 0


def scripts() -> list[Path]:
    """Return the chapters' scripts, in order."""
    return sorted(CHAPTERS.glob("[0-9]*.py"))


def all_scripts() -> list[Path]:
    """Return the chapters' scripts, then those of more/, in which is what would interrupt a chapter."""
    return [*scripts(), *sorted((CHAPTERS / "more").glob("[a-z]*.py"))]


def cells(path: Path) -> Iterator[Cell]:
    """Yield the cells that are in a script. A heading without a mark belongs to what is around it."""
    marks = {0: "Core"}  # of the headings around a cell, by level
    line = 1
    script = with_headings_alone(path.read_text(encoding="utf-8"))
    for part in re.split(r"^(?=# %%)", script, flags=re.MULTILINE):
        head, _, body = part.partition("\n")
        cell = Cell(line, body, head.startswith("# %% [markdown]"), core=True)
        line += part.count("\n")
        if not head.startswith("# %%") or "active-ipynb" in head:
            continue
        if cell.markdown:
            cell.text = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        if cell.markdown and (heading := HEADING.match(cell.text)):
            cell.level, cell.minutes = len(heading[1]), int(heading[3] or 0)
            marks = {level: mark for level, mark in marks.items() if level < cell.level}
            marks[cell.level] = heading[2] or marks[max(marks)]
        cell.core = "Deeper" not in marks.values()
        yield cell


def sizes(path: Path) -> tuple[int, int, int]:
    """Return the minutes of a chapter's core sections, those of its deeper ones, and the words of the core."""
    found = list(cells(path))
    core, deeper = (sum(cell.minutes for cell in found if cell.core is kind) for kind in (True, False))
    return core, deeper, sum(len(cell.text.split()) for cell in found if cell.core and cell.markdown)


def faults(path: Path) -> list[str]:
    """List what is wrong in a script: headings that do not fold, a core that is too short or too long, and cells."""
    script = path.read_text(encoding="utf-8")
    found = []
    if with_headings_alone(script) != script:
        found.append(f"{path.name}: run python -m chapters.support.fold {path.relative_to(CHAPTERS.parent)}")
    words = sizes(path)[2]
    fewest = FEWEST_WORDS if path in scripts() else 0
    if not fewest <= words <= MOST_WORDS:
        found.append(f"{path.name}: {words} words in the core, not {fewest} to {MOST_WORDS}")
    return found + faults_of_cells(path)


def faults_of_cells(path: Path) -> list[str]:
    """List cells of code that are too long, and core cells that need a name which only a deeper cell defines."""
    known, deeper, found = set(dir(builtins)), {}, []
    for cell in cells(path):
        if cell.markdown:
            continue
        length = sum(bool(line.strip()) for line in cell.text.splitlines())
        if length > LONGEST_CELL:
            found.append(f"{path.name}:{cell.line}: a cell of {length} lines")
        bound, used = _names(cell.text)
        if not cell.core:
            deeper |= dict.fromkeys(bound - deeper.keys(), cell.line)
            continue
        for name in sorted((used - bound - known) & deeper.keys()):
            found.append(f"{path.name}:{cell.line}: needs {name} of the deeper cell in line {deeper[name]}")
        known |= bound
    return found


def _names(code: str) -> tuple[set[str], set[str]]:
    """Return the names that a cell binds, anywhere in it, and those that it uses."""
    bound, used = set(), set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.alias():
                bound.add((node.asname or node.name).split(".")[0])
            case ast.arg():
                bound.add(node.arg)
            case ast.Name():
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
    return bound, used


def number(path: Path) -> str:
    """Return a chapter's number, such as "0" or "6b"."""
    return path.name.split("_")[0].removeprefix("0")


def table() -> str:
    """Return the table of the chapters' minutes and words."""
    rows = ["| chapter | core, minutes | deeper, minutes | words of the core |", "| --- | ---: | ---: | ---: |"]
    for path in scripts():
        title = re.search(r"^# # (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)[1]
        core, deeper, words = sizes(path)
        rows.append(f"| [{title}]({path.stem}.ipynb) | {core} | {deeper} | {round(words, -2):,} |")
    return "\n".join(rows)


def renewed(page: str) -> str:
    """Return a page with the minutes and hours of the core that it states, and the table, as the chapters have them."""
    core = {number(path): sizes(path)[0] for path in scripts()}

    def hours(found: re.Match[str]) -> str:
        chapters = [each for each in core if int(found[2]) <= int(each.removesuffix("b")) <= int(found[3])]
        return f"{found[1]}{round(sum(core[each] for each in chapters) / 60)} hours"

    page = re.sub(r"(core of \[chapter (\w+)\]\(\S+\), )\d+", lambda found: found[1] + str(core[found[2]]), page)
    page = re.sub(r"(core of chapters (\d+) to (\d+), )\d+ hours", hours, page)
    return re.sub(r"^\| chapter \| core.*?(?=\n\n)", table(), page, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(*(fault for path in scripts() for fault in faults(path)), sep="\n")
