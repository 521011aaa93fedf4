"""Draw schedules with the longest path through each of them, for chapters 7 and 8."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from chapters.support.draw import box, legend_outside
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Time
from visualize.boxes import KINDS
from visualize.style import COLOURS, INK, Picture, picture

Named = tuple[str, int, int]  # an action of a hand-written list: kind, microbatch, stage
PHASES = {"warm-up": ("#DDDDDD", "///"), "steady state": ("#FFFFFF", ""), "cool-down": ("#DDDDDD", "\\\\\\")}


@dataclass(frozen=True)
class MarkedPath:
    """A schedule of one stage per rank, with the chain of actions that is marked in it."""

    times: Mapping[Named, tuple[Time, Time]]  # start and end of each action
    path: Sequence[Named]
    pieces: Sequence[tuple[str, Time]]  # the name and the length of each piece of the path, in order
    ahead: Sequence[int] | None = None  # forwards of each rank's warm-up; the phases are drawn if this is given

    def __post_init__(self) -> None:
        spans = [self.times[action] for action in self.path]
        makespan = max(end for _, end in self.times.values())
        lengths = sum(end - start for start, end in spans), sum(length for _, length in self.pieces)
        if lengths != (makespan, makespan):
            raise UsageError(f"the path and its pieces take {lengths}, but the schedule {makespan}")


def plot_paths(panels: Mapping[str, MarkedPath], note: str) -> Picture:
    """Draw schedules one above the other: boxes with their microbatch, a thick frame around each action of the path.

    Below each schedule are the pieces of its path. `panels` gives each schedule its title; `note` names the times.
    """
    figure = picture(7.0, 0.75 + sum(0.95 + _rows(one) * (0.42 if one.ahead else 0.27) for one in panels.values()))
    heights = [1.6 + _rows(one) * (1.5 if one.ahead else 1.0) for one in panels.values()]
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    span = max(float(end) for one in panels.values() for _, end in one.times.values())
    for axes, (title, one) in zip(grid, panels.items(), strict=True):
        axes.set_xlim(-0.004 * span, 1.004 * span)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.set_xticks([])
        _draw_path(axes, one)
    kinds = [kind for kind in KINDS if any(kind == named[0] for one in panels.values() for named in one.times)]
    handles = [Patch(facecolor=COLOURS[kind], label=KINDS[kind]) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=2, label="longest path"))
    legend_outside(figure, handles, "lower center", fontsize=8.5)
    grid[-1].set_xlabel(f"time ({note}; number in a box: its microbatch)", fontsize=8.5, color=INK)
    return figure


def _rows(one: MarkedPath) -> int:
    return 1 + max(stage for _, _, stage in one.times)


def _draw_path(axes: Axes, one: MarkedPath) -> None:
    """Draw the ranks' boxes, their phases below them, and the pieces of the path below all ranks."""
    rows, step = _rows(one), 1.5 if one.ahead else 1.0
    marked = set(one.path)
    for (kind, microbatch, rank), (begin, end) in one.times.items():
        start, length, y = float(begin), float(end - begin), rank * step
        look = {"edgecolor": "white", "linewidth": 0.8, "zorder": 2}
        box(axes, (start, y + 0.05), (length, 0.9), COLOURS[kind], str(microbatch), **look)
        if (kind, microbatch, rank) in marked:
            frame = {"fill": False, "edgecolor": INK, "linewidth": 2.0, "zorder": 4}
            axes.add_patch(Rectangle((start, y + 0.05), length, 0.9, gid="path", **frame))
    for rank in range(rows):
        slots = sorted(times for named, times in one.times.items() if named[2] == rank)
        if one.ahead:
            _draw_phases(axes, slots, one.ahead[rank], rank * step + 1.03)
    bottom, at = rows * step, 0.0
    axes.set_ylim(bottom + 1.5, -0.1)
    axes.set_yticks([rank * step + 0.5 for rank in range(rows)], [f"rank {rank}" for rank in range(rows)], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    for name, length in one.pieces:
        end = at + float(length)
        arrow = {"arrowstyle": "<->", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (end, bottom + 0.4), (at, bottom + 0.4), arrowprops=arrow, annotation_clip=False)
        for place in (at, end):
            axes.plot([place, place], [0, bottom + 0.55], color=INK, linewidth=0.7, linestyle=":", zorder=1)
        axes.text((at + end) / 2, bottom + 0.62, name, ha="center", va="top", fontsize=8.5, color=INK, gid="piece")
        at = end


def _draw_phases(axes: Axes, slots: Sequence[tuple[Time, Time]], ahead: int, y: float) -> None:
    """Draw a strip with warm-up, steady state and cool-down below a rank's boxes, from its first action to its last."""
    turns = [slots[0][0], slots[ahead][0], slots[len(slots) - ahead - 1][1], slots[-1][1]]
    for (name, (colour, hatch)), start, end in zip(PHASES.items(), turns[:-1], turns[1:], strict=True):
        if end > start:
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": "#888888", "linewidth": 0.6, "zorder": 2}
            axes.add_patch(Rectangle((float(start), y), float(end - start), 0.34, gid=name, **look))
            label = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            if float(end - start) >= 3:
                text = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "zorder": 3, "bbox": label}
                axes.text(float(start + end) / 2, y + 0.17, name, **text)
