"""Time of a pipeline: the schedule simulator's, and the closed form that a search uses.

A stage's F and I each take a message's time more than they compute: a rank waits for the other side of its exchange,
once on the way forward and once on the way back (Narayanan et al. 2021 section 4.1; Megatron's
`send_forward_recv_backward`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from minipar.parallel.pipeline import Action, Durations, make, simulate

# Schedules whose closed form the tests hold against the simulator. Others are simulated whenever they are asked for.
CLOSED = ("naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
MOST_ACTIONS = 60_000  # simulated at most: a second or so


@dataclass(frozen=True)
class Stage:
    """Seconds that one microbatch takes on one rank: F, I, W of its layers, the output head's forward on the last rank
    (its I and W take as long), and the hop, a message's.
    """

    forward: float
    backward_input: float
    backward_weight: float
    head: float
    hop: float

    @property
    def layers(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


def stages_per_rank(schedule: str, virtual_stages: int) -> int:
    """v: zbv always has two."""
    return 2 if schedule == "zbv" else virtual_stages


def closed_form(schedule: str, p: int, m: int, v: int, stage: Stage) -> float:
    """Makespan: the last rank, which has the head, works through m microbatches; one has to get there and back.

    1F1B and GPipe (p-1)(F+I+W) beside it, exactly; interleaved a v-th of that (Narayanan et al. 2021, section 2.2);
    ZB-H1 (p-1)(F+I-W) (Qi et al. 2023, section 2.1), but never less than the first forward's way there and the W left
    at the end. For zb-h2 and zbv 1F1B's, which they stay below.
    """
    one = stage.layers + (2 * stages_per_rank(schedule, v) * stage.hop if p > 1 else 0.0)
    slowest = one + 3 * stage.head
    if p == 1:
        return m * slowest
    if schedule == "naive":
        return m * (p * one + 3 * stage.head)
    if schedule == "interleaved-1f1b":
        return m * slowest + (p - 1) / v * one
    if schedule == "zb-h1":
        return m * slowest + (p - 1) * max(stage.forward + stage.hop, one - 2 * stage.backward_weight)
    return m * slowest + (p - 1) * one


def simulated(schedule: str, p: int, m: int, v: int, stage: Stage) -> float | None:
    """The simulator's makespan; None if the schedule is too long to simulate.

    Beyond 2p microbatches each further group of p takes the same time, so long steps are simulated at two lengths and
    extended.
    """
    if p == 1:
        return m * (stage.layers + 3 * stage.head)
    short = 2 * p + m % p
    kinds = 3 if schedule.startswith("zb") else 2
    if kinds * p * min(m, short + p) * stages_per_rank(schedule, v) > MOST_ACTIONS:
        return None
    if m <= short + p:
        return _makespan(schedule, p, m, v, stage)
    first, second = (_makespan(schedule, p, n, v, stage) for n in (short, short + p))
    return first + (second - first) * (m - short) / p


@dataclass(frozen=True)
class _WithHead(Durations):
    """Equal stages, the last of which has the head too."""

    last: int = 0
    head: float = 0.0

    def of(self, action: Action) -> float:
        extra = {"F": 1, "I": 1, "W": 1, "B": 2}[action.kind] * self.head if action.stage == self.last else 0.0
        return float(super().of(action)) + extra


@lru_cache(maxsize=1024)
def _makespan(schedule: str, p: int, m: int, v: int, stage: Stage) -> float:
    stages = stages_per_rank(schedule, v)
    durations = _WithHead(
        stage.forward / stages + stage.hop,
        stage.backward_input / stages + stage.hop,
        stage.backward_weight / stages,
        last=p * stages - 1,
        head=stage.head,
    )
    made = make(schedule, p, m, v if schedule == "interleaved-1f1b" else None)
    return float(simulate(made, durations).makespan)
