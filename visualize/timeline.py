"""The timeline of a trace: for each rank what it computed, what it communicated, and where it waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minipar.errors import UsageError
from visualize.boxes import KINDS, Box, action_of, number_boxes
from visualize.style import GREY, INK, PAPER, Picture, colours, picture, read_json

COMPUTATION, COMMUNICATION = "computation", "communication"
STEP_END = "optimizer"  # a step of training ends with this slice
SHOWN_STEPS = 2  # of a longer trace, unless told otherwise


@dataclass(frozen=True)
class Slice:
    """Something that took time: seconds from the trace's origin; `wait` is the part spent waiting for messages."""

    name: str
    start: float
    end: float
    wait: float = 0.0


class Message(NamedTuple):
    """One message between two ranks; times in seconds from the trace's origin."""

    source: int
    left: float
    dest: int
    came: float
    axis: str = ""  # of the communicator that it belongs to
    nbytes: int | None = None  # None: the trace does not say


@dataclass
class Trace:
    """rank -> track name -> slices in order of start, outer before inner; and the messages between ranks."""

    ranks: dict[int, dict[str, list[Slice]]]
    messages: list[Message] = field(default_factory=list)
    clock: str = ""
    mesh: dict[str, int] = field(default_factory=dict)  # {"pp": PP, "dp": DP, "tp": TP}; empty: the trace does not say

    def steps(self) -> list[tuple[float, float]]:
        """(start, end) of each step, from the first rank that begins it to the last that ends it."""
        spans: list[list[tuple[float, float]]] = []
        for tracks in self.ranks.values():
            mine, start = [], None
            for one in tracks.get(COMPUTATION, []):
                start = one.start if start is None else start
                if one.name == STEP_END:
                    mine.append((start, one.end))
                    start = None
            spans.append(mine)
        return [(min(a for a, _ in step), max(b for _, b in step)) for step in zip(*spans, strict=False)]


def read_trace(path: str) -> Trace:
    """A trace that `minipar.train --trace` wrote. UsageError if the file is missing or something else."""
    return parse_trace(read_json(path), path)


def parse_trace(data: Any, name: str = "the trace") -> Trace:
    """A Trace from Chrome's trace JSON: pid is the rank, thread names tell computation from communication."""
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{name} has no list of traceEvents: not a Chrome trace")
    try:
        tracks = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event.get("ph") == "M" and event.get("name") == "thread_name"
        }
        ranks: dict[int, dict[str, list[Slice]]] = defaultdict(lambda: defaultdict(list))
        starts: dict[Any, tuple[int, float, str, int | None]] = {}
        ends: dict[Any, tuple[int, float]] = {}
        for event in events:
            if event.get("ph") == "X":
                start, length = event["ts"] / 1e6, event["dur"] / 1e6
                wait = float(event.get("args", {}).get("wait", 0.0))
                track = tracks.get((event["pid"], event["tid"]), "")
                ranks[event["pid"]][track].append(Slice(event["name"], start, start + length, min(wait, length)))
            elif event.get("ph") == "s":
                axis = _axis(tracks.get((event["pid"], event["tid"]), ""))
                starts[event["id"]] = (event["pid"], event["ts"] / 1e6, axis, event.get("args", {}).get("bytes"))
            elif event.get("ph") == "f":
                ends[event["id"]] = (event["pid"], event["ts"] / 1e6)
        about = data.get("otherData", {}) if isinstance(data, dict) else {}
        mesh = {str(axis): int(size) for axis, size in about.get("mesh", {}).items()}
        clock = str(about.get("clock", ""))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name} has an event without its fields ({error}): not a trace of minipar") from None
    if not any(track.startswith((COMPUTATION, COMMUNICATION)) for rank in ranks.values() for track in rank):
        raise UsageError(f"{name} has no computation or communication track: not a trace of minipar")
    for rank in ranks.values():
        for slices in rank.values():
            # Outer before inner; but what took no time (on a model clock) came before what starts at the same moment.
            slices.sort(key=lambda one: (one.start, one.end > one.start, -one.end))
    messages = [
        Message(source, left, *ends[key], axis, nbytes)
        for key, (source, left, axis, nbytes) in starts.items()
        if key in ends
    ]
    return Trace({rank: dict(ranks[rank]) for rank in sorted(ranks)}, messages, clock, mesh)


