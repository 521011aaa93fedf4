"""The matrix of docs/combinations.md, and the parsed flags of a cell."""

import re
from pathlib import Path

import training
from combinations import VOCAB

DOCUMENT = Path(__file__).parents[2] / "docs" / "combinations.md"
SHAPE = f"--layers 4 --hidden 20 --heads 4 --seq-len 8 --vocab-size {VOCAB} --global-batch 8 --steps 2 --eps 1e-5"


def config_for(flags: str):
    """Return the parsed flags of a cell; UsageError if it is refused."""
    return training.config_for(f"{SHAPE} --dtype float64 --reduction ordered {flags}")


def read_matrix() -> dict[tuple[str, str], str]:
    """Return {(flags of the row, flags of the column): cell} of the two tables under "The matrix"."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## The matrix")[2].partition("\n## ")[0]
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        rows = [line.strip("|").split("|") for line in block.splitlines()]
        tables.append([[cell.strip() for cell in row] for row in rows])
    columns, (head, _, *rows) = tables
    flags = {name: flags_in(text) for name, text in columns[2:]}
    found = {}
    for name, *cells in rows:
        for column, cell in zip(head[1:], cells, strict=True):
            found[flags_in(name), flags[column]] = cell
    return found


def flags_in(text: str) -> str:
    return text.strip("`") if "`" in text else ""


MATRIX = read_matrix()
