"""The device mesh of a traced run: which ranks talk to which, along which axis, and how many bytes they send."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.patheffects import withStroke

from minipar.errors import UsageError

from .style import AXIS_COLOURS, INK, PAPER, Picture, byte_label, byte_unit, picture
from .timeline import Trace, coordinates

AXES = ("tp", "cp", "dp", "pp")  # fastest first, as in minipar.comm.mesh
# By axis, fastest first; ep is among the ranks of dp and cp. Lightness 65, 8, 88, 32 and 48, and a pattern each: told
# apart in grey, and with no colour at all.
LOOKS: dict[str, tuple[str, Any]] = {
    "tp": (AXIS_COLOURS["tp"], "-"),
    "cp": (AXIS_COLOURS["cp"], (0, (5.0, 1.0, 1.0, 1.0))),
    "ep": (AXIS_COLOURS["ep"], (0, (4.0, 1.5))),
    "dp": (AXIS_COLOURS["dp"], (0, (2.4, 1.0))),
    "pp": (AXIS_COLOURS["pp"], (0, (1.0, 1.0))),
}
NAMES = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "dp": "data parallel"}
NAMES |= {"pp": "pipeline"}
MOST = 64  # ranks in one picture
LABELLED = 20  # pairs of ranks whose bytes are written at their line
THINNEST, WIDEST = 1.0, 6.0  # points
NEGLIGIBLE = 0.01  # of the bytes of the widest line on the same axis: not drawn
# Inches: the width of a rank's box, a line of its text, the room between boxes, and the lane beside a row of boxes in
# which lines pass that join ranks further apart than neighbours.
BOX, LINE, ROOM, LANE = 1.3, 0.15, 0.8, 0.5
SMALL = 8.0  # points: the smallest text, which can be read at half a page's width

Place = tuple[float, float]  # inches, y upwards


@dataclass(frozen=True)
class MeshTraffic:
    """The bytes and messages that the ranks of a mesh sent one another over all steps of a trace.

    shape  {"pp": PP, "dp": DP, "cp": CP, "tp": TP}, perhaps without cp; rank = ((pp*DP + dp)*CP + cp)*TP + tp
    steps  how many steps the trace has (1 if it marks none); what `per_step` divides by
    links  {(axis, source, dest): [messages, bytes]}, world ranks
    """

    shape: dict[str, int]
    steps: int
    links: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape.values())

    @cached_property
    def unit(self) -> tuple[str, int]:
        """The unit of all bytes in a picture: that of the most that one rank sends on an axis in a step."""
        sent = (self.sent(axis, rank)[1] for axis in LOOKS for rank in range(self.ranks))
        return byte_unit(max(map(self.per_step, sent)))

    @property
    def axes(self) -> list[str]:
        """The axes of more than one rank, fastest first. Gradients of context-parallel ranks travel on dp."""
        several = {axis for axis in ("dp", "ep") if self.sent(axis)[0]}
        return [axis for axis in LOOKS if self.shape.get(axis, 1) > 1 or axis in several]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Compute {"pp": ., "dp": ., "cp": ., "tp": .} of a world rank."""
        return coordinates(self.shape, rank)

    def sent(self, axis: str, rank: int | None = None) -> tuple[int, int]:
        """Sum (messages, bytes) sent on an axis, by one rank or by all."""
        counts = [count for (a, source, _), count in self.links.items() if a == axis and rank in (None, source)]
        return sum(messages for messages, _ in counts), sum(nbytes for _, nbytes in counts)

    def pairs(self, axis: str) -> Iterator[tuple[int, int, int, int]]:
        """Yield (rank, higher rank, bytes up, bytes down) of each pair of ranks that communicates on an axis."""
        for low, high in sorted({(min(s, d), max(s, d)) for a, s, d in self.links if a == axis}):
            up, down = (self.links.get((axis, *pair), [0, 0])[1] for pair in ((low, high), (high, low)))
            yield low, high, up, down

    def per_step(self, total: int) -> int | float:
        """Divide a total over all steps by their number; the mean is an int where it is whole."""
        mean = Fraction(total, self.steps)
        return int(mean) if mean.denominator == 1 else float(mean)


