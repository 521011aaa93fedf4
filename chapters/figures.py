"""Figures that one chapter draws: its model, memory, buckets, tensor-parallel cuts, and layouts side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path as Curve
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from visualize.mesh import LOOKS
from visualize.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LINES,
    VERMILION,
    YELLOW,
    Picture,
    byte_label,
    picture,
    tidy,
)

Moment = tuple[str, int, int]  # where, bytes held there, the most held since the moment before
RANKS = (*LINES, GREY, YELLOW)
MARKS = "os^vDP"
EPSILON = 2.0**-52
REST = "#D9D9D9"  # what all bars have


# ---- chapter 1: autograd and GPT -------------------------------------------------------------------------------------


def plot_graph(nodes: Sequence[str], edges: Sequence[tuple[int, int]]) -> Picture:
    """Draw the nodes of an autograd graph from the first (top) to the last, and an arc for each edge (user, input).

    Arcs between neighbours are thin and grey, longer ones (an array used again later) thick and blue. An edge that
    leads to a later node, which no graph numbered in the order of its making has, would be red.
    """
    figure = picture(8.6, 0.7 + 0.27 * len(nodes))
    axes = figure.add_subplot()
    longest = max((abs(user - used) for user, used in edges), default=1)
    for user, used in edges:
        reach = abs(user - used) / longest
        bend = Curve([(0, user), (reach, user), (reach, used), (0, used)], [Curve.MOVETO] + 3 * [Curve.CURVE4])
        colour = VERMILION if used >= user else GREY if user - used <= 2 else BLUE
        axes.add_patch(PathPatch(bend, facecolor="none", edgecolor=colour, linewidth=1.2 if colour == GREY else 2.2))
    axes.plot([0] * len(nodes), range(len(nodes)), "o", color=INK, markersize=6, clip_on=False, zorder=3)
    axes.set_yticks(range(len(nodes)), [f"{text}  {number:>2}" for number, text in enumerate(nodes)])
    axes.tick_params(axis="y", length=0, pad=8)
    axes.set_xticks([])
    axes.set_xlim(0, 1)
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    for x, name, start, end in ((0.80, "forward", 0.70, 0.30), (0.94, "backward", 0.30, 0.70)):
        axes.annotate(
            "",
            xy=(x, end),
            xytext=(x, start),
            xycoords="axes fraction",
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.5},
        )
        axes.text(x, 0.74, name, transform=axes.transAxes, ha="center", fontsize=9)
    return figure


def plot_shares(bars: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw a bar of length 100 % for each entry, cut into its parts: {bar: {part: amount}}, the same parts in each."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    figure = picture(9.0, 1.0 + 0.55 * len(bars))
    axes = figure.add_subplot()
    for place, bar in enumerate(bars.values()):
        total, left = sum(bar.values()), 0.0
        for part, colour in zip(parts, LINES * len(parts), strict=False):
            share = 100 * bar.get(part, 0.0) / total
            axes.barh(place, share, left=left, height=0.66, color=colour, edgecolor="white", linewidth=0.8)
            if share >= 4:
                axes.text(left + share / 2, place, f"{share:.0f}", ha="center", va="center", color="white", fontsize=9)
            left += share
    for part, colour in zip(parts, LINES * len(parts), strict=False):
        axes.barh(0, 0, color=colour, label=part)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share (%)")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper center", ncols=len(parts), frameon=False, fontsize=9)
    return figure


def plot_memory(runs: Mapping[str, Sequence[Moment]], turn: str | None = None) -> Picture:
    """Draw bytes held at named moments (line) and the peaks between (dots): {run: moments}, the same moments in each.

    `turn` names the moment at which forward ends and backward begins.
    """
    figure = picture(9.0, 4.2)
    axes = figure.add_subplot()
    names: list[str] = []
    for (label, moments), colour in zip(runs.items(), LINES * len(runs), strict=False):
        names = [name for name, _, _ in moments]
        held = [now / 2**20 for _, now, _ in moments]
        peaks = [peak / 2**20 for _, _, peak in moments]
        text = f"{label}: held (peak {max(peaks):.1f} MiB)"
        axes.plot(range(len(names)), held, "-", color=colour, linewidth=2.0, label=text)
        axes.fill_between(range(len(names)), held, color=colour, alpha=0.12, linewidth=0)
        places = [place - 0.5 for place in range(1, len(names))]
        axes.plot(places, peaks[1:], "v", color=colour, markersize=6, label=f"{label}: most held in between")
    if turn is not None:
        axes.axvline(names.index(turn), color=INK, linestyle=":", linewidth=1.0)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("memory (MiB)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    tidy(axes)
    return figure


# ---- chapter 3: data parallelism -------------------------------------------------------------------------------------


def plot_bucket_sizes(rows: Sequence[Mapping[str, Any]], naive: float, computation: float) -> Picture:
    """Draw seconds of a step against the size of its buckets, between two levels.

    rows         {"bucket_bytes", "seconds", "buckets"}, one point each
    naive        the step with one all-reduce after backward: nothing hidden
    computation  the step without any communication: everything hidden
    """
    rows = sorted(rows, key=lambda row: row["bucket_bytes"])
    figure = picture(7.5, 4.2)
    axes = figure.add_subplot()
    sizes, times = [row["bucket_bytes"] for row in rows], [row["seconds"] * 1e3 for row in rows]
    axes.axhline(naive * 1e3, color=VERMILION, linestyle="--", linewidth=1.5, label="one all-reduce after backward")
    axes.plot(sizes, times, "o-", color=BLUE, linewidth=1.8, label="buckets (their number above each point)")
    axes.axhline(computation * 1e3, color=GREEN, linestyle="--", linewidth=1.5, label="computation alone")
    for row, size, time in zip(rows, sizes, times, strict=True):
        axes.annotate(
            str(row["buckets"]), (size, time), xytext=(0, 8), textcoords="offset points", ha="center", color=INK
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: byte_label(value))
    axes.set_ylim(0, 1.15 * max(*times, naive * 1e3))
    axes.set_xlabel("bucket size")
    axes.set_ylabel("time of a step (ms)")
    axes.legend(frameon=False, loc="lower right")
    tidy(axes)
    return figure


# ---- chapter 5: tensor parallelism -----------------------------------------------------------------------------------


def plot_cuts(matrices: Sequence[tuple[str, int, int, int, int]], ranks: int) -> Picture:
    """Draw matrices to scale, each part in the colour of the rank that holds it.

    matrices: (name, rows, columns, dim along which it is cut, groups of equal stretches that are cut each).
    """
    gap = 0.45 * min(min(rows, columns) for _, rows, columns, _, _ in matrices)
    tallest = max(rows for _, rows, _, _, _ in matrices)
    total = sum(columns for _, _, columns, _, _ in matrices) + gap * len(matrices)
    figure = picture(8.5, 0.9 + 8.3 * 1.12 * tallest / total)
    axes = figure.add_subplot()
    left = 0.0
    for name, rows, columns, dim, groups in matrices:
        pieces = groups * ranks
        for piece in range(pieces):
            step = (rows, columns)[dim] / pieces
            corner = (left, -(piece + 1) * step) if dim == 0 else (left + piece * step, -rows)
            size = (columns, step) if dim == 0 else (step, rows)
            colour = RANKS[piece % ranks % len(RANKS)]
            axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="white", linewidth=0.6))
        for group in range(1, groups):
            place = left + group * columns / groups
            axes.plot([place, place], [0, -rows], color=INK, linewidth=1.6)
        axes.text(left + columns / 2, 0.008 * total, name, ha="center", va="bottom", fontsize=9)
        left += columns + gap
    axes.set_xlim(-0.01 * total, total)
    axes.set_ylim(-tallest * 1.02, tallest * 0.1)
    axes.set_aspect("equal")
    axes.set_axis_off()
    handles = [Rectangle((0, 0), 1, 1, facecolor=RANKS[r % len(RANKS)], label=f"rank {r}") for r in range(ranks)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(ranks, 8), frameon=False, fontsize=9)
    return figure


def plot_activations(bars: Mapping[str, Mapping[str, float]], paper: Mapping[str, float]) -> Picture:
    """Draw the bytes that a layer keeps for backward, per token and hidden element: a bar for each entry, in parts.

    A mark shows the paper's formula for the same entry.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    figure = picture(9.0, 1.4 + 0.42 * len(bars))
    axes = figure.add_subplot()
    for place, bar in enumerate(bars.values()):
        left = 0.0
        for part, colour in zip(parts, LINES * len(parts), strict=False):
            width = bar.get(part, 0.0)
            axes.barh(place, width, left=left, height=0.62, color=colour, edgecolor="white", linewidth=0.8)
            left += width
        end = max(left, paper.get(list(bars)[place], 0.0))
        axes.annotate(f"{left:.1f}", (end, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)
    marks = [(paper[name], place) for place, name in enumerate(bars) if name in paper]
    axes.plot(
        *zip(*marks, strict=True), "|", color=INK, markersize=20, markeredgewidth=2.5, label="the paper's formula"
    )
    for part, colour in zip(parts, LINES * len(parts), strict=False):
        axes.barh(0, 0, color=colour, label=part)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(*(sum(bar.values()) for bar in bars.values()), *paper.values()))
    axes.set_xlabel("bytes kept per layer, divided by s b h")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper center", ncols=len(parts) + 1, frameon=False, fontsize=9, markerscale=0.5)
    return figure


