"""A schedule as data: for each rank a list of actions, written as PyTorch writes them; and the time that it takes.

`2F0` is the forward of microbatch 0 through stage 2. The kinds are

    F                 the forward
    B                 the whole backward
    I, W              the two parts of B: the gradient of the stage's input, and those of its weights
    SEND_F, RECV_F    the message with an activation
    SEND_B, RECV_B    the message with an activation's gradient
    OVERLAP_F_B       a pair: an F and a B that a rank runs at the same time, as in (0F5;7B1)OVERLAP_F_B

In the simulator an action begins when its rank is free and the results it needs have arrived. A result arrives on
another rank `comm` after it is made, at no cost to either. With Fractions as durations, bubbles are exact.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from minipar.errors import UsageError

Time = int | float | Fraction
COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
PAIR = "OVERLAP_F_B"
_ACTION = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})")
_PAIR = re.compile(rf"\((\d+F\d+);(\d+B\d+)\){PAIR}")


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does for one microbatch. `stage` of a message is the stage that sends or receives."""

    stage: int
    kind: str
    microbatch: int
    pair: tuple["Action", ...] = ()  # the F and the B of an OVERLAP_F_B, whose own stage and microbatch are F's

    def __str__(self) -> str:
        if self.pair:
            return f"({';'.join(map(str, self.pair))}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def halves(self) -> tuple["Action", ...]:
        """The F and the B of a pair; of any other action only itself."""
        return self.pair or (self,)

    @property
    def computes(self) -> bool:
        return self.kind in COMPUTE or self.kind == PAIR

    @property
    def other_end(self) -> "Action":
        """The RECV of a SEND, or the SEND of a RECV: the same message on the neighbouring stage."""
        verb, direction = self.kind.split("_")
        step = 1 if (verb == "SEND") == (direction == "F") else -1
        return Action(self.stage + step, f"{'RECV' if verb == 'SEND' else 'SEND'}_{direction}", self.microbatch)


def parse_action(text: str, where: str = "") -> Action:
    """Parse "2F0" into Action(2, "F", 0). UsageError, whose message begins with `where`, for anything else."""
    text = text.strip()
    if pair := _PAIR.fullmatch(text):
        forward, backward = (parse_action(half, where) for half in pair.groups())
        return replace(forward, kind=PAIR, pair=(forward, backward))
    match = _ACTION.fullmatch(text)
    if match is None or match[2] not in COMPUTE + MESSAGES:
        rule = f"expected stage, kind, microbatch, of the kinds {', '.join(COMPUTE + MESSAGES)}, or (F;B){PAIR}"
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
        """Yield (rank, action), rank by rank, and instead of a pair its halves."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                for half in action.halves:
                    yield rank, half

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
        """True if a backward is computed in two parts, I and W."""
        return any(action.kind == "W" for _, action in self)

    def needs(self, action: Action) -> list[Action]:
        """Return the computations whose results this one uses, on its own rank or on that of a neighbouring stage."""
        stage, kind, m = action.stage, action.kind, action.microbatch
        if action.pair:
            return [need for half in action.pair for need in self.needs(half)]
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
    """The time of one action of one stage; B takes I + W. If stages differ, `table` has it by (stage, kind) instead.

    `exchange` is the part of each F and I in which the stage communicates (all-to-alls of experts); a pair hides it.
    """

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    comm: Time = 0
    table: Mapping[tuple[int, str], Time] | None = None
    exchange: Time = 0

    def __post_init__(self) -> None:
        for value in (self.forward, self.backward_input, self.backward_weight, self.comm, self.exchange):
            if not value >= 0:
                raise UsageError(f"a duration of {value}: an action takes 0 or more")

    def of(self, action: Action) -> Time:
        if action.pair:
            forward, backward = map(self.of, action.pair)
            return max(forward + backward - 2 * self.exchange, 2 * self.exchange, forward, backward)
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
        return _idle(self.ranks, self.makespan * len(self.ranks))

    @property
    def bubble_rate(self) -> Time:
        """Idle / cost (first action to last) of the rank with the largest cost: arXiv 2401.10241, section 5.3."""
        slots = max((row for row in self.ranks if row), key=lambda row: row[-1].end - row[0].start)
        return _idle([slots], slots[-1].end - slots[0].start)

    @property
    def peak_activations(self) -> list[int]:
        """The most forwards (of one stage) without their backward, for each rank."""
        return [peak_live(actions) for actions in self.schedule.ranks]


def _idle(ranks: Sequence[Sequence[Slot]], total: Time) -> Time:
    """Return the part of the time `total` in which these ranks do nothing; a Fraction if the times are no floats."""
    idle, total = total - sum(slot.end - slot.start for slots in ranks for slot in slots), total or 1
    return idle / total if isinstance(idle, float) or isinstance(total, float) else Fraction(idle, total)


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
                arrivals = [ends[n] + (durations.comm if schedule.home[n.stage] != rank else 0) for n in needs]
                start = max([slots[rank][-1].end if slots[rank] else 0, *arrivals])
                slots[rank].append(Slot(action, start, start + durations.of(action)))
                ends |= dict.fromkeys(action.halves, slots[rank][-1].end)
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
    for kind in (half.kind for action in actions for half in action.halves):
        live += kind in made_by
        peak = max(peak, live)
        live -= kind in freed_by
    return peak