def mesh_traffic(trace: Trace, name: str = "the trace") -> MeshTraffic:
    """Add up a trace's messages. UsageError if it does not say its mesh, or if a message does not fit the mesh."""
    old = "written by an older minipar? Trace again"
    if set(trace.mesh) | {"cp"} != set(AXES) or any(size < 1 for size in trace.mesh.values()):
        raise UsageError(f"{name} does not say its mesh: not of minipar.train --trace, or {old}")
    shape = {axis: trace.mesh[axis] for axis in reversed(AXES) if axis != "cp" or trace.mesh.get("cp", 1) > 1}
    traffic = MeshTraffic(shape, max(1, len(trace.steps())))
    product = f"{'*'.join(shape)} = {'*'.join(map(str, shape.values()))} = {traffic.ranks}"
    if len(trace.ranks) != traffic.ranks or list(trace.ranks) != list(range(traffic.ranks)):
        raise UsageError(f"{name} has {len(trace.ranks)} ranks, but its mesh {product}")
    for message in (message for message in trace.messages if message.axis in {*shape, "ep"}):
        if message.nbytes is None:
            raise UsageError(f"{name} does not say how many bytes its messages have: {old}")
        source, dest = traffic.coordinates(message.source), traffic.coordinates(message.dest)
        moved = {axis for axis in source if source[axis] != dest[axis]}
        if moved != {message.axis} and not (message.axis in ("dp", "ep") and moved and moved <= {"dp", "cp"}):
            raise UsageError(
                f"{name} has a message on {message.axis} from rank {message.source} to rank {message.dest}, which do "
                f"not lie along {message.axis} in a mesh {product}"
            )
        count = traffic.links.setdefault((message.axis, message.source, message.dest), [0, 0])
        count[0] += 1
        count[1] += message.nbytes
    return traffic


def _axes(traffic: MeshTraffic) -> list[str]:
    return [axis for axis in LOOKS if axis in traffic.shape or traffic.sent(axis)[0]]


def mesh_values(traffic: MeshTraffic) -> dict[str, Any]:
    """Collect for JSON bytes and messages over all steps, by axis, by rank and axis, and by pair of ranks and axis."""

    def counts(axis: str, rank: int | None = None) -> dict[str, int]:
        return dict(zip(("messages", "bytes"), traffic.sent(axis, rank), strict=True))

    return {
        "mesh": traffic.shape,
        "steps": traffic.steps,
        "axes": {
            axis: counts(axis) | {"bytes_per_step": traffic.per_step(counts(axis)["bytes"])} for axis in _axes(traffic)
        },
        "ranks": [
            {"rank": rank} | traffic.coordinates(rank) | {"sent": {axis: counts(axis, rank) for axis in _axes(traffic)}}
            for rank in range(traffic.ranks)
        ],
        "links": [
            {"axis": axis, "source": source, "dest": dest, "messages": messages, "bytes": nbytes}
            for (axis, source, dest), (messages, nbytes) in sorted(traffic.links.items())
        ],
    }


def plot_mesh(traffic: MeshTraffic) -> Picture:
    """Draw the ranks of a mesh as boxes, the bytes per step between them as lines, and below them bytes per axis.

    The two slowest axes lie across and down (the one with more ranks across), the others on a diagonal between the two,
    tensor-parallel ranks nearest. Two axes make a grid, one a circle. A line is as wide as the bytes of both
    directions, from THINNEST points up; its heads are at the ranks that receive.
    """
    if traffic.ranks > MOST:
        product = "*".join(traffic.shape)
        raise UsageError(f"{product} = {traffic.ranks} ranks: more than {MOST} cannot be drawn; --json has their bytes")
    height = 0.50 + LINE * max(1, len(traffic.axes))
    places = layout(traffic.shape, (BOX, height))
    across, down = directions(traffic.shape)
    side = BOX / 2 + 0.3 + _lane(traffic.shape, down)
    top = height / 2 + 0.25 + _lane(traffic.shape, across) + 0.4 * ("ep" in traffic.axes)  # an arc
    left, right = min(x for x, _ in places.values()) - side, max(x for x, _ in places.values()) + BOX / 2 + 0.3
    low, high = min(y for _, y in places.values()) - height / 2 - 0.3, max(y for _, y in places.values()) + top
    missing = max(0.0, 7.6 - (right - left)) / 2
    table = 0.22 * len(traffic.axes) + 0.92
    left, right, low, high = left - missing, right + missing, low - table, high + 0.4
    figure = picture(right - left, high - low)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))  # its unit is the inch
    axes.set(xlim=(left, right), ylim=(low, high))
    axes.set_axis_off()

    sizes = ", ".join(f"{axis} = {size}" for axis, size in traffic.shape.items())
    mean = f", mean of {traffic.steps} steps" if traffic.steps > 1 else ""
    title = f"{traffic.ranks} ranks: {sizes}. Bytes sent per step{mean}"
    axes.text(left + 0.2, high - 0.28, title, fontsize=10.5, color=INK)
    _stages(axes, traffic, places, height)
    boxes = {rank: _box(axes, traffic, rank, place, height) for rank, place in places.items()}
    _links(axes, traffic, places, boxes, height)
    _table(axes, traffic, left + 0.2, low + table - 0.25)
    return figure


