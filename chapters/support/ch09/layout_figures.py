"""Draw for chapter 9: one machine, the grid (9.1), what ranks hold (9.2), layouts (9.3), links (9.5), files (9.6)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from chapters.support.draw import finish, legend_outside, note, patches
from visualize import parse_trace, plot_timeline
from visualize.mesh import LOOKS
from visualize.plan import MEMORY
from visualize.style import GREY, INK, LINES, MINT, PAPER, SKY, YELLOW, Picture, picture, signed_percent, tidy

MARKS = "os^vDP"
EPSILON = 2.0**-52
REST = "#D9D9D9"  # what all bars have
FILES = (SKY, YELLOW, MINT, REST)  # the colour and the hatching of each rank's file
HATCHES = ("", "///", "...", "xxx")


def plot_machine(
    places: Mapping[str, tuple[Mapping[str, float], float | None]], room: float, used: float, most: float
) -> Picture:
    """Draw the memory of the fullest GPU in each layout, in parts, against what it has, and the seconds of a step.

    places  {layout: ({part: bytes}, seconds of a step, or None if it does not fit)}
    room    bytes of a GPU;  used  the share of them that a program can use;  most  where a longer bar is cut
    """
    figure = picture(10.0, 1.2 + 0.36 * len(places))
    axes = figure.add_subplot()
    for place, (parts, seconds) in enumerate(places.values()):
        left, total = 0.0, sum(parts.values())
        for part, colour in MEMORY.items():
            width = min(parts[part], most - left)
            axes.barh(place, width / 1e9, 0.68, left / 1e9, color=colour, edgecolor="white", linewidth=0.6)
            left += width
        verdict = "does not fit" if seconds is None else f"fits, {seconds:.1f} s a step"
        arrow = "$\\rightarrow$ " if total > most else ""
        weight = "normal" if seconds is None else "bold"
        look = {"weight": weight, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}
        note(axes, f"{arrow}{total / 1e9:.0f} GB, {verdict}", (left / 1e9, place), (5, 0), va="center", **look)
    axes.axvline(room / 1e9, color=INK, linestyle="--", linewidth=1.4)
    axes.axvline(used * room / 1e9, color=INK, linestyle=":", linewidth=1.4)
    axes.set_yticks(range(len(places)), list(places), fontsize=9)
    axes.invert_yaxis()
    label = f"GB on the fullest GPU (dashed: its {room / 1e9:.0f} GB; dotted: {used:.0%} of them)"
    finish(axes, xlim=(0, most / 1e9 * 1.42), xlabel=label, bars="y")
    legend_outside(figure, patches(MEMORY))
    return figure


def plot_held(cut: Sequence[int], whole: Sequence[int], updated: Sequence[int], names: Sequence[str]) -> Picture:
    """Draw for each rank the parameters that it holds, cut by tp and not cut, and below them those that it updates."""
    figure = picture(9.0, 3.9)
    axes = figure.add_subplot()
    for rank in range(len(names)):
        axes.barh(rank - 0.18, cut[rank], 0.34, color=SKY, edgecolor="white")
        axes.barh(rank - 0.18, whole[rank], 0.34, cut[rank], color=YELLOW, edgecolor="white")
        axes.barh(rank + 0.2, updated[rank], 0.3, color=MINT, edgecolor="white", hatch="///")
        note(
            axes,
            f"{cut[rank] + whole[rank]:,}",
            (cut[rank] + whole[rank], rank - 0.18),
            (5, 0),
            va="center",
            fontsize=8,
        )
        note(axes, f"{updated[rank]:,}", (updated[rank], rank + 0.2), (5, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    finish(axes, xlim=(0, 1.12 * max(map(sum, zip(cut, whole, strict=True)))), xlabel="parameters", bars="y")
    here = Patch(facecolor=MINT, edgecolor="white", hatch="///", label="updated here")
    legend_outside(figure, [*patches({"held, cut by tp": SKY, "held, the same in a tp row": YELLOW}), here])
    return figure


def plot_noticed(noticed: Mapping[str, set[str]], instruments: Sequence[str]) -> Picture:
    """Draw which instrument noticed each mistake: a filled box where it did."""
    figure = picture(7.0, 0.7 + 0.36 * len(noticed))
    axes = figure.add_subplot()
    for row, found in enumerate(noticed.values()):
        for column, instrument in enumerate(instruments):
            did = instrument in found
            box = Rectangle((column - 0.45, row - 0.4), 0.9, 0.8, facecolor=SKY if did else "white", edgecolor=GREY)
            axes.add_patch(box)
            axes.text(column, row, "noticed" if did else "silent", ha="center", va="center", fontsize=8, color=INK)
    axes.set_xticks(range(len(instruments)), instruments, fontsize=9)
    axes.set_yticks(range(len(noticed)), list(noticed), fontsize=9)
    axes.set(xlim=(-0.6, len(instruments) - 0.4), ylim=(len(noticed) - 0.45, -0.55))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def plot_grid(sizes: Mapping[str, int], per_host: int) -> Picture:
    """Draw the ranks of a mesh, joined along each axis, inside the boxes of their hosts.

    sizes     {"pp": ..., "dp": ..., "tp": ...}; rank = (pp*DP + dp)*TP + tp
    per_host  ranks of a host, in the order of their numbers; whole tp rows
    A tp row is drawn from left to right. The tp rows of one stage are shifted against one another, so that the lines
    along pp, straight down, pass between the boxes.
    """
    dp, tp, pp = sizes["dp"], sizes["tp"], sizes["pp"]
    if per_host % tp:
        raise ValueError(f"a host of {per_host} ranks does not hold whole rows of tp = {tp}")
    ranks = range(dp * tp * pp)
    spot = {r: (r % tp + (r // tp % dp) / dp, -(r // tp) - 0.35 * (r // per_host)) for r in ranks}
    strides = {"tp": (1, tp), "dp": (tp, dp), "pp": (tp * dp, pp)}
    bottom = spot[ranks[-1]][1]
    figure = picture(7.0, 1.1 + 0.72 * (1 - bottom))
    axes = figure.add_subplot()
    for first in ranks[::per_host]:
        last = min(first + per_host, len(ranks)) - 1
        top, base = spot[first][1] + 0.42, spot[last][1] - 0.42
        shape = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": PAPER, "edgecolor": GREY}
        host = FancyBboxPatch((-0.95, base), tp + 0.75 + (dp - 1) / dp, top - base, **shape)
        host.set_label(f"host {first // per_host}")
        axes.add_patch(host)
        axes.text(-0.88, top - 0.12, f"host {first // per_host}", va="top", fontsize=9, color=INK)
        stages = range(first // (tp * dp), last // (tp * dp) + 1)
        names = "\n".join(f"stage pp {stage}" for stage in stages)
        axes.text(-0.88, top - 0.37, names, va="top", fontsize=8, color=INK)
    for axis, (stride, size) in strides.items():
        colour, dashes = LOOKS[axis]
        for r in ranks:
            if r // stride % size < size - 1:
                (x, y), (other_x, other_y) = spot[r], spot[r + stride]
                axes.plot([x, other_x], [y, other_y], color=colour, linestyle=dashes, linewidth=2.2, zorder=2)
    for r, (x, y) in spot.items():
        box = Rectangle((x - 0.21, y - 0.27), 0.42, 0.54, facecolor="white", edgecolor=INK, linewidth=1.0, zorder=3)
        axes.add_patch(box)
        place = (r // (tp * dp), r // tp % dp, r % tp)
        axes.text(x, y + 0.09, str(r), ha="center", va="center", fontsize=11, color=INK, zorder=4)
        axes.text(x, y - 0.14, " ".join(map(str, place)), ha="center", va="center", fontsize=8, color=INK, zorder=4)
    axes.set_xlim(-1.0, tp - 0.1 + (dp - 1) / dp)
    axes.set_ylim(bottom - 0.75, 0.5)
    caption = "in each box: the rank and, below it, its coordinates pp dp tp"
    axes.text((tp - 1.1 + (dp - 1) / dp) / 2, bottom - 0.68, caption, ha="center", fontsize=8, color=INK)
    axes.axis("off")
    handles = [
        Line2D([], [], color=LOOKS[axis][0], linestyle=LOOKS[axis][1], linewidth=2.2, label=f"{axis}: {stride} apart")
        for axis, (stride, _) in strides.items()
    ]
    legend_outside(figure, handles, handlelength=3.2)
    return figure


def plot_pieces(files: Mapping[int, Mapping[str, Any]], shape: tuple[int, int]) -> Picture:
    """Draw which rank writes each element of a matrix, and each rank's file.

    files  {rank: its piece}: elements `start` to `stop`, in row-major order, of part `part` of `parts` along dim 1
    shape  of the matrix
    """
    rows, columns = shape
    figure = picture(7.0, 0.8 + 0.36 * max(rows, 1.3 * len(files)))
    left, right = figure.subplots(1, 2, width_ratios=(columns, 1.25 * columns))
    owner = np.full(shape, -1)
    for y, (rank, file) in enumerate(files.items()):
        width = columns // file["parts"]
        for element in range(file["start"], file["stop"]):
            row, column = element // width, file["part"] * width + element % width
            owner[row, column] = rank
            _element(left, column, row, rank, element)
            _element(right, element - file["start"], 1.6 * y + 0.6, rank, element)
        text = f"rank {rank}: part {file['part']} of {file['parts']}, elements {file['start']}:{file['stop']}"
        right.text(0, 1.6 * y + 0.5, text, ha="left", va="bottom", fontsize=8, color=INK)
    _outline(left, owner)
    left.set_xlim(-0.1, columns + 0.1)
    left.set_ylim(rows + 0.1, -0.1)
    left.set_title("the matrix of the serial model", fontsize=9, color=INK)
    right.set_xlim(-0.1, max(file["stop"] - file["start"] for file in files.values()) + 0.1)
    right.set_ylim(1.6 * len(files) + 0.1, -0.1)
    right.set_title("what each rank writes", fontsize=9, color=INK)
    left.axis("off")
    right.axis("off")
    return figure


def _element(axes: Axes, x: float, y: float, rank: int, index: int) -> None:
    """Draw one element in the colour and hatching of the rank that writes it."""
    look = {"facecolor": FILES[rank % len(FILES)], "hatch": HATCHES[rank % len(HATCHES)], "edgecolor": GREY}
    axes.add_patch(Rectangle((x, y), 1, 1, linewidth=0.6, label=f"rank {rank}", **look))
    plate = {"boxstyle": "round,pad=0.12", "facecolor": look["facecolor"], "edgecolor": "none"}
    axes.text(x + 0.5, y + 0.5, str(index), ha="center", va="center", fontsize=8, color=INK, bbox=plate)


def _outline(axes: Axes, owner: np.ndarray) -> None:
    """Draw the borders between the ranks' elements."""
    rows, columns = owner.shape
    for row in range(rows):
        for column in range(columns):
            if column + 1 < columns and owner[row, column] != owner[row, column + 1]:
                axes.plot([column + 1] * 2, [row, row + 1], color=INK, linewidth=2.0)
            if row + 1 < rows and owner[row, column] != owner[row + 1, column]:
                axes.plot([column, column + 1], [row + 1] * 2, color=INK, linewidth=2.0)


