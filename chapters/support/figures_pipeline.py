"""Chapter 7: the timeline of a traced pipeline, and schedules that a notebook's reader changes with sliders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from chapters.support.show import in_notebook
from minipar.errors import UsageError
from minipar.parallel.pipeline import SCHEDULES, Action, Durations, Slot, Timeline, make, simulate
from minipar.parallel.pipeline.simulate import Time, timeline_of
from visualize.boxes import action_of
from visualize.schedule import NAMES, plot_schedule
from visualize.style import Picture
from visualize.timeline import COMPUTATION, STEP_END, Slice, Trace


def measured_timeline(trace: Trace, name: str = "", step: int = -1, replica: int = 0) -> Timeline:
    """Read the timeline of one pipeline in one step: seconds, 0 when its first rank began its first action.

    The computations named as actions ("2F0") count; the rest of the trace is left out. `step` counts the steps that
    every rank has whole. Of several replicas (dp, tp), one is shown: the ranks that hold the same stages are told apart
    by their order. `name` is the name of the schedule. UsageError if the trace holds no pipeline.

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
    """Split a rank's actions into steps. A step ends with the optimizer, or where an action comes again."""
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
    """Find the ranks of one pipeline, first stage first: of those that hold the same stages, the `replica`-th."""
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(steps):
        stages = {action.stage for row in steps[rank] for action, _ in row}
        holders[tuple(sorted(stages))].append(rank)
    fewest = min(len(ranks) for ranks in holders.values())
    if not 0 <= replica < fewest:
        raise UsageError(f"replica {replica}: the trace holds {fewest} of this pipeline")
    return [ranks[replica] for _, ranks in sorted(holders.items())]


def picture_of(name: str, p: int, m: int, v: int, durations: Durations) -> Picture:
    """Simulate and draw one schedule; `v` counts for interleaved-1f1b only."""
    schedule = make(name, p, m, v if name == "interleaved-1f1b" else None)
    return plot_schedule(simulate(schedule, durations))


def explore_schedules() -> Any:
    """Show sliders for p, m, v, schedule and times in a notebook with ipywidgets, and the picture that follows them.

    Elsewhere (in a script, without ipywidgets) return the picture of 1F1B for p = 4, m = 8.
    """
    if not in_notebook():
        return picture_of("1f1b", 4, 8, 1, Durations())
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        return picture_of("1f1b", 4, 8, 1, Durations())

    looks = {"continuous_update": False, "style": {"description_width": "9em"}}

    def number(label: str, value: int, high: int) -> Any:
        return ipywidgets.IntSlider(value=value, min=1, max=high, description=label, **looks)

    def time(label: str, value: float, low: float = 0.1) -> Any:
        return ipywidgets.FloatSlider(value=value, min=low, max=4, step=0.1, description=label, **looks)

    controls = {
        "name": ipywidgets.Dropdown(
            options=[(NAMES.get(name, name), name) for name in SCHEDULES],
            value="1f1b",
            description="schedule",
            style=looks["style"],
        ),
        "p": number("ranks p", 4, 8),
        "m": number("microbatches m", 8, 32),
        "v": number("interleaved: v", 2, 4),
        "forward": time("F", 1),
        "backward_input": time("I, input gradient", 1),
        "backward_weight": time("W, weights", 1),
        "comm": time("message", 0, 0),
    }

    def follow(name: str, p: int, m: int, v: int, **times: float) -> None:
        exact: dict[str, Time] = {key: Fraction(str(round(value, 3))) for key, value in times.items()}
        try:
            display(picture_of(name, p, m, v, Durations(**exact)))
        except UsageError as error:
            print(error)

    shown = ipywidgets.interactive_output(follow, controls)
    columns = [list(controls.values())[:4], list(controls.values())[4:]]
    return ipywidgets.VBox([ipywidgets.HBox([ipywidgets.VBox(column) for column in columns]), shown])
