"""Draw for chapter 10: predicted over measured (10.3, 10.5), and what depends on each constant (10.6)."""

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from chapters.support.draw import finish, legend_outside, note, patches
from visualize.style import BLUE, INK, LINES, ORANGE, Picture, picture, signed_percent


def plot_predictions(groups: Mapping[str, Mapping[str, float]], band: float) -> Picture:
    """Draw predicted time over printed time, a point for each row of each group; `band` is the tolerance."""
    figure = picture(8.5, 1.1 + 0.26 * sum(len(rows) for rows in groups.values()))
    axes = figure.add_subplot()
    axes.axvspan(1 - band, 1 + band, color="#EEF3F7")
    axes.axvline(1.0, color=INK, linewidth=1.2)
    names: list[str] = []
    for (group, rows), colour, mark in zip(groups.items(), LINES, "osD^vP", strict=False):
        places = [len(names) + k for k in range(len(rows))]
        axes.plot(list(rows.values()), places, mark, color=colour, markersize=7, linestyle="", label=group)
        for place, ratio in zip(places, rows.values(), strict=True):
            side, shift = ("right", (-8, 0)) if ratio < 1 else ("left", (8, 0))
            note(axes, signed_percent(ratio), (ratio, place), shift, va="center", ha=side, fontsize=8)
        names += rows
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    reach = max([1.5 * band, *(1.25 * abs(ratio - 1) for rows in groups.values() for ratio in rows.values())])
    label = f"predicted time / printed time (band: {band:.0%})"
    finish(axes, xlim=(1 - reach, 1 + reach), xlabel=label, bars="y")
    legend_outside(figure, axes.get_legend_handles_labels()[0])
    return figure


def _marks(low: float, high: float) -> list[float]:
    """Choose marks of a logarithmic axis: 1, 10, 100, ..., or more of them where fewer than three fit."""
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        marks = [digit * 10.0**power for power in range(-9, 10) for digit in digits]
        inside = [mark for mark in marks if low <= mark <= high]
        if len(inside) > 2:
            break
    return inside


def plot_points(panels: Mapping[str, Sequence[tuple[float, float]]], band: float) -> Picture:
    """Draw predicted against measured, both axes logarithmic: {quantity: [(predicted, measured), ...]}.

    On the line they are equal; `band` is shaded.
    """
    figure = picture(10.5, 3.9)
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (quantity, points) in zip(drawn, panels.items(), strict=True):
        predicted, measured = zip(*points, strict=True)
        ends = min(predicted + measured) / 1.5, max(predicted + measured) * 1.5
        axes.fill_between(ends, [(1 - band) * x for x in ends], [(1 + band) * x for x in ends], color="#E3EBF2")
        axes.plot(ends, ends, color=INK, linewidth=1.0)
        axes.plot(measured, predicted, "o", color=BLUE, markersize=6, alpha=0.8, linestyle="")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator(_marks(*ends)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_locator(NullLocator())
        finish(axes, quantity, size=9, xlim=ends, ylim=ends, aspect="equal", xlabel="measured")
    drawn[0].set_ylabel(f"predicted (band: {band:.0%})")
    return figure


def plot_tornado(panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, bool]]]]) -> Picture:
    """Draw the change of the predicted time with each constant, the largest effect of the first panel on top.

    panels  {question: {constant: {change, as "-20 %": (relative change of time, whether another layout is best now)}}}
    """
    first = next(iter(panels.values()))
    order = sorted(first, key=lambda name: -max(abs(moved) for moved, _ in first[name].values()))
    changes, colours = list(first[order[0]]), (ORANGE, BLUE)
    figure = picture(10.5, 1.3 + 0.34 * len(order))
    widest = max(abs(moved) for effects in panels.values() for one in effects.values() for moved, _ in one.values())
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (question, effects) in zip(drawn, panels.items(), strict=True):
        for place, name in enumerate(order):
            for number, (moved, other) in enumerate(effects[name].values()):
                height = place + 0.19 * (2 * number - 1)
                axes.barh(height, moved, 0.36, color=colours[number % 2])
                if other:
                    axes.plot(moved + (0.05 if moved >= 0 else -0.05) * widest, height, "*", color=INK, markersize=7)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        reach = (-1.2 * widest, 1.2 * widest)
        finish(axes, question, size=9, xlim=reach, xlabel="change of the predicted time of a step", bars="y")
    drawn[0].set_yticks(range(len(order)), order, fontsize=9)
    drawn[0].invert_yaxis()
    star = Line2D([], [], color=INK, marker="*", linestyle="", label="another layout becomes the best")
    named = dict(zip(changes, colours, strict=True))
    legend_outside(figure, [*patches(named), star])
    return figure
