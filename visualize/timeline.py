"""The timeline of a trace: the computation, the communication and the waiting of each rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

from minipar.errors import UsageError

from .arrows import Message, tracks_with_arrows
from .boxes import KINDS, Box, action_of, number_boxes
from .style import GREY, INK, NOT_A_ROW, PAPER, Picture, at_lightness, colours, lightness, number, picture, read_json

COMPUTATION, COMMUNICATION = "computation", "communication"
STEP_END = "optimizer"  # a step of training ends with this slice
WHOLE = 2  # steps: a trace of more is shown by its last one, unless --steps says otherwise
ORDER = ("tp", "cp", "ep", "dp", "pp")  # of the lanes: the mesh's fastest axis first
# Inches: the picture, its axes, the row of a rank's computation, a lane of its communication, the space below them.
# The picture is as wide as a page's text. At half of that its letters, SMALL points here, can still be read.
WIDTH, LEFT, RIGHT, TOP, COMPUTE, LANE, GAP = 7.0, 1.25, 0.12, 0.36, 0.27, 0.135, 0.09
SMALL = 8.0
POINTS = 72
OFFSET: dict[str, Any] = {"textcoords": "offset points"}
HEADER: dict[str, Any] = {"xycoords": "axes fraction", "annotation_clip": False} | OFFSET
COLUMNS, LINE = 4, 0.17  # of the legend; inches
SEEN = 0.3  # points: a name whose slices are all narrower is not in the legend
HATCHED = 6.0  # points of waiting from which it is hatched: a narrower bar would be all lines
SLIVER, NEAR = 3.0, 6.0  # points: bars in a lane that are narrower, and at most so far apart, are drawn as one bundle
LIGHT, DARKER = 80, 55  # CIE L* from which a bar in a lane has an edge, and that of the edge
PALE, LINES = 0.75, "#777777"  # waiting: the part of white in its colour, and the colour of its few lines


@dataclass(frozen=True)
class Slice:
    """A span of time with a name, in seconds from the trace's origin; `wait` is the part spent waiting for messages."""

    name: str
    start: float
    end: float
    wait: float = 0.0


@dataclass
class Trace:
    """rank -> track name -> slices in order of start, outer before inner; and the messages between ranks."""

    ranks: dict[int, dict[str, list[Slice]]]
    messages: list[Message] = field(default_factory=list)
    clock: str = ""
    mesh: dict[str, int] = field(default_factory=dict)  # {"pp": PP, "dp": DP, "tp": TP}; empty: the trace does not say

    def steps(self) -> list[tuple[float, float]]:
        """Find (start, end) of each step, from the first rank that begins it to the last that ends it."""
        spans: list[list[tuple[float, float]]] = []
        for tracks in self.ranks.values():
            steps, start = [], None
            for one in tracks.get(COMPUTATION, []):
                start = one.start if start is None else start
                if one.name == STEP_END:
                    steps.append((start, one.end))
                    start = None
            spans.append(steps)
        return [(min(a for a, _ in step), max(b for _, b in step)) for step in zip(*spans, strict=False)]


def coordinates(shape: Mapping[str, int], rank: int) -> dict[str, int]:
    """Compute a rank's place on each axis of a mesh {axis: size}, slowest axis first."""
    places = {}
    for axis in reversed(shape):
        rank, places[axis] = divmod(rank, shape[axis])
    return {axis: places[axis] for axis in shape}


def axis_of(track: str) -> str:
    """Return the mesh axis in a track's name, such as "communication dp, send and receive"."""
    return track.removeprefix(COMMUNICATION).partition(",")[0].strip()


def read_trace(path: str) -> Trace:
    """Read a trace that `minipar.train --trace` wrote. UsageError if the file is missing or something else."""
    return parse_trace(read_json(path), path)


