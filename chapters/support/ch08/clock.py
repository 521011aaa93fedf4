"""Run schedules on the model clock and read their timelines, for 8.7."""

from collections.abc import Mapping
from functools import partial

from chapters.support.model_clock import traced
from chapters.support.pipeline_runs import CLOCK_RUN, CLOCK_SHAPE
from chapters.support.training import make_trainer
from minipar.comm import Communicator, ModelClock, Network
from minipar.parallel.pipeline.actions import Durations, Schedule, Slot, Timeline
from minipar.parallel.pipeline.model import balanced_cuts
from visualize.boxes import action_of
from visualize.timeline import COMPUTATION, Trace


def timeline_on_model_clock(schedule: str, message: int) -> Timeline:
    """Train one step on 4 threads, m = 8, and return the timeline in operations; a message takes `message` of them."""

    def step(comm: Communicator) -> None:
        make_trainer(comm, f"{CLOCK_RUN} --global-batch 8 --pp 4 --schedule {schedule}").step(0)

    _, trace = traced(4, step, network=Network(alpha=message), clock=partial(ModelClock, 1.0))
    return measured_timeline(trace)


def measured_timeline(trace: Trace) -> Timeline:
    """Read the timeline of a traced step of one pipeline: seconds, 0 when its first action begins.

    The computations named as actions ("2F0") count; the rest of the trace is left out.
    """
    ranks: list[list[Slot]] = []
    for rank in sorted(trace.ranks):
        slots = []
        for one in trace.ranks[rank][COMPUTATION]:
            action = action_of(one.name)
            if action is not None:
                slots.append(Slot(action, one.start, one.end))
        ranks.append(slots)
    begin = min(slot.start for row in ranks for slot in row)
    slots = [tuple(Slot(slot.action, slot.start - begin, slot.end - begin) for slot in row) for row in ranks]
    return Timeline(Schedule.of("", [[slot.action for slot in row] for row in ranks]), tuple(slots))


def same_times(measured: Timeline, predicted: Timeline) -> bool:
    """Return True if every action starts and ends at the predicted whole number, in the same order on every rank."""
    found = [[(slot.action, round(slot.start), round(slot.end)) for slot in row] for row in measured.ranks]
    return found == [[(slot.action, slot.start, slot.end) for slot in row] for row in predicted.ranks]


def stage_durations(block: Mapping[str, int], head: Mapping[str, int], stages: int, message: int) -> Durations:
    """Return the operations of each stage's actions from those of a block and those that the head adds, by F, I, W.

    The cuts are the trainer's: as equal as whole blocks allow. B is the sum of I and W.
    """
    costs = [0, *[block["F"]] * CLOCK_SHAPE["layers"], head["F"]]  # the embedding, which costs nothing, and the head
    table = {}
    for s, parts in enumerate(balanced_cuts(costs, stages)):
        is_last = s == stages - 1
        blocks = parts
        if s == 0:
            blocks -= 1  # the embedding
        if is_last:
            blocks -= 1  # the head
        for kind in "FIW":
            table[s, kind] = blocks * block[kind]
            if is_last:
                table[s, kind] += head[kind]
        table[s, "B"] = table[s, "I"] + table[s, "W"]
    return Durations(comm=message, table=table)
