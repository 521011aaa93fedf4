"""A schedule as data: for each rank a list of actions, as PyTorch writes them, and its times.

`2F0` is the forward of microbatch 0 through stage 2. The kinds are

    F                 the forward
    B                 the whole backward
    I, W              the two parts of B: the gradient of the stage's input, and those of its weights
    SEND_F, RECV_F    the message with an activation
    SEND_B, RECV_B    the message with an activation's gradient
    OVERLAP_F_B       a pair, such as (0F5;7B1)OVERLAP_F_B: a rank runs F and B at the same time

In the simulator an action begins when its rank is free and the results it needs have arrived. A
result arrives on another rank `comm` after it is made, at no cost to either. With Fractions as
durations, bubbles are exact.
"""

import re
import reprlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from minipar.errors import UsageError

Time = int | float | Fraction
COMPUTE = ("F", "B", "I", "W")
# The other end of each message: how many stages further it is, and its kind.
OTHER_END = {
    "SEND_F": (1, "RECV_F"),
    "RECV_F": (-1, "SEND_F"),
    "SEND_B": (-1, "RECV_B"),
    "RECV_B": (1, "SEND_B"),
}
MESSAGES = tuple(OTHER_END)
PAIR = "OVERLAP_F_B"
_ACTION = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})")
_PAIR = re.compile(rf"\((\d+F\d+);(\d+B\d+)\){PAIR}")


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does for one microbatch.

    `stage` of a message is the stage that sends or receives. A pair has its F and its B in `pair`,
    and its own stage and microbatch are F's.
    """

    stage: int
    kind: str
    microbatch: int
    pair: tuple["Action", ...] = ()

    def __str__(self) -> str:
        if self.pair:
            forward, backward = self.pair
            return f"({forward};{backward}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def halves(self) -> tuple["Action", ...]:
        """The F and the B of a pair. Any other action has itself as its only half."""
        return self.pair or (self,)

    @property
    def computes(self) -> bool:
        return self.kind in COMPUTE or self.kind == PAIR

    @property
    def other_end(self) -> "Action":
        """The RECV of a SEND, or the SEND of a RECV: the same message on the neighbouring stage."""
        further, kind = OTHER_END[self.kind]
        return Action(self.stage + further, kind, self.microbatch)


def paired(forward: Action, backward: Action) -> Action:
    """Return the pair of an F and a B."""
    return Action(forward.stage, PAIR, forward.microbatch, (forward, backward))


def parse_action(text: str, where: str = "") -> Action:
    """Parse "2F0" into Action(2, "F", 0).

    UsageError, whose message begins with `where`, for anything else.
    """
    text = text.strip()
    match = _PAIR.fullmatch(text)
    if match is not None:
        return paired(parse_action(match[1], where), parse_action(match[2], where))
    match = _ACTION.fullmatch(text)
    if match is None or match[2] not in COMPUTE + MESSAGES:
        kinds = ", ".join(COMPUTE + MESSAGES)
        rule = f"expected stage, kind, microbatch, of the kinds {kinds}, or (F;B){PAIR}"
        raise UsageError(f"{where}unknown action {reprlib.repr(text)}: {rule}")
    return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """A list of actions for each rank, in order. The stages and the rank of each follow from it."""

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
        # The checker may see a stage that no rank computes.
        named = {action.stage: rank for rank, action in self}
        return named | {action.stage: rank for rank, action in self if action.computes}

    @cached_property
    def stages(self) -> int:
        return 1 + max(action.stage for _, action in self)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for _, action in self)

    def needs(self, action: Action) -> list[Action]:
        """Return the computations whose results this one uses, of its own or a neighbouring stage."""
        if action.pair:
            forward, backward = action.pair
            return self.needs(forward) + self.needs(backward)
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            return [Action(stage - 1, "F", m)] if stage > 0 else []
        if action.kind == "W":
            return [Action(stage, "I", m)]
        needs = [Action(stage, "F", m)]
        if stage < self.stages - 1:
            # If the next stage has neither B nor I, the checker says that its B is missing.
            kind = self._backward_kinds.get((stage + 1, m), "B")
            needs.append(Action(stage + 1, kind, m))
        return needs

    def forwards(self, microbatches: int) -> "Schedule":
        """Return the forwards of the first microbatches alone, for an evaluation."""
        lists = []
        for actions in self.unpaired().ranks:
            lists.append([a for a in actions if a.kind == "F" and a.microbatch < microbatches])
        return Schedule.of(self.name, lists)

    def unpaired(self) -> "Schedule":
        """Return the schedule with each pair's F and B one after the other, as one core runs them."""
        lists: list[list[Action]] = [[] for _ in self.ranks]
        for rank, half in self:
            lists[rank].append(half)
        return Schedule.of(self.name, lists)

    @cached_property
    def _backward_kinds(self) -> dict[tuple[int, int], str]:
        """The kind, B or I, that computes a stage's input gradient, by (stage, microbatch)."""
        kinds = {}
        for _, action in self:
            if action.kind in ("B", "I"):
                kinds[action.stage, action.microbatch] = action.kind
        return kinds