def plot_layouts(
    runs: Mapping[str, tuple[Sequence[float], Sequence[float]]], single: Sequence[float], bound: Sequence[float]
) -> Picture:
    """Draw the losses of layouts on the single device's curve, and the differences of their parameters.

    runs   {label: (loss of each step, largest relative difference of the parameters to one device after each step)}
    bound  the largest difference that counts as rounding, after each step
    """
    figure = picture(9.0, 6.4)
    top, bottom = figure.subplots(2, 1, sharex=True)
    steps = range(len(single))
    top.plot(steps, single, color=INK, linewidth=1.4, zorder=1)
    for place, ((label, (losses, apart)), colour) in enumerate(zip(runs.items(), LINES * len(runs), strict=False)):
        # Equal losses lie on one point: hollow marks, one inside the other.
        size = 4.0 + 2.4 * (len(runs) - 1 - place)
        look = {"color": colour, "marker": MARKS[place % len(MARKS)], "fillstyle": "none", "markeredgewidth": 1.4}
        top.plot(steps, losses, linestyle="", markersize=size, label=label, **look)
        bottom.plot(steps, apart, linewidth=1.0, markersize=size, **look)
    bottom.plot(steps, bound, color=GREY, linestyle="--", linewidth=1.6)
    note(bottom, "the bound for rounding", (steps[-1], bound[-1]), (0, -6), ha="right", va="top", fontsize=9)
    bottom.axhline(EPSILON, color=GREY, linestyle=":", linewidth=1.2)
    note(bottom, "one rounding, $2^{-52}$", (steps[-1], EPSILON), (0, -4), ha="right", va="top", fontsize=9)
    bottom.set_yscale("log")
    bottom.set_ylim(EPSILON / 8, 8 * max(bound))
    bottom.yaxis.set_major_locator(LogLocator())
    bottom.yaxis.set_minor_locator(NullLocator())
    bottom.set_ylabel("parameters: largest relative\ndifference to one device")
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    top.set_ylabel("loss (nats per token)")
    handles, labels = top.get_legend_handles_labels()
    handles, labels = [Line2D([], [], color=INK, linewidth=1.4), *handles], ["one device", *labels]
    top.legend(handles, labels, frameon=False, fontsize=9, loc="lower left", labelspacing=0.7)
    for axes in (top, bottom):
        tidy(axes)
    return figure


