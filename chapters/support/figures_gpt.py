"""Figures of chapters 1 and 2: an autograd graph, shares of a step, memory over backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

from visualize.style import (
    BLUE,
    GREY,
    INK,
    LINES,
    VERMILION,
    Picture,
    picture,
    tidy,
)

Moment = tuple[str, int, int]  # where, bytes held there, the most held since the moment before


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