def parse_trace(data: Any, name: str = "the trace") -> Trace:
    """Build a Trace from Chrome's trace JSON: pid is the rank, thread names tell computation from communication."""
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
        starts: dict[Any, tuple[int, float, str, int | None]] = {}  # rank, time, track, bytes
        ends: dict[Any, tuple[int, float]] = {}
        for event in (event for event in events if event.get("ph") in ("X", "s", "f")):
            rank, start = int(event["pid"]), number(event["ts"]) / 1e6
            track = tracks.get((event["pid"], event.get("tid")), "")
            if event["ph"] == "X":
                length = number(event["dur"], 0) / 1e6
                wait = min(number(event.get("args", {}).get("wait", 0.0), 0), length)
                ranks[rank][track].append(Slice(str(event["name"]), start, start + length, wait))
            elif event["ph"] == "s":
                nbytes = event.get("args", {}).get("bytes")
                starts[event["id"]] = (rank, start, track, None if nbytes is None else int(number(nbytes, 0)))
            else:
                ends[event["id"]] = (rank, start)
        about = data.get("otherData", {}) if isinstance(data, dict) else {}
        mesh = {str(axis): int(size) for axis, size in about.get("mesh", {}).items()}
        clock = str(about.get("clock", ""))
    except NOT_A_ROW as error:
        raise UsageError(f"{name} has an event without its fields ({error}): not a trace of minipar") from None
    if not any(track.startswith((COMPUTATION, COMMUNICATION)) for rank in ranks.values() for track in rank):
        raise UsageError(f"{name} has no computation or communication track: not a trace of minipar")
    for rank in ranks.values():
        for slices in rank.values():
            # Outer before inner; but what took no time (on a model clock) came before what starts at the same moment.
            slices.sort(key=lambda one: (one.start, one.end > one.start, -one.end))
    messages = [
        Message(source, left, *ends[key], axis_of(track), nbytes, track)
        for key, (source, left, track, nbytes) in starts.items()
        if key in ends
    ]
    return Trace({rank: dict(ranks[rank]) for rank in sorted(ranks)}, messages, clock, mesh)


