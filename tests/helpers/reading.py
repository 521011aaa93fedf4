"""A chapter as its reader meets it: sections with their marks and words, and lines between two pictures.

Everything is read from the notebook: its markdown, and the outputs of its cells.
"""

import re
from dataclasses import dataclass

PICTURES = {"image/png", "image/svg+xml"}
MARK = re.compile(r"^\*(Core|Deeper)[,.]", re.MULTILINE)  # often with the minutes that it takes
HEADING = re.compile(r"^(?=#{1,3} )", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """A heading with the text below it, up to the next heading. `mark` is "Core", "Deeper" or None."""

    title: str
    mark: str | None
    words: int


def sections(notebook):
    """List the sections of a notebook. The first screens, below the title, are core.

    A section of level 2 has its own mark or none. One of level 3 has its own, or that of the section around it.
    """
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    found, around = [], None
    for part in HEADING.split("\n".join(texts)):
        if not part.strip():
            continue
        title = part.splitlines()[0]
        match = MARK.search(part)
        mark = match[1] if match else None
        if title.startswith("# "):
            mark = "Core"
        elif title.startswith("## "):
            around = mark
        elif mark is None:
            mark = around
        found.append(Section(title, mark, len(part.split())))
    return found


def core_words(notebook):
    """Count the words of a notebook's core sections. Code and outputs do not count."""
    return sum(section.words for section in sections(notebook) if section.mark == "Core")


def lines_of(text):
    return [line for line in text.splitlines() if line.strip()]


def stretches(notebook):
    """List the numbers of rendered lines before the first picture, between two pictures, and after the last one.

    A rendered line is a line of markdown's source that is not blank, or a line of a text output that is not blank. Code
    cells do not count, and neither do listings of source text, which are outputs in HTML. A picture is an output, or a
    line of markdown that includes a file.
    """
    counts = [0]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in lines_of(cell.source):
                if line.startswith("!["):
                    counts.append(0)
                else:
                    counts[-1] += 1
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if PICTURES & set(data):
                counts.append(0)
            elif "text/html" not in data:
                counts[-1] += len(lines_of(output.get("text", "") or data.get("text/plain", "")))
    return counts