def directions(shape: dict[str, int]) -> tuple[str, str]:
    """Choose the axes that run across the picture and down: the two slowest of those that have several ranks."""
    used = [axis for axis in reversed(AXES) if shape.get(axis, 1) > 1][:2]
    across, down, *_ = dict.fromkeys([*sorted(used, key=lambda axis: -shape[axis]), "pp", "dp"])
    return across, down


def _lane(shape: dict[str, int], axis: str) -> float:
    """Compute the space for lines next to the boxes along an axis: 0 where all ranks are neighbours, or on a circle."""
    return LANE if _is_grid(shape) and shape[axis] > 2 else 0.0


def layout(shape: dict[str, int], box: tuple[float, float]) -> dict[int, Place]:
    """Place the middle of each rank's box of (width, height), in inches."""
    width, height = box
    total = math.prod(shape.values())
    if not _is_grid(shape) and total > 2:  # one ring: the ranks around it, rank 0 at the top
        radius = (width + ROOM) / (2 * math.sin(math.pi / total))
        angles = [math.pi / 2 - 2 * math.pi * rank / total for rank in range(total)]
        return {rank: (1.1 * radius * math.cos(a), 0.8 * radius * math.sin(a)) for rank, a in enumerate(angles)}
    across, down = directions(shape)
    right, below = width + ROOM + _lane(shape, down), height + 0.6 + _lane(shape, across)
    steps = dict.fromkeys(shape, (0.0, 0.0)) | {across: (right, 0.0), down: (0.0, -below)}
    diagonal = [axis for axis in AXES if shape.get(axis, 1) > 1 and axis not in (across, down)]
    if diagonal:
        # On the diagonal every row of boxes and every column is one rank wide: lines across and down pass freely.
        x, y, places_before = width + max(0.25, _lane(shape, down)), height + LANE, 1
        for axis in diagonal:
            steps[axis] = (places_before * x, -places_before * y)
            places_before *= shape[axis]
        steps[across] = (right + (places_before - 1) * x, 0.0)
        steps[down] = (0.0, -below - (places_before - 1) * y)
    places = {}
    for rank in range(total):
        moves = [(steps[axis], place) for axis, place in coordinates(shape, rank).items()]
        places[rank] = (sum(step[0] * n for step, n in moves), sum(step[1] * n for step, n in moves))
    return places


def _is_grid(shape: dict[str, int]) -> bool:
    """Tell whether several axes have several ranks."""
    return sum(size > 1 for size in shape.values()) > 1


def _fields(traffic: MeshTraffic) -> bool:
    """Tell whether the stages of the pipeline have grey fields: each has several ranks."""
    return _is_grid(traffic.shape) and traffic.shape["pp"] > 1


def _stages(axes: Axes, traffic: MeshTraffic, places: dict[int, Place], height: float) -> None:
    """Draw a field behind each stage of a pipeline, and its name below."""
    if not _fields(traffic):
        return
    for stage in range(traffic.shape["pp"]):
        members = [place for rank, place in places.items() if traffic.coordinates(rank)["pp"] == stage]
        (left, right), (low, high) = [(min(values), max(values)) for values in zip(*members, strict=True)]
        corner = (left - BOX / 2 - 0.13, low - height / 2 - 0.28)
        size = (right - left + BOX + 0.26, high - low + height + 0.41)
        axes.add_patch(Rectangle(corner, *size, facecolor=PAPER, edgecolor="none", zorder=0))
        look = {"fontsize": SMALL, "weight": "bold", "color": INK, "va": "baseline", "zorder": 1}
        axes.text(corner[0] + 0.08, corner[1] + 0.07, f"stage {stage}", **look)


def _box(axes: Axes, traffic: MeshTraffic, rank: int, place: Place, height: float) -> FancyBboxPatch:
    """Draw one rank: its number, its coordinates, and the bytes that it sends on each axis."""
    x, y = place
    corner = (x - BOX / 2 + 0.06, y - height / 2 + 0.06)
    shape = "round,pad=0.06,rounding_size=0.08"
    size = (BOX - 0.12, height - 0.12)
    box = FancyBboxPatch(corner, *size, boxstyle=shape, facecolor="white", edgecolor=INK, linewidth=1.0, zorder=4)
    axes.add_patch(box)
    top = y + height / 2
    look = {"ha": "center", "va": "center", "color": INK, "zorder": 5}
    axes.text(x, top - 0.14, f"rank {rank}", fontsize=10, weight="bold", **look)
    coordinates = " ".join(f"{axis} {number}" for axis, number in traffic.coordinates(rank).items())
    axes.text(x, top - 0.31, coordinates, fontsize=SMALL, **look)
    for number, axis in enumerate(traffic.axes):
        line = top - 0.50 - LINE * number
        colour, dashes = LOOKS[axis]
        axes.plot([x - 0.57, x - 0.32], [line, line], color=colour, linestyle=dashes, linewidth=1.8, zorder=5)
        text = f"{axis} {byte_label(traffic.per_step(traffic.sent(axis, rank)[1]), traffic.unit)}"
        axes.text(x - 0.27, line, text, fontsize=SMALL, **look | {"ha": "left"})
    return box


