"""What the ranks of a pipeline did in a step, as a timeline, and what the simulator makes of the times it took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.simulate import Durations, Slot, Time, Timeline, simulate


@dataclass(frozen=True)
class StageDurations(Durations):
    """Durations of which every stage has its own: `table` gives them by (stage, kind)."""

    table: Mapping[tuple[int, str], Time] = field(default_factory=dict)

    def of(self, action: Action) -> Time:
        return self.table[action.stage, action.kind]


def timeline_of(name: str, ranks: Sequence[Sequence[Slot]]) -> Timeline:
    """The timeline of the schedule `name` from each rank's slots on one clock: 0 when the first action began.

    Its bubble_fraction is idle / (ranks * (last end - first start)).
    """
    begin = min(slot.start for row in ranks for slot in row)
    slots = tuple(tuple(Slot(slot.action, slot.start - begin, slot.end - begin) for slot in row) for row in ranks)
    return Timeline(Schedule.of(name, [[slot.action for slot in row] for row in ranks]), slots)


def measured_durations(timeline: Timeline) -> StageDurations:
    """The mean time of each kind of action, stage by stage."""
    times: dict[tuple[int, str], list[Time]] = defaultdict(list)
    for row in timeline.ranks:
        for slot in row:
            times[slot.action.stage, slot.action.kind].append(slot.end - slot.start)
    return StageDurations(table={key: sum(found) / len(found) for key, found in times.items()})


def predicted_timeline(measured: Timeline, comm: Time = 0) -> Timeline:
    """What the simulator says of the same lists of actions, each as long as it took on the average."""
    found = measured_durations(measured)
    return simulate(measured.schedule, StageDurations(comm=comm, table=found.table))