def _axis(track: str) -> str:
    """ "communication dp, send and receive" -> "dp"."""
    return track.removeprefix(COMMUNICATION).partition(",")[0].strip()


def plot_timeline(trace: Trace, steps: slice | None = None, arrows: bool = False) -> Picture:
    """Each rank's computation above its communication, over time.

    steps   which steps to show, as Python slices lists: slice(0, 2) the first two. Default: the last SHOWN_STEPS.
    arrows  draw each message from its sender to its receiver (for a few hundred of them at most).

    Grey in a computation row is a rank that does not compute. Hatching in a communication row is time spent waiting
    for messages; it is drawn at the front of its slice, wherever in the slice it was. A pipeline's actions are coloured
    by their kind, with the number of their microbatch where it can be read.
    """
    begin, end, title = _window(trace, steps)
    unit, scale = time_unit(end - begin)
    axis_names = sorted(
        {track for tracks in trace.ranks.values() for track in tracks if track.startswith(COMMUNICATION)}
    )
    rows = [COMPUTATION, *axis_names]
    shown = {
        (rank, track): [one for one in slices if one.end > begin and one.start < end]
        for rank, tracks in trace.ranks.items()
        for track, slices in tracks.items()
    }
    names = [_what(one.name) for track in rows for (_, row), slices in shown.items() if row == track for one in slices]
    palette = colours(names)

    each = max(0.42, 0.22 * len(rows))  # inches per rank
    figure = picture(11.0, 1.5 + each * len(trace.ranks))
    axes = figure.add_subplot()
    for place, rank in enumerate(trace.ranks):
        for number, track in enumerate(rows):
            top, height = _row(place, number, len(rows))
            if track == COMPUTATION:
                axes.broken_barh([(0, (end - begin) * scale)], (top, height), color=PAPER, linewidth=0)
            _draw(axes, shown.get((rank, track), []), palette, (top, height), begin, scale)
    for start, _ in trace.steps():
        if begin <= start < end:
            axes.axvline((start - begin) * scale, color=INK, linewidth=0.6, linestyle=":")
    if arrows:
        _arrows(axes, trace, begin, end, scale, len(rows))

    axes.set_xlim(0, (end - begin) * scale)
    axes.set_ylim(len(trace.ranks) - 0.05, -0.1)
    axes.set_yticks([place + 0.45 for place in range(len(trace.ranks))], [f"rank {rank}" for rank in trace.ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time ({unit}{', ' + trace.clock + ' clock' if trace.clock else ''})")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(handles=_legend(palette, shown), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    _number(figure, axes, shown, _row(0, 0, len(rows)), palette, begin, scale)
    return figure


def _what(name: str) -> str:
    """What a slice is coloured by: its name, or the kind of the action that it is."""
    action = action_of(name)
    return action.kind if action else name


def _number(
    figure: Picture,
    axes: Axes,
    shown: dict[tuple[int, str], list[Slice]],
    row: tuple[float, float],
    palette: dict[str, str],
    begin: float,
    scale: float,
) -> None:
    """Microbatch numbers in the computation rows."""
    numbered: dict[int, list[Box]] = defaultdict(list)
    for (rank, track), slices in shown.items():
        for one in slices if track == COMPUTATION else []:
            action = action_of(one.name)
            if action is not None:
                colour, number = palette[action.kind], str(action.microbatch)
                numbered[rank].append(((one.start - begin) * scale, (one.end - begin) * scale, colour, number))
    if not numbered:
        return
    figure.draw_without_rendering()  # settles how large the axes are
    place, (low, high), (bottom, top) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
    points = place.width * 72 / figure.dpi / (high - low), place.height * 72 / figure.dpi / (bottom - top)
    digits = max(len(box[3]) for boxes in numbered.values() for box in boxes)
    for place_of_rank, rank in enumerate(dict.fromkeys(rank for rank, _ in shown)):
        number_boxes(axes, (place_of_rank + row[0], row[1]), numbered[rank], points, digits)


def _window(trace: Trace, steps: slice | None) -> tuple[float, float, str]:
    """The stretch of time to show, in seconds, and what it is."""
    marks = trace.steps()
    if steps is not None and not marks:
        raise UsageError("--steps: the trace marks no steps")
    if not marks or (steps is None and len(marks) <= SHOWN_STEPS):
        slices = [one for tracks in trace.ranks.values() for track in tracks.values() for one in track]
        if not slices:
            raise UsageError("the trace holds nothing that took time")
        return min(one.start for one in slices), max(one.end for one in slices), "the whole run"
    chosen = range(len(marks))[steps or slice(-SHOWN_STEPS, None)]
    if len(chosen) == 0:
        raise UsageError(f"--steps chooses none of the trace's {len(marks)} steps (0 to {len(marks) - 1})")
    first, last = chosen[0], chosen[-1]
    title = f"step {first}" if first == last else f"steps {first} to {last}"
    return marks[first][0], marks[last][1], f"{title} (of {len(marks)}, counted from 0)"


def time_unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 2 else ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)


def _row(place: int, number: int, rows: int) -> tuple[float, float]:
    """Top and height of a row within its rank's unit: computation takes half of it, the others share the rest."""
    if rows == 1 or number == 0:
        return float(place), 0.5 if rows > 1 else 0.8
    height = 0.36 / (rows - 1)
    return place + 0.52 + (number - 1) * height, height * 0.92


def _draw(
    axes: Axes, slices: Sequence[Slice], palette: dict[str, str], row: tuple[float, float], begin: float, scale: float
) -> None:
    bars = [((one.start - begin) * scale, (one.end - one.start) * scale) for one in slices]
    axes.broken_barh(
        bars, row, facecolors=[palette[_what(one.name)] for one in slices], edgecolors="white", linewidth=0.3
    )
    waits = [((one.start - begin) * scale, one.wait * scale) for one in slices if one.wait > 0]
    axes.broken_barh(waits, row, facecolors=(1, 1, 1, 0.5), edgecolors=INK, hatch="//////", linewidth=0.0)
    # The hatching must not hide where one slice ends and the next begins.
    ends = [
        place
        for (start, length), one in zip(bars, slices, strict=True)
        if one.wait
        for place in (start, start + length)
    ]
    top, height = row
    axes.plot(
        [x for place in ends for x in (place, place, None)],
        [y for _ in ends for y in (top, top + height, None)],
        color=INK,
        linewidth=0.6,
    )


def _arrows(axes: Axes, trace: Trace, begin: float, end: float, scale: float, rows: int) -> None:
    place = {rank: number for number, rank in enumerate(trace.ranks)}
    top, height = _row(0, 1, rows) if rows > 1 else _row(0, 0, rows)
    for source, left, dest, came, *_ in trace.messages:
        if begin <= left and came <= end:
            start = ((left - begin) * scale, place[source] + top + height / 2)
            stop = ((came - begin) * scale, place[dest] + top + height / 2)
            style = {
                "arrowstyle": "-|>",
                "color": INK,
                "linewidth": 0.7,
                "shrinkA": 0,
                "shrinkB": 0,
                "mutation_scale": 7,
            }
            axes.annotate("", xy=stop, xytext=start, arrowprops=style)


def _legend(palette: dict[str, str], shown: dict[tuple[int, str], list[Slice]]) -> list[Patch]:
    handles = [Patch(facecolor=colour, label=KINDS.get(name, name)) for name, colour in palette.items()]
    handles.append(Patch(facecolor=PAPER, label="rank does not compute"))
    if any(one.wait > 0 for slices in shown.values() for one in slices):
        handles.append(Patch(facecolor="white", edgecolor=GREY, hatch="//////", label="waiting for messages"))
    return handles