def _links(
    axes: Axes, traffic: MeshTraffic, places: dict[int, Place], boxes: dict[int, FancyBboxPatch], height: float
) -> None:
    """Draw a line for each pair of ranks that sends more than a negligible part of the widest line on its axis."""
    pairs = [(axis, *pair) for axis in traffic.axes for pair in traffic.pairs(axis)]
    most = max((up + down for *_, up, down in pairs), default=0)
    least = {axis: NEGLIGIBLE * max(up + down for a, _, _, up, down in pairs if a == axis) for axis, *_ in pairs}
    drawn = [pair for pair in pairs if pair[3] + pair[4] > least[pair[0]]]
    for axis, low, high, up, down in drawn:
        colour, dashes = LOOKS[axis]
        width = THINNEST + (WIDEST - THINNEST) * (up + down) / most
        heads = ("<|" if down > least[axis] else "", "|>" if up > least[axis] else "")
        size = 9 + 2.6 * width
        ends, route, middle = _route(traffic, axis, low, high, places, height)
        way = {"patchA": boxes[low], "patchB": boxes[high], "connectionstyle": route, "mutation_scale": size}
        # Dashes and dots would break the heads: the line ends inside them, and they are drawn by themselves.
        shrink = [1.5 + (0.25 * size if head else 0.0) for head in heads]
        look = {"color": colour, "linestyle": dashes, "linewidth": width, "capstyle": "butt", "joinstyle": "miter"}
        line = FancyArrowPatch(*ends, **way, **look, arrowstyle="-", shrinkA=shrink[0], shrinkB=shrink[1])
        line.set(zorder=2, gid=f"{axis} {low} {high}")
        heads_over = 2.0
        if route.startswith("bar"):  # it crosses straight lines: white beside it shows that it passes over them
            line.set(zorder=2.6, path_effects=[withStroke(foreground="white", linewidth=width + 4)])
            heads_over = 2.7
        axes.add_patch(line)
        look = {"arrowstyle": "-".join(heads), "color": colour, "linewidth": 0, "zorder": heads_over}
        axes.add_patch(FancyArrowPatch(*ends, **way, **look))
        if len(drawn) <= LABELLED:
            label = byte_label(traffic.per_step(up + down), traffic.unit)
            text = axes.text(*middle, label, fontsize=SMALL, ha="center", va="center", color=INK, zorder=3)
            text.set_path_effects([withStroke(foreground="white", linewidth=3)])


