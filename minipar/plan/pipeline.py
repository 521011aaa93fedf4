"""Time of a pipeline: the schedule simulator's, and the closed form that a search uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from minipar.parallel.pipeline import make, simulate
from minipar.parallel.pipeline.simulate import StageDurations

# Schedules whose closed form the tests hold against the simulator. Others are simulated whenever they are asked for.
CLOSED = ("naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
MOST_ACTIONS = 60_000  # simulated at most: a second or so


@dataclass(frozen=True)
class StageTime:
    """Seconds that one microbatch takes in one stage, messages that its rank waits for included."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Simulated:
    """A step's pipeline. `makespan`: seconds. `last`: for each stage, when its last microbatch's gradients begin to be
    computed, in seconds from the start; `done`: when each rank's last action ends.
    """

    makespan: float
    last: tuple[float, ...]
    done: tuple[float, ...]


def stages_per_rank(schedule: str, virtual_stages: int) -> int:
    """v: zbv always has two."""
    return 2 if schedule == "zbv" else virtual_stages


def rank_of(schedule: str, p: int, stage: int) -> int:
    """Which rank has a stage: in turns, or down and up again in zbv's V."""
    return 2 * p - 1 - stage if schedule == "zbv" and stage >= p else stage % p


def closed_form(schedule: str, p: int, m: int, v: int, rank: StageTime, head: StageTime) -> float:
    """Makespan of ranks with `rank` each, all their stages together, the last of which has the head too: that rank
    works through m microbatches; one has to get there and back.

    1F1B and GPipe (p-1)(F+I+W) beside it, exactly; interleaved a v-th of that (Narayanan et al. 2021, section 2.2);
    ZB-H1 (p-1)(F+I-W) (Qi et al. 2023, section 2.1), but never less than the first forward's way there and the W left
    at the end. For zb-h2 and zbv 1F1B's, which they stay below.
    """
    one = rank.seconds
    slowest = one + head.seconds
    if p == 1:
        return m * slowest
    if schedule == "naive":
        return m * (p * one + head.seconds)
    if schedule == "interleaved-1f1b":
        return m * slowest + (p - 1) / v * one
    if schedule == "zb-h1":
        return m * slowest + (p - 1) * max(rank.forward, one - 2 * rank.backward_weight)
    return m * slowest + (p - 1) * one


def simulated(schedule: str, p: int, m: int, v: int, stages: Sequence[StageTime], hop: float = 0.0) -> Simulated | None:
    """The simulator's step; None if the schedule is too long to simulate. `hop`: seconds of a message that neither rank
    waits for unless it has nothing else to do.

    Beyond 2p microbatches each further group of p takes the same time, so long steps are simulated at two lengths and
    extended.
    """
    short = 2 * p + m % p
    kinds = 3 if schedule.startswith("zb") else 2
    if kinds * p * min(m, short + p) * stages_per_rank(schedule, v) > MOST_ACTIONS:
        return None
    times = tuple(stages)
    if m <= short + p:
        return _simulated(schedule, p, m, v, times, hop)
    first, second = (_simulated(schedule, p, n, v, times, hop) for n in (short, short + p))
    later = (second.makespan - first.makespan) * (m - short - p) / p
    return Simulated(
        second.makespan + later,
        tuple(at + later for at in second.last),
        tuple(at + later for at in second.done),
    )


@lru_cache(maxsize=1024)
def _simulated(schedule: str, p: int, m: int, v: int, stages: tuple[StageTime, ...], hop: float) -> Simulated:
    made = make(schedule, p, m, v if schedule == "interleaved-1f1b" else None)
    table = {
        (s, kind): seconds
        for s, one in enumerate(stages)
        for kind, seconds in (
            ("F", one.forward),
            ("I", one.backward_input),
            ("W", one.backward_weight),
            ("B", one.backward_input + one.backward_weight),
        )
    }
    timeline = simulate(made, StageDurations(comm=hop, table=table))
    begins = {(slot.action.stage, slot.action.kind): float(slot.start) for row in timeline.ranks for slot in row}
    gradients = "W" if made.splits_backward else "B"
    last = tuple(begins[s, gradients] for s in range(made.stages))
    return Simulated(float(timeline.makespan), last, tuple(float(row[-1].end) for row in timeline.ranks))
