"""A schedule in two written forms: with its messages, and as PyTorch's CSV.

`lower` adds a SEND and a RECV for each result that another rank needs. It takes them in the order of a simulation, the
SEND and its RECV at the same moment. Such lists cannot deadlock even if sends block: both ranks of the earliest message
that is not sent yet come to it. `save_csv` and `load_csv` exchange schedules with PyTorch.
"""

import csv
import re
from pathlib import Path

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule, parse_action
from minipar.parallel.pipeline.simulate import Durations, simulate

_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def message_of(schedule: Schedule, need: Action, user: Action) -> tuple[Action, Action] | None:
    """Return the (SEND, RECV) that carries the result of `need` to `user`, or None if both are on one rank."""
    if schedule.home[need.stage] == schedule.home[user.stage]:
        return None
    direction = "F" if user.kind == "F" else "B"
    send = Action(need.stage, f"SEND_{direction}", need.microbatch)
    return send, Action(user.stage, f"RECV_{direction}", user.microbatch)


def lower(schedule: Schedule) -> Schedule:
    """Return the schedule with its messages; one that has messages already is returned as it is."""
    if any(not action.computes for _, action in schedule):
        return schedule
    users: dict[Action, list[Action]] = {}
    for _, action in schedule:
        for need in schedule.needs(action):
            users.setdefault(need, []).append(action)
    # (time, is_start, rank, action): at one time the messages of what has ended come before what starts.
    slots = [(rank, slot) for rank, row in enumerate(simulate(schedule).ranks) for slot in row]
    events = [(slot.start, 1, rank, slot.action) for rank, slot in slots]
    events += [(slot.end, 0, rank, slot.action) for rank, slot in slots]
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, is_start, rank, action in sorted(events):
        if is_start:
            lists[rank].append(action)
            continue
        for user in users.get(action, []):
            message = message_of(schedule, action, user)
            if message is not None:
                lists[rank].append(message[0])
                lists[schedule.home[user.stage]].append(message[1])
    return Schedule.of(schedule.name, lists)


def save_csv(schedule: Schedule, path: str | Path) -> None:
    """Write PyTorch's format: a row for each rank, a cell for each time step, an empty cell where the rank is idle.

    Computations take one step each. Messages take none; a schedule that has them is written without empty cells.
    """
    if any(not action.computes for _, action in schedule):
        rows = [[str(action) for action in actions] for actions in schedule.ranks]
    else:
        # An action is one cell, also B where no backward is split: F and B then take two units of time each.
        unit = 1 if schedule.splits_backward else 2
        rows = []
        for row in simulate(schedule, Durations(unit, 1, 1)).ranks:
            cells: list[str] = []
            for slot in row:
                cells += [""] * (int(slot.start) // unit - len(cells)) + [str(slot.action)]
            rows.append(cells)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def load_csv(path: str | Path) -> Schedule:
    """Read PyTorch's format, but not FSDP's actions in it. UsageError names the file, or rank and cell."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # -sig: as spreadsheets save it
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"schedule {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    while rows and not rows[-1]:
        rows.pop()  # blank lines at the end
    lists = [
        [
            parse_action(cell, f"schedule {path}, rank {rank}, cell {i + 1}: ")
            for i, cell in enumerate(row)
            if cell.strip() and not _FSDP.fullmatch(cell.strip())
        ]
        for rank, row in enumerate(rows)
    ]
    if not any(lists):
        raise UsageError(f"schedule {path} holds no actions")
    return Schedule.of(Path(path).stem, lists)
