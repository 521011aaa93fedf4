"""Schedules in files: PyTorch's CSV, which its own pipelines and ours can run."""

import csv
import re
from pathlib import Path

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, Schedule, parse_action, simulate

_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def splits_backward(schedule: Schedule) -> bool:
    """Return whether a backward is computed in two parts, I and W."""
    return any(action.kind == "W" for _, action in schedule)


def save_csv(schedule: Schedule, path: str | Path) -> None:
    """Write PyTorch's format: a row for each rank, a cell for each time step.

    A cell is empty where the rank is idle. Computations take one step each. Messages take none; a
    schedule that has them is written without empty cells.
    """
    if all(action.computes for _, action in schedule):
        rows = _cells(schedule)
    else:
        rows = [[str(action) for action in actions] for actions in schedule.ranks]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _cells(schedule: Schedule) -> list[list[str]]:
    """Return a row of cells for each rank, one cell for each time step."""
    # B is one cell too where no backward is split: F and B then take two units of time each.
    unit = 1 if splits_backward(schedule) else 2
    rows = []
    for slots in simulate(schedule, Durations(unit, 1, 1)).ranks:
        row: list[str] = []
        for slot in slots:
            idle = int(slot.start) // unit - len(row)
            row += [""] * idle
            row.append(str(slot.action))
        rows.append(row)
    return rows


def load_csv(path: str | Path) -> Schedule:
    """Read PyTorch's format, but not FSDP's actions in it.

    UsageError names the file, or rank and cell.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # -sig: as spreadsheets save it
            rows = list(csv.reader(file))
    except OSError as error:
        raise UsageError(f"schedule {path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"schedule {path} cannot be read: {error}") from None
    while rows and not rows[-1]:
        rows.pop()  # blank lines at the end
    lists = []
    for rank, row in enumerate(rows):
        actions = []
        for i, cell in enumerate(row):
            if cell.strip() and not _FSDP.fullmatch(cell.strip()):
                where = f"schedule {path}, rank {rank}, cell {i + 1}: "
                actions.append(parse_action(cell, where))
        lists.append(actions)
    if not any(lists):
        raise UsageError(f"schedule {path} holds no actions")
    return Schedule.of(Path(path).stem, lists)
