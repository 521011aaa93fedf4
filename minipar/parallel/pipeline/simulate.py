"""The simulator: the time that a schedule takes, from the durations of its actions, predicted or measured.

Each rank runs its list in order. An action begins when its rank is free and the results it needs have arrived. A result
arrives on another rank `comm` after it is made, at no cost to either. With Fractions as durations, bubbles are exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule

Time = int | float | Fraction


@dataclass(frozen=True)
class Durations:
    """The time of one action of one stage; B takes I + W. If stages differ, `table` has it by (stage, kind) instead."""

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    comm: Time = 0
    table: Mapping[tuple[int, str], Time] | None = None

    def __post_init__(self) -> None:
        for value in (self.forward, self.backward_input, self.backward_weight, self.comm):
            if not value >= 0:
                raise UsageError(f"a duration of {value}: an action takes 0 or more")

    def of(self, action: Action) -> Time:
        if self.table is not None:
            return self.table[action.stage, action.kind]
        both = self.backward_input + self.backward_weight
        return {"F": self.forward, "B": both, "I": self.backward_input, "W": self.backward_weight}[action.kind]


@dataclass(frozen=True)
class Slot:
    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """A schedule with times; `ranks[r]` are the computations of rank r in order."""

    schedule: Schedule
    ranks: tuple[tuple[Slot, ...], ...]

    @cached_property
    def makespan(self) -> Time:
        return max((slot.end for slots in self.ranks for slot in slots), default=0)

    @property
    def bubble_fraction(self) -> Time:
        """Idle / total, over all ranks from the first action to the last."""
        busy = sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        total = self.makespan * len(self.ranks)
        return _ratio(total - busy, total)

    @property
    def bubble_rate(self) -> Time:
        """Idle / cost (first action to last) of the rank with the largest cost: arXiv 2401.10241, section 5.3."""
        slots = max((row for row in self.ranks if row), key=lambda row: row[-1].end - row[0].start)
        cost = slots[-1].end - slots[0].start
        return _ratio(cost - sum(slot.end - slot.start for slot in slots), cost)

    @property
    def peak_activations(self) -> list[int]:
        """The most forwards (of one stage) without their backward, for each rank."""
        return [peak_live(actions) for actions in self.schedule.ranks]


def _ratio(a: Time, b: Time) -> Time:
    if b == 0:
        return 0
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a, b)


def simulate(schedule: Schedule, durations: Durations = Durations()) -> Timeline:
    """Run the schedule's computations. If ranks wait for one another, UsageError names the next action of each."""
    lists = [[action for action in actions if action.computes] for actions in schedule.ranks]
    ends: dict[Action, Time] = {}
    slots: list[list[Slot]] = [[] for _ in lists]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            while len(slots[rank]) < len(actions):
                action = actions[len(slots[rank])]
                needs = schedule.needs(action)
                if any(need not in ends for need in needs):
                    break
                free = slots[rank][-1].end if slots[rank] else 0
                arrivals = [ends[n] + (durations.comm if schedule.home[n.stage] != rank else 0) for n in needs]
                start = max([free, *arrivals])
                ends[action] = start + durations.of(action)
                slots[rank].append(Slot(action, start, ends[action]))
                progress = True
    waiting = []
    for rank, (actions, row) in enumerate(zip(lists, slots, strict=True)):
        if len(row) < len(actions):
            missing = [str(need) for need in schedule.needs(actions[len(row)]) if need not in ends]
            waiting.append(f"rank {rank} before {actions[len(row)]}, which needs {', '.join(missing)}")
    if waiting:
        raise UsageError(f"schedule {schedule.name} never ends: {'; '.join(waiting)}")
    return Timeline(schedule, tuple(tuple(row) for row in slots))


def peak_live(actions: Sequence[Action], made_by: Sequence[str] = ("F",), freed_by: Sequence[str] = ("B", "I")) -> int:
    """Return the most activations alive at once in one rank's list: from the start of F to the end of B or I."""
    live = peak = 0
    for action in actions:
        live += action.kind in made_by
        peak = max(peak, live)
        live -= action.kind in freed_by
    return peak