def plot_timeline(trace: Trace, steps: slice | None = None, arrows: bool = False) -> Picture:
    """Draw each rank's computation over time, and below it a lane of communication for each mesh axis.

    steps   the steps to show, as Python slices lists: slice(0, 2) is the first two. Default: all of at most WHOLE
            steps, the last of more.
    arrows  draw messages from sender to receiver, in the lane that they belong to: those between single ranks if there
            are any, else those of the axes that send fewest. A line below the picture says which.

    Grey in a computation row is a rank that does not compute. In a communication lane, pale and hatched is time spent
    waiting for messages; it is drawn at the front of its slice, wherever in the slice it was. Slices of a lane that are
    too narrow to be told apart are a bundle: a line from the first to the last of them, and at its start the time of
    all of them together by colour. A pipeline's actions are coloured by their kind, with the number of their microbatch
    where it can be read.
    """
    begin, end, title = window(trace, steps)
    sheet = _Sheet(trace, begin, end, arrows)
    figure = picture(WIDTH, sheet.bottom + TOP + sheet.each * len(trace.ranks))
    figure.set_layout_engine("none")
    height = figure.get_figheight()
    box = (LEFT / WIDTH, sheet.bottom / height, 1 - (LEFT + RIGHT) / WIDTH, 1 - (sheet.bottom + TOP) / height)
    axes = figure.add_axes(box)
    for place, rank in enumerate(trace.ranks):
        for track in sheet.tracks:
            sheet.draw(axes, sheet.shown.get((rank, track), []), sheet.row(place, track), track == COMPUTATION)
    for place in range(1, len(trace.ranks)):
        axes.axhline(place - GAP / 2 / sheet.each, color=PAPER, linewidth=0.8, zorder=0)
    for start, _ in trace.steps():
        if begin <= start < end:
            axes.axvline((start - begin) * sheet.scale, color=INK, linewidth=0.6, linestyle=":")
    if arrows:
        sheet.draw_arrows(axes)

    axes.set_xlim(0, (end - begin) * sheet.scale)
    axes.set_ylim(len(trace.ranks), -0.05)
    sheet.name_rows(axes)
    words = [sheet.unit, *([f"{trace.clock} clock"] if trace.clock else [])]
    note = "; number in a box: its microbatch" if any(name in KINDS for name in sheet.visible) else ""
    axes.set_xlabel(f"time ({', '.join(words)}{note})", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_title(f"{title} on {_ranks(trace)}", loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    spot = (0.5, (0.04 + LINE * len(sheet.notes)) / height)
    look = {"loc": "lower center", "frameon": False, "borderpad": 0.0, "columnspacing": 1.4, "handlelength": 1.6}
    figure.legend(handles=sheet.legend, bbox_to_anchor=spot, ncols=COLUMNS, fontsize=SMALL + 0.5, **look)
    for line, text in enumerate(reversed(sheet.notes)):
        figure.text(0.5, (0.06 + LINE * line) / height, text, fontsize=SMALL, color=INK, ha="center")
    return figure


def _ranks(trace: Trace) -> str:
    """Count the ranks of a trace, and name the axes of their mesh: "8 ranks (pp 2, dp 2, tp 2)"."""
    sizes = [f"{axis} {size}" for axis, size in trace.mesh.items() if size > 1]
    count = f"{len(trace.ranks)} rank{'s' * (len(trace.ranks) != 1)}"
    return f"{count} ({', '.join(sizes)})" if sizes else count


class _Sheet:
    """Everything that the rows of one timeline share: the window of time, colours, lanes and sizes in inches."""

    def __init__(self, trace: Trace, begin: float, end: float, arrows: bool) -> None:
        self.trace, self.begin, self.end = trace, begin, end
        messages = [one for one in trace.messages if begin <= one.left and one.came <= end]
        self.arrows = tracks_with_arrows(messages) if arrows else []
        self.messages = [one for one in messages if one.track in self.arrows]
        self.unit, self.scale = time_unit(end - begin)
        self.points = POINTS * (WIDTH - LEFT - RIGHT) / ((end - begin) * self.scale)  # of one unit of x
        self.shown = {
            (rank, track): [one for one in slices if one.end > begin and one.start < end]
            for rank, tracks in trace.ranks.items()
            for track, slices in tracks.items()
        }
        lanes = {track for (_, track), slices in self.shown.items() if slices and track.startswith(COMMUNICATION)}
        order = {axis: place for place, axis in enumerate(ORDER)}
        self.tracks = [COMPUTATION, *sorted(lanes, key=lambda track: (order.get(axis_of(track), len(ORDER)), track))]
        self.each = COMPUTE + LANE * len(lanes) + GAP  # of a rank
        visible = {}
        for one in (one for (_, track), slices in self.shown.items() if track in self.tracks for one in slices):
            visible[_what(one.name)] = max(visible.get(_what(one.name), 0.0), self._wide(one.end - one.start))
        self.colours = colours(visible)
        self.visible = {name: colour for name, colour in self.colours.items() if visible[name] > SEEN}
        self.legend = self._legend()
        self.notes = self._notes()
        self.bottom = 0.56 + LINE * (math.ceil(len(self.legend) / COLUMNS) + len(self.notes))

    def _wide(self, seconds: float) -> float:
        """Convert a time to points of the picture's width."""
        return seconds * self.scale * self.points

    def row(self, place: int, track: str) -> tuple[float, float]:
        """Compute the top and the height of a rank's row or lane; one rank is one unit of y."""
        if track == COMPUTATION:
            return float(place), COMPUTE / self.each
        return place + (COMPUTE + LANE * (self.tracks.index(track) - 1)) / self.each, 0.88 * LANE / self.each

    def draw(self, axes: Axes, slices: Sequence[Slice], row: tuple[float, float], computation: bool) -> None:
        """Draw the slices of one row: their colours, the waiting, and microbatch numbers."""
        if computation:
            axes.broken_barh([(0, (self.end - self.begin) * self.scale)], row, color=PAPER, linewidth=0)
        else:
            bundles = self._bundles(slices)
            for bundle in bundles:
                self._draw_bundle(axes, bundle, row)
            bundled = {one for bundle in bundles for one in bundle}
            slices = [one for one in slices if one not in bundled]
        bars = [((one.start - self.begin) * self.scale, (one.end - one.start) * self.scale) for one in slices]
        faces = [self.colours[_what(one.name)] for one in slices]
        # A white edge would hide the colour of a narrow bar; a light one has a dark edge, to be seen on white.
        narrow = [self._wide(one.end - one.start) <= HATCHED for one in slices]
        light = [lightness(face) > LIGHT and not computation for face in faces]
        edges = [at_lightness(face, DARKER) if one else "white" for face, one in zip(faces, light, strict=True)]
        widths = [0.4 if one else 0.3 * (not thin) for one, thin in zip(light, narrow, strict=True)]
        axes.broken_barh(bars, row, facecolors=faces, edgecolors=edges, linewidths=widths)
        for face in dict.fromkeys(faces):
            mine = [(bar, one) for bar, one, of in zip(bars, slices, faces, strict=True) if of == face]
            waits = [(bar[0], one.wait * self.scale) for bar, one in mine if self._wide(one.wait) > HATCHED]
            if waits:
                axes.broken_barh(waits, row, facecolors=_pale(face), edgecolors=LINES, hatch="///", linewidth=0.0)
        if computation:
            pairs = [(bar, action_of(one.name), face) for bar, one, face in zip(bars, slices, faces, strict=True)]
            boxes: list[Box] = [
                (start, start + length, face, str(action.microbatch))
                for (start, length), action, face in pairs
                if action
            ]
            digits = max((len(box[3]) for box in boxes), default=1)
            number_boxes(axes, row, boxes, (self.points, POINTS * self.each), digits)

    def _bundles(self, slices: Sequence[Slice]) -> list[list[Slice]]:
        """Collect the narrow slices of a lane that follow one another closely: two or more are a bundle."""
        bundles: list[list[Slice]] = [[]]
        for one in slices:
            last = bundles[-1]
            if self._wide(one.end - one.start) >= SLIVER or (last and self._wide(one.start - last[-1].end) > NEAR):
                bundles.append([])
            if self._wide(one.end - one.start) < SLIVER:
                bundles[-1].append(one)
        return [bundle for bundle in bundles if len(bundle) > 1]

    def _draw_bundle(self, axes: Axes, bundle: Sequence[Slice], row: tuple[float, float]) -> None:
        """Draw a line below slices, and at its start the time of all slices of a colour as one bar."""
        start = (bundle[0].start - self.begin) * self.scale
        end = (bundle[-1].end - self.begin) * self.scale
        top, height = row
        axes.broken_barh([(start, end - start)], (top + 0.9 * height, 0.1 * height), facecolors=GREY, linewidth=0)
        times: dict[str, float] = defaultdict(float)
        for one in bundle:
            times[self.colours[_what(one.name)]] += (one.end - one.start) * self.scale
        for colour, time in times.items():
            axes.broken_barh([(start, time)], row, facecolors=colour, linewidth=0)
            start += time

    def draw_arrows(self, axes: Axes) -> None:
        """Draw the chosen messages as arrows between their lanes of two ranks, below the numbers of the boxes."""
        place = {rank: index for index, rank in enumerate(self.trace.ranks)}
        look = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 6}
        for message in self.messages:
            top, height = self.row(0, message.track if message.track in self.tracks else self.tracks[-1])
            ends = []
            for time, rank in ((message.left, message.source), (message.came, message.dest)):
                ends.append(((time - self.begin) * self.scale, place[rank] + top + height / 2))
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=look, zorder=2.5)

    def name_rows(self, axes: Axes) -> None:
        """Name each rank at the middle of its rows, with its place in the mesh below, and each of its lanes."""
        ranks, mesh = self.trace.ranks, {axis: size for axis, size in self.trace.mesh.items() if size > 1}
        middle = (self.each - GAP) / 2 / self.each
        names = [f"rank {rank}" for rank in ranks]
        if mesh and math.prod(mesh.values()) == len(ranks):
            places = [[str(at) for at in coordinates(mesh, rank).values()] for rank in ranks]
            names = [f"{name}\n({', '.join(place)})" for name, place in zip(names, places, strict=True)]
            head = {"fontsize": SMALL, "ha": "left", "va": "bottom", "color": INK, "linespacing": 1.1}
            axes.annotate(f"rank\n({', '.join(mesh)})", (0.0, 1.0), xytext=(-POINTS * LEFT + 4, 2), **head, **HEADER)
        axes.set_yticks([place + middle for place in range(len(ranks))], names, fontsize=SMALL, linespacing=1.1)
        axes.tick_params(axis="y", length=0, pad=46)
        for place in range(len(ranks)):
            for track in self.tracks:
                top, height = self.row(place, track)
                look = {"fontsize": SMALL, "ha": "right", "va": "center", "color": INK, "annotation_clip": False}
                axes.annotate(_lane(track), (0.0, top + height / 2), xytext=(-4, 0), **look, **OFFSET)

    def _notes(self) -> list[str]:
        """Explain the names of the lanes, the bundles and the arrows."""
        axes = [axis_of(track) for track in self.tracks[1:] if axis_of(track) in ORDER and "," not in track]
        between = [axis_of(track) for track in self.tracks[1:] if "," in track]
        notes = [f"{', '.join(axes)}: collectives on that axis of the mesh"] if axes else []
        notes += [f"{axis} p2p: messages between single ranks" for axis in between]
        notes += ["world: collectives of all ranks"] if COMMUNICATION + " world" in self.tracks else []
        lines = ["; ".join(notes)] if notes else []
        if any(self._bundles(slices) for (_, track), slices in self.shown.items() if track in self.tracks[1:]):
            lines.append("messages too short to be told apart are added up; a line leads from the first to the last")
        if self.arrows:
            lanes = ", ".join(_lane(track) for track in self.arrows)
            lines.append(f"arrows: {len(self.messages)} message{'s' * (len(self.messages) != 1)} of {lanes}")
        return lines

    def _legend(self) -> list[Patch]:
        """Build the legend of what can be seen."""
        handles = [Patch(facecolor=colour, label=KINDS.get(name, name)) for name, colour in self.visible.items()]
        handles.append(Patch(facecolor=PAPER, label="rank does not compute"))
        if any(self._wide(one.wait) > HATCHED for slices in self.shown.values() for one in slices):
            look = {"edgecolor": LINES, "hatch": "///", "linewidth": 0.0}
            handles.append(Patch(facecolor=_pale(GREY), label="waiting for messages", **look))
        return handles


