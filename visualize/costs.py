"""What a layout costs, before anything runs: memory against what a GPU has, seconds on the wires, bubbles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from visualize.plan import MEMORY, TIME
from visualize.style import GREY, INK, LINES, Picture, picture, tidy

Parts = Mapping[str, float]


def powers(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis with a mark at each of these values and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def plot_fit(panels: Mapping[str, Mapping[str, Parts]], room: float, most: float) -> Picture:
    """Bytes of the fullest rank, in parts: a bar for each layout of each panel, against the line of what there is.

    panels  {title: {layout: {part: bytes}}};  room  bytes of a GPU;  most  where a bar that is longer is cut
    """
    figure = picture(10.5, 1.0 + 0.4 * max(len(bars) for bars in panels.values()))
    for axes, (title, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for place, bar in enumerate(bars.values()):
            left, total = 0.0, sum(bar.values())
            for part, colour in MEMORY.items():
                width = min(bar[part], most - left)
                axes.barh(place, width / 1e9, 0.68, left / 1e9, color=colour, edgecolor="white", linewidth=0.6)
                left += width
            text = f"{total / 1e9:.0f}" + ("  $\\rightarrow$" if total > most else "")
            look = {"va": "center", "fontsize": 9, "color": INK, "weight": "bold" if total > room else "normal"}
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axes.annotate(text, (left / 1e9, place), xytext=(5, 0), textcoords="offset points", bbox=behind, **look)
        axes.axvline(room / 1e9, color=INK, linestyle="--", linewidth=1.4)
        axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, most / 1e9 * 1.16)
        axes.set_xlabel(f"GB on the fullest rank (dashed: {room / 1e9:.0f} GB)")
        axes.set_title(title, loc="left", fontsize=10)
        tidy(axes)
        axes.grid(visible=False, axis="y")
    handles = [Patch(color=colour, label=part) for part, colour in MEMORY.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def plot_wires(panels: Mapping[str, tuple[str, Mapping[int, Parts]]]) -> Picture:
    """Seconds of a step on the wires, by mesh axis, beside those of computation; both axes logarithmic.

    panels  {title: (what x is, {x: {"compute" or an axis: seconds}})}; what takes no time is not drawn.
    """
    figure = picture(10.5, 4.2)
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, (what, points)) in zip(drawn, panels.items(), strict=True):
        for part in ("compute", "tp", "dp", "pp"):
            curve = {x: seconds[part] for x, seconds in points.items() if seconds.get(part, 0.0) > 0}
            colour, line = (INK, "--") if part == "compute" else (TIME[part], "-")
            label = "computation" if part == "compute" else part
            axes.plot(list(curve), list(curve.values()), f"{line}o", color=colour, markersize=5, label=label)
        axes.set_yscale("log")
        powers(axes, list(points))
        axes.set_xlabel(what)
        axes.set_title(title, loc="left", fontsize=10)
        tidy(axes)
    drawn[0].set_ylabel("seconds of a step, nothing hidden")
    handles, labels = drawn[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def plot_bubbles(panels: Mapping[str, tuple[str, Mapping[str, Mapping[int, float]]]]) -> Picture:
    """Bubble fractions: {title: (what x is, {curve: {x: idle / total}})}."""
    figure = picture(10.5, 4.0)
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, (what, curves)) in zip(drawn, panels.items(), strict=True):
        for (name, curve), colour, mark in zip(curves.items(), LINES, "osD^vP", strict=False):
            axes.plot(list(curve), list(curve.values()), f"-{mark}", color=colour, markersize=5, label=name)
        axes.axhline(0.1, color=GREY, linestyle=":", linewidth=1.2)
        powers(axes, sorted({x for curve in curves.values() for x in curve}))
        axes.set_xlabel(what)
        axes.set_title(title, loc="left", fontsize=10)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    drawn[0].set_ylabel("bubble: idle / total")
    return figure
