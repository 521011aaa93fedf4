"""A schedule is data: for each rank a list of actions, written as PyTorch writes them.

`2F0` is the forward of microbatch 0 through stage 2. Kinds: F forward; B the whole backward, or its two halves I (the
gradient of the input) and W (of the weights); and the messages SEND_F, RECV_F (activations) and SEND_B, RECV_B (their
gradients), which `lower.lower` adds where a list has none.
"""

from __future__ import annotations

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
    """One thing that a rank does for one microbatch. For a message, `stage` is the stage that sends or receives."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        return self.kind in COMPUTE


def parse_action(text: str, where: str = "") -> Action:
    """ "2F0" -> Action(2, "F", 0); UsageError, beginning with `where`, for anything else."""
    match = _ACTION.fullmatch(text.strip())
    if match is None or match[2] not in COMPUTE + MESSAGES:
        kinds = ", ".join(COMPUTE + MESSAGES)
        raise UsageError(
            f"{where}unknown action {text.strip()!r}: expected stage, kind, microbatch, of the kinds {kinds}"
        )
    return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` is what rank r does, in order. Which stage is where, and how many there are, follow from the lists."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @staticmethod
    def of(name: str, lists: Sequence[Sequence[Action]]) -> Schedule:
        return Schedule(name, tuple(tuple(actions) for actions in lists))

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """(rank, action), rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action

    @cached_property
    def home(self) -> dict[int, int]:
        """The rank that holds each stage: that computes it."""
        anywhere = {action.stage: rank for rank, action in self}
        return anywhere | {action.stage: rank for rank, action in self if action.computes}

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for _, action in self), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for _, action in self), default=-1)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed on their own."""
        return any(action.kind == "W" for _, action in self)

    def needs(self, action: Action) -> list[Action]:
        """The computations whose results this one uses: on its own rank, or on the rank of the stage beside."""
        stage, kind, m = action.stage, action.kind, action.microbatch
        if kind == "F":
            return [Action(stage - 1, "F", m)] if stage > 0 else []
        if kind == "W":
            return [Action(stage, "I", m)]
        found = [Action(stage, "F", m)]
        if stage < self.stages - 1:
            found.append(Action(stage + 1, self._backward[stage + 1, m], m))
        return found

    @cached_property
    def _backward(self) -> dict[tuple[int, int], str]:
        """B or I: which of the two brings the gradient of a stage's input."""
        kinds = {(a.stage, a.microbatch): a.kind for _, a in self if a.kind in ("B", "I")}
        return _Default(kinds)


class _Default(dict[tuple[int, int], str]):
    """B for what is missing: the checker then names the action that is not there."""

    def __missing__(self, key: tuple[int, int]) -> str:
        return "B"
