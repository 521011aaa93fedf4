"""A schedule as data: for each rank a list of actions, written as PyTorch writes them; and the time that it takes.

`2F0` is the forward of microbatch 0 through stage 2. The kinds are

    F                 the forward
    B                 the whole backward
    I, W              the two halves of B: the gradient of the stage's input, and those of its weights
    SEND_F, RECV_F    the message with an activation
    SEND_B, RECV_B    the message with an activation's gradient

In the simulator an action begins when its rank is free and the results it needs have arrived. A result arrives on
another rank `comm` after it is made, at no cost to either. With Fractions as durations, bubbles are exact.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from minipar.errors import UsageError

Time = int | float | Fraction
COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ACTION = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})")


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does for one microbatch. `stage` of a message is the stage that sends or receives."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        return self.kind in COMPUTE

    @property
    def other_end(self) -> "Action":
        """The RECV of a SEND, or the SEND of a RECV: the same message on the neighbouring stage."""
        verb, direction = self.kind.split("_")
        step = 1 if (verb == "SEND") == (direction == "F") else -1
        return Action(self.stage + step, f"{'RECV' if verb == 'SEND' else 'SEND'}_{direction}", self.microbatch)


def parse_action(text: str, where: str = "") -> Action:
    """Parse "2F0" into Action(2, "F", 0). UsageError, whose message begins with `where`, for anything else."""
    text = text.strip()
    match = _ACTION.fullmatch(text)
    if match is None or match[2] not in COMPUTE + MESSAGES:
        rule = f"expected stage, kind, microbatch, of the kinds {', '.join(COMPUTE + MESSAGES)}"
        raise UsageError(f"{where}unknown action {reprlib.repr(text)}: {rule}")
    return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """A list of actions for each rank, in order; the number of stages and the rank of each follow from the lists."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @staticmethod
    def of(name: str, lists: Sequence[Sequence[Action]]) -> "Schedule":
        return Schedule(name, tuple(tuple(actions) for actions in lists))

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action), rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action

    @cached_property
    def home(self) -> dict[int, int]:
        """The rank that computes each stage."""
        named = {action.stage: rank for rank, action in self}  # the checker may see a stage that no rank computes
        return named | {action.stage: rank for rank, action in self if action.computes}

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for _, action in self), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for _, action in self), default=-1)

    @property
    def splits_backward(self) -> bool:
        """True if a backward is computed in halves, I and W."""
        return any(action.kind == "W" for _, action in self)

    def needs(self, action: Action) -> list[Action]:
        """Return the computations whose results this one uses, on its own rank or on that of a neighbouring stage."""
        stage, kind, m = action.stage, action.kind, action.microbatch
        if kind == "F":
            return [Action(stage - 1, "F", m)] if stage > 0 else []
        if kind == "W":
            return [Action(stage, "I", m)]
        needs = [Action(stage, "F", m)]
        if stage < self.stages - 1:
            # If the next stage has neither B nor I, the checker says that its B is missing.
            needs.append(Action(stage + 1, self._backward_kinds.get((stage + 1, m), "B"), m))
        return needs

    @cached_property
    def _backward_kinds(self) -> dict[tuple[int, int], str]:
        """The action, B or I, that computes the gradient of each stage's input, by (stage, microbatch)."""
        return {(a.stage, a.microbatch): a.kind for _, a in self if a.kind in ("B", "I")}


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
