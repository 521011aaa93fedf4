"""A schedule as data: for each rank a list of actions, written as PyTorch writes them.

`2F0` is the forward of microbatch 0 through stage 2. The kinds are

    F                 the forward
    B                 the whole backward
    I, W              the two halves of B: the gradient of the stage's input, and those of its weights
    SEND_F, RECV_F    the message with an activation
    SEND_B, RECV_B    the message with an activation's gradient
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from minipar.errors import UsageError

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
        kinds = ", ".join(COMPUTE + MESSAGES)
        raise UsageError(f"{where}unknown action {text!r}: expected stage, kind, microbatch, of the kinds {kinds}")
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
