"""Figures of chapter 6: how matrices are cut, activations, three links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from visualize.style import (
    GREY,
    INK,
    LINES,
    YELLOW,
    Picture,
    picture,
    tidy,
)

RANKS = (*LINES, GREY, YELLOW)


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
