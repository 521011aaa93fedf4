"""The simulator: how long a schedule takes, from the durations of its actions.

Each rank does its list in order; an action begins when the rank is free and what it needs has arrived. A result that
another rank needs arrives `comm` after it is made, and costs neither rank any time of its own. Durations may be
Fractions: then the bubble is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule

Time = int | float | Fraction


@dataclass(frozen=True)
class Durations:
    """Time of one action of one stage. `backward` is B's; by default that of its two halves."""

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    comm: Time = 0

    def __post_init__(self) -> None:
        for value in (self.forward, self.backward_input, self.backward_weight, self.comm):
            if not value >= 0:
                raise UsageError(f"a duration of {value}: an action takes 0 or more")

    def of(self, action: Action) -> Time:
        return {
            "F": self.forward,
            "I": self.backward_input,
            "W": self.backward_weight,
            "B": self.backward_input + self.backward_weight,
        }[action.kind]


@dataclass(frozen=True)
class Slot:
    """An action with its time."""

    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """What a simulation found; `ranks[r]` are the computations of rank r in order."""

    schedule: Schedule
    ranks: tuple[tuple[Slot, ...], ...]
    makespan: Time = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "makespan", max((slot.end for slots in self.ranks for slot in slots), default=0))

    @property
    def bubble_fraction(self) -> Time:
        """Idle / total, over all ranks from the first action to the last."""
        busy = sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        total = self.makespan * len(self.ranks)
        return _ratio(total - busy, total)

    @property
    def bubble_rate(self) -> Time:
        """Zero Bubble's (arXiv 2401.10241, section 5.3): idle / cost on the rank whose cost, the time from its own
        first action to its last, is the largest.
        """
        cost, slots = max(
            ((slots[-1].end - slots[0].start, slots) for slots in self.ranks if slots), key=lambda c: c[0]
        )
        return _ratio(cost - sum(slot.end - slot.start for slot in slots), cost)

    @property
    def peak_activations(self) -> list[int]:
        """For each rank the most forwards (of one stage) whose backward had not been done."""
        return [peak_live(actions) for actions in self.schedule.ranks]


def _ratio(a: Time, b: Time) -> Time:
    if b == 0:
        return 0
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a, b)


def peak_live(actions: Sequence[Action]) -> int:
    """The most activations alive at once in one rank's list: a forward's live until its B or I is done."""
    live = peak = 0
    for action in actions:
        if action.kind == "F":
            live += 1
        elif action.kind in ("B", "I"):
            live -= 1
        peak = max(peak, live)
    return peak


def simulate(schedule: Schedule, durations: Durations = Durations()) -> Timeline:
    """Run the schedule's computations. UsageError, with every rank's next action, if they wait for one another."""
    lists = [[action for action in actions if action.computes] for actions in schedule.ranks]
    ends: dict[Action, Time] = {}
    slots: list[list[Slot]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while len(slots[rank]) < len(actions):
                action = actions[len(slots[rank])]
                needs = schedule.needs(action)
                if any(need not in ends for need in needs):
                    break
                free = slots[rank][-1].end if slots[rank] else 0
                start = max(
                    [free, *(ends[n] + (durations.comm if schedule.home[n.stage] != rank else 0) for n in needs)]
                )
                ends[action] = start + durations.of(action)
                slots[rank].append(Slot(action, start, ends[action]))
                moved = True
    stuck = [
        f"rank {rank} before {actions[len(done)]}, which needs {', '.join(str(n) for n in missing)}"
        for rank, (actions, done) in enumerate(zip(lists, slots, strict=True))
        if len(done) < len(actions)
        for missing in [[n for n in schedule.needs(actions[len(done)]) if n not in ends]]
    ]
    if stuck:
        raise UsageError(f"schedule {schedule.name} never ends: {'; '.join(stuck)}")
    return Timeline(schedule, tuple(tuple(row) for row in slots))