def _lane(track: str) -> str:
    """Name a lane: "compute", "tp", or "pp p2p" for what is sent and received between single ranks."""
    return "compute" if track == COMPUTATION else axis_of(track) + " p2p" * ("," in track)


def _pale(colour: str) -> str:
    """Mix a colour with white, as waiting is drawn."""
    return to_hex([PALE + (1 - PALE) * part for part in to_rgb(colour)])


def _what(name: str) -> str:
    """Name what a slice is coloured by: its name, or the kind of the action that it is."""
    action = action_of(name)
    return action.kind if action else name


def window(trace: Trace, steps: slice | None) -> tuple[float, float, str]:
    """Choose the stretch of time to show, in seconds, and its title, which counts steps from 1 as the trainer does."""
    marks = trace.steps()
    if steps is not None and not marks:
        raise UsageError("--steps: the trace marks no steps")
    if not marks or (steps is None and len(marks) <= WHOLE):
        slices = [one for tracks in trace.ranks.values() for track in tracks.values() for one in track]
        begin, end = min(one.start for one in slices), max(one.end for one in slices)
        title = "Timeline of the whole trace"
    else:
        chosen = range(1, len(marks) + 1)[steps or slice(-1, None)]
        if len(chosen) == 0:
            raise UsageError(f"--steps chooses none of the trace's {len(marks)} steps (0 to {len(marks) - 1})")
        first, last = chosen[0], chosen[-1]
        begin, end = marks[first - 1][0], marks[last - 1][1]
        span = f"step {first}" if first == last else f"steps {first} to {last}"
        title = f"Timeline of {span} of {len(marks)}"
    if not end > begin:
        raise UsageError("the trace holds nothing that took time")
    return begin, end, title


def time_unit(seconds: float) -> tuple[str, float]:
    """Choose the unit in which a time is written, and how many of it one second has."""
    return ("s", 1.0) if seconds >= 2 else ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)