def plot_placements(ideal: float, times: Mapping[tuple[str, str], float]) -> Picture:
    """Draw seconds of a step with one mesh axis on the slow link, one group of bars for each kind of slow link.

    ideal  seconds with every axis on the fast link
    times  {(axis, slow link): seconds}
    """
    links = dict.fromkeys(link for _, link in times)
    figure = picture(9.0, 1.3 + 0.42 * (len(times) + len(links)))
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    for link in links:
        for axis, seconds in [(axis, seconds) for (axis, on), seconds in times.items() if on == link]:
            axes.barh(place, ideal * 1e3, height=0.72, color=REST)
            axes.barh(place, (seconds - ideal) * 1e3, left=ideal * 1e3, height=0.72, color=LOOKS[axis][0])
            text = f"{seconds * 1e3:.0f} ms, {signed_percent(seconds / ideal)}"
            note(axes, text, (seconds * 1e3, place), (6, 0), va="center", fontsize=9)
            ticks.append((place, f"{axis} on {link}"))
            place += 1
        place += 0.6
    axes.axvline(ideal * 1e3, color=INK, linewidth=1.0)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    finish(axes, xlim=(0, 1.14e3 * max(times.values())), xlabel="time of one step (ms, model clock)", bars="y")
    colours = {f"every axis on the fast link: {ideal * 1e3:.0f} ms": REST}
    slow = dict.fromkeys(axis for axis, _ in times)
    colours |= {f"added by {axis} between hosts": LOOKS[axis][0] for axis in slow}
    legend_outside(figure, patches(colours), ncols=2)
    return figure


def plot_two_steps(trace: dict[str, Any], between_hosts: tuple[str, str]) -> Picture:
    """Draw two traced steps of dp 2 x tp 2 x pp 2 after one another, each with another mesh axis between the hosts.

    between_hosts  that axis in each step
    """
    figure = plot_timeline(parse_trace(trace))
    first, second = between_hosts
    title = f"dp 2 x tp 2 x pp 2, 1F1B, 4 microbatches. Between the hosts: {first} (left), {second} (right)"
    figure.axes[0].set_title(title, loc="left", fontsize=10)
    return figure
