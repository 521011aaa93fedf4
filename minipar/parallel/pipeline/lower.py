"""The messages of a schedule, and PyTorch's CSV.

`lower` adds SEND and RECV where a result is needed on another rank. Taken in the order of a simulation, each send with
its receive at one moment, they can never deadlock: of all messages not yet sent, both sides of the earliest come to it.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule, parse_action
from minipar.parallel.pipeline.simulate import Durations, simulate

_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def message_of(schedule: Schedule, need: Action, user: Action) -> tuple[Action, Action] | None:
    """The (SEND, RECV) that carries the result of `need` to `user`; None when both are on one rank."""
    if schedule.home[need.stage] == schedule.home[user.stage]:
        return None
    way = "F" if user.kind == "F" else "B"
    return Action(need.stage, f"SEND_{way}", need.microbatch), Action(user.stage, f"RECV_{way}", user.microbatch)


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its messages: a SEND once the result is there, its RECV on the other rank at the same moment.

    A schedule that has messages already is returned as it is.
    """
    if any(not action.computes for _, action in schedule):
        return schedule
    timeline = simulate(schedule)
    users: dict[Action, list[Action]] = {}
    for _, action in schedule:
        for need in schedule.needs(action):
            users.setdefault(need, []).append(action)
    # Messages at the end of what makes them, and before a computation that begins then.
    events = [(slot.start, 1, rank, slot.action) for rank, row in enumerate(timeline.ranks) for slot in row]
    events += [(slot.end, 0, rank, slot.action) for rank, row in enumerate(timeline.ranks) for slot in row]
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, begins, rank, action in sorted(events):
        if begins:
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

    Computations take one step each. Messages, which take none, follow one another in cells of their own.
    """
    if any(not action.computes for _, action in schedule):
        rows = [[str(action) for action in actions] for actions in schedule.ranks]
    else:
        # Every action one step: B too, which is written in one cell.
        whole = Durations(1, 1, 1) if schedule.splits_backward else Durations(2, 1, 1)
        steps = 1 if schedule.splits_backward else 2
        rows = []
        for row in simulate(schedule, whole).ranks:
            cells: list[str] = []
            for slot in row:
                cells += [""] * (int(slot.start) // steps - len(cells)) + [str(slot.action)]
            rows.append(cells)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def load_csv(path: str | Path) -> Schedule:
    """Read PyTorch's format. UsageError names the rank and the cell of an unknown action, or the file.

    What FSDP does between a pipeline's actions (UNSHARD, RESHARD, REDUCE_GRAD) is left out: it is not the pipeline's.
    """
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
