"""Where a benchmark's rows go: a table to read, and a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from minipar.comm import Communicator

Row = Mapping[str, Any]


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The columns of the rows, aligned."""
    cells = [list(columns)] + [[_text(row[column]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def publish(comm: Communicator, rows: Sequence[Row], columns: Sequence[str], path: str | None) -> None:
    """Collective. Rank 0 prints the table and writes the rows to `path`; with "-" the JSON alone goes to stdout."""
    error = None
    if comm.rank == 0:
        if path != "-":
            print(table(rows, columns), flush=True)
        try:
            if path == "-":
                json.dump(rows, sys.stdout, indent=1)
                print(flush=True)
            elif path is not None:
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(rows, file, indent=1)
        except OSError as problem:
            error = f"--json {path}: {problem.strerror}"
    comm.agree(error)
