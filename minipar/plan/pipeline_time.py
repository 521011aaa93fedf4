"""The makespan of a pipeline schedule: simulated, or in the closed form that a search uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make
from minipar.plan.layout import Layout

MOST_ACTIONS = 60_000  # a larger schedule is not simulated: this one takes a second or so


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage, F, I and W, waiting for messages and gathers
    included.
    """

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class SimulatedPipeline:
    """The moments of a simulated step, in seconds from its start.

    makespan           the end of the last action
    gradients_begin    for each stage, the beginning of its last microbatch's weight gradients
    ranks_end          for each rank, the end of its last action
    """

    makespan: float
    gradients_begin: tuple[float, ...]
    ranks_end: tuple[float, ...]


def closed_form(layout: Layout, rank: StageTime, head: StageTime) -> float:
    """Return the makespan of equal ranks, `rank` the time of all stages of one; the last rank also
    has the head.

    That rank works through m microbatches, and the pipeline fills and drains around it. With F + I
    + W of `rank`:

    1F1B, GPipe     (p-1)(F+I+W), exactly
    interleaved     a v-th of that (Narayanan et al. 2021, section 2.2)
    ZB-H1           (p-1)(F+I-W) (Qi et al. 2023, section 2.1), or (p-1) F if that is longer: the
                    first forward has to reach the last rank
    naive           every microbatch passes all ranks alone
    ZB-H2, ZBV      1F1B's, an upper bound
    """
    p = layout.pp
    m = layout.microbatches
    v = layout.virtual_stages
    one = rank.seconds
    slowest = one + head.seconds
    if p == 1:
        return m * slowest
    if layout.schedule == "naive":
        return m * (p * one + head.seconds)
    if layout.schedule == "interleaved-1f1b":
        return m * slowest + (p - 1) / v * one
    if layout.schedule == "zb-h1":
        return m * slowest + (p - 1) * max(rank.forward, one - 2 * rank.backward_weight)
    return m * slowest + (p - 1) * one


def simulated_actions(layout: Layout) -> int:
    """Return the actions of the longest schedule that `simulated` makes for a layout."""
    p = layout.pp
    m = layout.microbatches
    each = 3 if layout.splits_backward else 2  # a microbatch has as many in a stage
    return each * p * min(m, 3 * p + m % p) * layout.stages_per_rank


def simulated(
    layout: Layout, stages: Sequence[StageTime], hop: float = 0.0
) -> SimulatedPipeline | None:
    """Simulate a step; None if the schedule is too long. `hop`: seconds of a message that blocks
    neither rank.

    Beyond 2p microbatches each further group of p takes the same time, so a long step is simulated
    at two lengths and extended.
    """
    p = layout.pp
    m = layout.microbatches
    v = layout.virtual_stages
    times = tuple(stages)
    if simulated_actions(layout) > MOST_ACTIONS:
        return None

    def of(microbatches: int) -> SimulatedPipeline:
        return simulate_exactly(layout.schedule, p, microbatches, v, times, hop)

    short = 2 * p + m % p
    if m <= short + p:
        return of(m)
    first = of(short)
    second = of(short + p)
    later = (second.makespan - first.makespan) * (m - short - p) / p
    return SimulatedPipeline(
        makespan=second.makespan + later,
        gradients_begin=tuple(moment + later for moment in second.gradients_begin),
        ranks_end=tuple(moment + later for moment in second.ranks_end),
    )


@cache
def simulate_exactly(
    schedule: str, p: int, m: int, v: int, stages: tuple[StageTime, ...], hop: float
) -> SimulatedPipeline:
    """Simulate all m microbatches of a schedule, however long it is. The cache needs plain
    arguments.
    """
    actions = make(schedule, p, m, v if schedule == "interleaved-1f1b" else None)
    table: dict[tuple[int, str], float] = {}
    for s, stage in enumerate(stages):
        table |= {
            (s, "F"): stage.forward,
            (s, "I"): stage.backward_input,
            (s, "W"): stage.backward_weight,
        }
        table[s, "B"] = stage.backward_input + stage.backward_weight
    timeline = simulate(actions, Durations(comm=hop, table=table))
    begins = {
        (slot.action.stage, slot.action.kind): float(slot.start)
        for row in timeline.ranks
        for slot in row
    }
    gradients = "W" if any(action.kind == "W" for _, action in actions) else "B"
    return SimulatedPipeline(
        makespan=float(timeline.makespan),
        gradients_begin=tuple(begins[s, gradients] for s in range(actions.stages)),
        ranks_end=tuple(float(row[-1].end) for row in timeline.ranks),
    )