def _route(
    traffic: MeshTraffic, axis: str, low: int, high: int, places: dict[int, Place], height: float
) -> tuple[tuple[Place, Place], str, Place]:
    """Choose the ends of a line, matplotlib's connection style between them, and the middle of its label.

    Neighbours are joined straight; others through the lane above or on the left of their row, or in an arc next to
    their diagonal, and they leave their boxes next to the middle. The gradients of dp x cp go beside the lines of cp.
    """
    (x0, y0), (x1, y1) = places[low], places[high]
    x, y, length = (x0 + x1) / 2, (y0 + y1) / 2, math.hypot(x1 - x0, y1 - y0)
    position = traffic.coordinates(low)
    moved = [each for each, at in traffic.coordinates(high).items() if at != position[each]]
    between = traffic.coordinates(high)[axis] - position[axis] - 1 if moved == [axis] else 1
    depth = sum(size > 1 for size in traffic.shape.values())
    straight = (places[low], places[high])
    if depth < 2:
        out = math.hypot(x, y) or 1.0
        if moved != [axis]:  # gradients, beside the line of cp
            return straight, "arc3,rad=-0.25", (x - 0.4 * (y1 - y0) / length, y + 0.4 * (x1 - x0) / length)
        return straight, "arc3", (x + 0.42 * x / out, y + 0.2 * y / out) if traffic.ranks > 2 else (x, y + 0.2)
    if between == 0 and depth < 3:
        return straight, "arc3", (x, y + 0.18) if y0 == y1 else (x + 0.4, y)
    if between == 0:
        # Where no other line passes: between two groups of tensor-parallel ranks, below the upper rank, right of it.
        if y0 == y1:
            near = (at for at in places if _same(traffic, low, at, directions(traffic.shape)))
            last = max(places[at][0] for at in near)
            return straight, "arc3", (last + (BOX + ROOM) / 2, y + 0.15)
        return straight, "arc3", (x - 0.36, y0 - height / 2 - 0.18) if x0 == x1 else (x + 0.42, y + 0.1)
    if moved != [axis] and depth < 3:  # gradients: left of the line of cp or below it, or across the gap between rows
        left, below = 0.42 * (x0 == x1), 0.28 * (y0 == y1)
        ends = ((x0 - left, y0 - below), (x1 - left, y1 - below))
        if y0 == y1 or x0 == x1:
            return ends, "arc3", (x - left, y - below - 0.14 * (y0 == y1))
        return ends, "arc3", (0.6 * x0 + 0.4 * x1, 0.6 * y0 + 0.4 * y1)  # not where two of them cross
    lane = 0.14 + 0.26 * between / max(1, traffic.shape.get(axis, 2) - 2)
    if moved == [axis] and y0 == y1:
        over = height / 2 + lane
        ends = ((x0 + 0.25, y0), (x1 - 0.25, y1))
        return ends, f"bar,fraction={-over / (length - 0.5)}", (x, y + over + 0.1)
    if moved == [axis] and x0 == x1:
        over = BOX / 2 + lane
        ends = ((x0, y0 - 0.15), (x1, y1 + 0.15))
        return ends, f"bar,fraction={over / (length - 0.3)}", (x - over, y)
    swing = 1.3 + 0.5 * between
    middle = (x + 0.3 + swing / 2 * (y0 - y1) / length, y + swing / 2 * (x1 - x0) / length)
    return ((x0 + 0.3, y0), (x1 + 0.3, y1)), f"arc3,rad={-swing / length}", middle


def _same(traffic: MeshTraffic, rank: int, other: int, axes: tuple[str, ...]) -> bool:
    """Tell whether two ranks have the same place on these axes."""
    return all(traffic.coordinates(rank)[axis] == traffic.coordinates(other)[axis] for axis in axes)


def _table(axes: Axes, traffic: MeshTraffic, left: float, top: float) -> None:
    """Write the bytes and messages of each axis, and how to read the picture."""
    columns = (left + 0.75, left + 3.55, left + 5.45, left + 7.2)
    look = {"fontsize": 8.5, "color": INK, "va": "center"}
    heads = ("axis", "all ranks send", "one rank sends", "messages, all ranks")
    for x, head in zip(columns, heads, strict=True):
        axes.text(x, top, head, ha="left" if x == columns[0] else "right", weight="bold", **look)
    for line, axis in enumerate(traffic.axes, start=1):
        y = top - 0.22 * line
        colour, dashes = LOOKS[axis]
        axes.plot([left, left + 0.6], [y, y], color=colour, linestyle=dashes, linewidth=3)
        messages, nbytes = traffic.sent(axis)
        ranks = [traffic.sent(axis, rank)[1] for rank in range(traffic.ranks)]
        labels = [byte_label(traffic.per_step(total), traffic.unit) for total in (min(ranks), max(ranks))]
        span = " to ".join(dict.fromkeys(labels))
        experts = 1 + len({dest for each, source, dest in traffic.links if (each, source) == ("ep", 0)})
        size = str(traffic.shape.get(axis, experts))
        size += f" x {traffic.shape.get('cp')}" * (axis == "dp" and "cp" in traffic.shape)
        name = f"{axis}, {NAMES[axis]}, {size} {'stages' if axis == 'pp' else 'ranks'}"
        count = f"{round(traffic.per_step(messages), 1):,}"
        cells = (name, byte_label(traffic.per_step(nbytes), traffic.unit), span, count)
        for x, cell in zip(columns, cells, strict=True):
            axes.text(x, y, cell, ha="left" if x == columns[0] else "right", **look)
    notes = [
        "In a box: the bytes that this rank sends. At a line: those of both directions; a wider line is more bytes.",
        f"Not joined: pairs that send {100 * NEGLIGIBLE:g} % or less of the widest line on their axis."
        + " A grey field: the ranks of one pipeline stage." * _fields(traffic),
    ]
    for line, note in enumerate(notes, start=len(traffic.axes) + 1):
        axes.text(left, top - 0.22 * line, note, fontsize=SMALL, color=INK, va="center")