def plot_links(links: Mapping[str, Mapping[str, Any]], computation: Mapping[int, float]) -> Picture:
    """Draw seconds of a step against tensor-parallel ranks, one curve for each link, above computation alone.

    links        {name: {"points": {t: seconds} to be marked, "curve": {t: seconds} by the formula,
                 "crossing": the t at which communication takes as long as computation}}
    computation  {t: seconds} without communication
    """
    figure = picture(8.2, 4.8)
    axes = figure.add_subplot()
    single = computation[min(computation)] * 1e3
    axes.axhline(single, color=GREY, linestyle=":", linewidth=1.4, label="one device")
    axes.plot(
        list(computation), [s * 1e3 for s in computation.values()], "--", color=INK, linewidth=1.4, label="computation"
    )
    for (name, link), colour in zip(links.items(), LINES, strict=False):
        curve, points = link["curve"], link["points"]
        axes.plot(list(curve), [s * 1e3 for s in curve.values()], "-", color=colour, linewidth=1.8, label=name)
        axes.plot(list(points), [s * 1e3 for s in points.values()], "o", color=colour, markersize=6)
        if min(curve) <= link["crossing"] <= max(curve):
            height = np.exp(np.interp(np.log(link["crossing"]), np.log(list(curve)), np.log(list(curve.values()))))
            axes.plot(link["crossing"], height * 1e3, "D", color=colour, markersize=10, markeredgecolor=INK, zorder=4)
    axes.plot([], [], "D", color="white", markeredgecolor=INK, markersize=9, label="communication = computation")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [t for t in (1, 2, 3, 4, 6, 8, 16, 32, 64) if t <= max(computation)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator([m * 10**e for e in range(-3, 4) for m in (1, 2, 5)]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tensor-parallel ranks t")
    axes.set_ylabel("time of a step (ms)")
    tidy(axes)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


# ---- chapter 7: 3D parallelism ---------------------------------------------------------------------------------------


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
    look = {"textcoords": "offset points", "ha": "right", "va": "top", "color": INK, "fontsize": 9}
    bottom.annotate("the bound for rounding", (steps[-1], bound[-1]), xytext=(0, -6), **look)
    bottom.axhline(EPSILON, color=GREY, linestyle=":", linewidth=1.2)
    bottom.annotate("one rounding, $2^{-52}$", (steps[-1], EPSILON), xytext=(0, -4), **look)
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
    top.legend(handles, labels, frameon=False, fontsize=9, loc="upper right", labelspacing=0.7)
    for axes in (top, bottom):
        tidy(axes)
    return figure


def plot_placements(ideal: float, links: Mapping[str, Mapping[str, float]], notes: Mapping[str, str]) -> Picture:
    """Draw seconds of a step with one mesh axis on the slow link, one group of bars for each kind of slow link.

    ideal  seconds with every axis on the fast link
    links  {slow link: {axis: seconds}}
    notes  {axis: its name in the legend}
    """
    figure = picture(9.0, 1.3 + 0.42 * sum(len(times) + 1 for times in links.values()))
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    for link, times in links.items():
        for axis, seconds in times.items():
            axes.barh(place, ideal * 1e3, height=0.72, color=REST)
            axes.barh(place, (seconds - ideal) * 1e3, left=ideal * 1e3, height=0.72, color=LOOKS[axis][0])
            text = f"{seconds * 1e3:.0f} ms, {seconds / ideal - 1:+.0%}"
            spot = (seconds * 1e3, place)
            axes.annotate(text, spot, xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
            ticks.append((place, f"{axis} on {link}"))
            place += 1
        place += 0.6
    axes.axvline(ideal * 1e3, color=INK, linewidth=1.0)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14e3 * max(seconds for times in links.values() for seconds in times.values()))
    axes.set_xlabel("time of one step (ms, model clock)")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    handles = [Patch(color=REST, label=f"every axis on the fast link: {ideal * 1e3:.0f} ms")]
    handles += [Patch(color=LOOKS[axis][0], label=note) for axis, note in notes.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure
