"""Figures of chapter 8: layouts side by side, and placements of the axes on hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from visualize.mesh import LOOKS
from visualize.style import (
    GREY,
    INK,
    LINES,
    Picture,
    picture,
    tidy,
)

MARKS = "os^vDP"
EPSILON = 2.0**-52
REST = "#D9D9D9"  # what all bars have


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
