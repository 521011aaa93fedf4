"""From the trace of a pipelined run to a timeline that stands beside the predicted one. Numbers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from minipar.errors import UsageError
from minipar.parallel.pipeline import Action, Slot, Timeline
from minipar.parallel.pipeline.simulate import (
    StageDurations,
    live_activations,
    measured_durations,
    predicted_timeline,
    timeline_of,
)
from visualize.boxes import action_of
from visualize.timeline import COMPUTATION, STEP_END, Slice, Trace

__all__ = ["StageDurations", "live_activations", "measured_durations", "measured_timeline", "predicted_timeline"]


def measured_timeline(trace: Trace, name: str = "", step: int = -1, replica: int = 0) -> Timeline:
    """What the ranks of one pipeline did in one step: seconds, 0 when the first of them began its first action.

    The computations named as actions ("2F0") count; the rest of the trace is left out. `step` counts the steps that
    every rank has whole. Of several replicas (dp, tp), one is shown: the ranks that hold the same stages are told apart
    by their order. `name` is what the schedule is to be called. UsageError if the trace holds no pipeline.

    The timeline's bubble_fraction is idle / (ranks * (last end - first start)).
    """
    steps = {rank: _split(tracks.get(COMPUTATION, [])) for rank, tracks in trace.ranks.items()}
    steps = {rank: found for rank, found in steps.items() if found}
    if not steps:
        raise UsageError("the trace holds no pipeline actions (2F0, say): it is not from a run with a pipeline")
    ranks = _pipeline(steps, replica)
    largest = {rank: max(len(row) for row in steps[rank]) for rank in ranks}
    whole = [
        rows
        for rows in zip(*(steps[rank] for rank in ranks), strict=False)
        if all(len(row) == largest[rank] for rank, row in zip(ranks, rows, strict=True))
    ]
    if not -len(whole) <= step < len(whole):
        raise UsageError(f"step {step}: the trace holds {len(whole)} whole steps of the pipeline")
    return timeline_of(name, [[Slot(action, one.start, one.end) for action, one in row] for row in whole[step]])


def _split(slices: Sequence[Slice]) -> list[list[tuple[Action, Slice]]]:
    """The actions of each step. A step ends with the optimizer, or where an action comes again."""
    steps: list[list[tuple[Action, Slice]]] = [[]]
    seen: set[Action] = set()
    for one in slices:
        action = action_of(one.name)
        if one.name == STEP_END or action in seen:
            steps.append([])
            seen = set()
        if action is not None:
            steps[-1].append((action, one))
            seen.add(action)
    return [row for row in steps if row]


def _pipeline(steps: Mapping[int, Sequence[Sequence[tuple[Action, Slice]]]], replica: int) -> list[int]:
    """The ranks of one pipeline, first stage first: of those that hold the same stages, the `replica`-th."""
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(steps):
        stages = {action.stage for row in steps[rank] for action, _ in row}
        holders[tuple(sorted(stages))].append(rank)
    fewest = min(len(ranks) for ranks in holders.values())
    if not 0 <= replica < fewest:
        raise UsageError(f"replica {replica}: the trace holds {fewest} of this pipeline")
    return [ranks[replica] for _, ranks in sorted(holders.items())]