@dataclass(frozen=True)
class Durations:
    """The time of each action of a stage. B takes I + W, and a pair F + B.

    If stages differ, `table` has the times by (stage, kind) instead.
    """

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    comm: Time = 0
    table: Mapping[tuple[int, str], Time] | None = None

    def of(self, action: Action) -> Time:
        if action.pair:
            forward, backward = action.pair
            return self.of(forward) + self.of(backward)
        if self.table is not None:
            return self.table[action.stage, action.kind]
        if action.kind == "F":
            return self.forward
        if action.kind == "I":
            return self.backward_input
        if action.kind == "W":
            return self.backward_weight
        return self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Slot:
    """An action with the times at which it starts and ends."""

    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """A schedule with times; `ranks[r]` are the computations of rank r in order."""

    schedule: Schedule
    ranks: tuple[tuple[Slot, ...], ...]
    comm: Time = 0  # the time of a message between ranks, if the timeline was simulated
    messages: tuple[Slot, ...] = ()  # their SENDs, if they wait for one another in channels

    @cached_property
    def makespan(self) -> Time:
        return max((slot.end for slots in self.ranks for slot in slots), default=0)

    @property
    def bubble_fraction(self) -> Time:
        """Idle / total, over all ranks from the first action to the last; 0 if nothing takes time.

        It is a Fraction if the times are no floats.
        """
        total = self.makespan * len(self.ranks)
        idle = total - sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        return Fraction(idle) / total if total else 0

    @property
    def peak_activations(self) -> list[int]:
        """The most forwards (of one stage) without their backward, for each rank."""
        return [peak_live(actions) for actions in self.schedule.ranks]


def simulate(schedule: Schedule, durations: Durations = Durations()) -> Timeline:
    """Run the schedule's computations and return their times.

    If ranks wait for one another, UsageError names the next action of each. The work is
    proportional to the number of actions: a rank is looked at again only when a result arrives for
    it.
    """
    lists = [[action for action in actions if action.computes] for actions in schedule.ranks]
    ends: dict[Action, Time] = {}
    slots: list[list[Slot]] = [[] for _ in lists]
    waiting: dict[Action, list[int]] = {}  # the ranks that wait for a result
    ready = deque(range(len(lists)))
    while ready:
        rank = ready.popleft()
        actions, row = lists[rank], slots[rank]
        while len(row) < len(actions):
            action = actions[len(row)]
            needs = schedule.needs(action)
            missing = [need for need in needs if need not in ends]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            start = row[-1].end if row else 0
            for need in needs:
                delay = durations.comm if schedule.home[need.stage] != rank else 0
                start = max(start, ends[need] + delay)
            row.append(Slot(action, start, start + durations.of(action)))
            for half in action.halves:
                ends[half] = row[-1].end
                ready.extend(waiting.pop(half, []))
    stuck = []
    for rank, (actions, row) in enumerate(zip(lists, slots, strict=True)):
        if len(row) < len(actions):
            missing = [need for need in schedule.needs(actions[len(row)]) if need not in ends]
            wanted = ", ".join(str(need) for need in missing)
            stuck.append(f"rank {rank} before {actions[len(row)]}, which needs {wanted}")
    if stuck:
        raise UsageError(f"schedule {schedule.name} never ends: {'; '.join(stuck)}")
    return Timeline(schedule, tuple(tuple(row) for row in slots), durations.comm)


def peak_live(
    actions: Sequence[Action], made_by: Sequence[str] = ("F",), freed_by: Sequence[str] = ("B", "I")
) -> int:
    """Return the most activations alive at once in one rank's list.

    An activation is alive from the start of F to the end of B or I.
    """
    live = 0
    peak = 0
    for action in actions:
        for half in action.halves:
            if half.kind in made_by:
                live += 1
                peak = max(peak, live)
            if half.kind in freed_by:
                live -= 1
    return peak
