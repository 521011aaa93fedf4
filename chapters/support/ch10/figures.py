"""Draw for chapter 10: what fits, wires, bubbles, the order of decisions, scaling, predictions, sensitivity."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from chapters.support.draw import finish, legend_outside, note, patches
from minipar.plan.layout import Layout
from minipar.plan.rank_bytes import Memory
from minipar.plan.step_time import StepTime
from visualize.plan import MEMORY, TIME
from visualize.style import BLUE, GREY, INK, LINES, ORANGE, PAPER, Picture, ink_on, picture

Parts = Mapping[str, float]


def powers(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with a mark at each of these values and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def lost_and_fastest(
    times: Mapping[Layout, StepTime], fitting: Sequence[Layout], quiet: Sequence[Layout], busy: Sequence[Layout]
) -> dict[str, Parts]:
    """Return {layout: {part: seconds}} for a layout that each test drops, the middle one by seconds, and the fastest.

    fitting, quiet, busy  the layouts that are left after the tests of memory, bandwidth and bubble
    """
    ordered = sorted(fitting, key=lambda one: times[one].total)
    waits = [one for one in ordered if one not in set(quiet)]
    idles = [one for one in ordered if one in set(quiet) - set(busy)]
    chosen = {
        "lost to bandwidth": waits[len(waits) // 2],
        "lost to the bubble": idles[len(idles) // 2],
        "the fastest": ordered[0],
    }
    return {f"{name}:\ndp {one.dp}, tp {one.tp}, pp {one.pp}": asdict(times[one]) for name, one in chosen.items()}


def draw_funnel(
    every: Sequence[Layout],
    fitting: Sequence[Layout],
    quiet: Sequence[Layout],
    busy: Sequence[Layout],
    times: Mapping[Layout, StepTime],
) -> Picture:
    """Draw the layouts that are left after the tests of memory, bandwidth and bubble, and a step of three of them."""
    left = {
        "all": len(every),
        "fit into memory": len(fitting),
        "wait for messages\nat most 10 %": len(quiet),
        "idle at most 10 %": len(busy),
    }
    return plot_funnel(left, lost_and_fastest(times, fitting, quiet, busy))


def plot_funnel(left: Mapping[str, int], bars: Mapping[str, Parts]) -> Picture:
    """Draw how many layouts are left after each test, and what a step is spent on in some of them.

    left  {test: number of layouts};  bars  {layout: {part: seconds}}
    """
    figure = picture(10.5, 3.4)
    counts, steps = figure.subplots(1, 2, width_ratios=[1, 1.35])
    for place, count in enumerate(left.values()):
        counts.barh(place, count, 0.68, color=BLUE)
        note(counts, f"{count:,}", (count, place), (5, 0), va="center", fontsize=9)
    counts.set_yticks(range(len(left)), list(left), fontsize=9)
    finish(counts, "layouts that are left", size=9, xlim=(0, 1.25 * max(left.values())), bars="y")
    for place, parts in enumerate(bars.values()):
        start = 0.0
        for part, colour in TIME.items():
            steps.barh(place, parts[part], 0.68, start, color=colour, edgecolor="white", linewidth=0.6)
            start += parts[part]
        note(steps, f"{start:.1f} s", (start, place), (5, 0), va="center", fontsize=9)
    steps.set_yticks(range(len(bars)), list(bars), fontsize=9)
    longest = max(sum(parts[part] for part in TIME) for parts in bars.values())
    finish(steps, "seconds of a step, by what they are spent on", size=9, xlim=(0, 1.15 * longest), bars="y")
    for axes in (counts, steps):
        axes.invert_yaxis()
    legend_outside(figure, patches(TIME), "lower center")
    return figure


def plot_memory(panels: Mapping[str, Mapping[str, Memory]], room: float, most: float) -> Picture:
    """Draw what the planner says that a rank holds, {title: {layout: bytes by part}}, as `plot_fit` does."""
    parts = {}
    for title, bars in panels.items():
        parts[title] = {label: asdict(held) for label, held in bars.items()}
    return plot_fit(parts, room, most)


def plot_mistakes(choices: Mapping[str, Mapping[str, Any]], room: float, most: float) -> Picture:
    """Draw what each mistake's choice holds, as the mistaken planner claims and really, as `plot_fit` does."""
    bars = {}
    for side in ("claimed", "really"):
        bars[side] = {name.replace("_", " "): choice[side] for name, choice in choices.items()}
    return plot_fit(bars, room, most)


def plot_fit(panels: Mapping[str, Mapping[str, Parts]], room: float, most: float) -> Picture:
    """Draw bytes of the fullest rank, in parts: a bar for each layout of each panel, against the line of what there is.

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
            weight = "bold" if total > room else "normal"
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            note(axes, text, (left / 1e9, place), (5, 0), va="center", fontsize=9, weight=weight, bbox=behind)
        axes.axvline(room / 1e9, color=INK, linestyle="--", linewidth=1.4)
        axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
        axes.invert_yaxis()
        label = f"GB on the fullest rank (dashed: {room / 1e9:.0f} GB)"
        finish(axes, title, size=9, xlim=(0, most / 1e9 * 1.16), xlabel=label, bars="y")
    legend_outside(figure, patches(MEMORY))
    return figure


def plot_wires(panels: Mapping[str, tuple[str, Mapping[int, Parts]]]) -> Picture:
    """Draw seconds of a step on the wires, by mesh axis, next to those of computation; both axes are logarithmic.

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
        powers(axes, list(points))
        finish(axes, title, size=9, yscale="log", xlabel=what)
    drawn[0].set_ylabel("seconds of a step, nothing hidden")
    legend_outside(figure, drawn[0].get_legend_handles_labels()[0])
    return figure


def plot_bubbles(panels: Mapping[str, tuple[str, Mapping[str, Mapping[int, float]]]]) -> Picture:
    """Draw bubble fractions: {title: (what x is, {curve: {x: idle / total}})}."""
    figure = picture(10.5, 4.0)
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, (what, curves)) in zip(drawn, panels.items(), strict=True):
        for (name, curve), colour, mark in zip(curves.items(), LINES, "osD^vP", strict=False):
            axes.plot(list(curve), list(curve.values()), f"-{mark}", color=colour, markersize=5, label=name)
        axes.axhline(0.1, color=GREY, linestyle=":", linewidth=1.2)
        powers(axes, sorted({x for curve in curves.values() for x in curve}))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        finish(axes, title, legend="best", size=9, xlabel=what)
    # Only now: the panels share their limits, and a lower limit alone would fix the upper one to the first panel's.
    highest = max(value for _, curves in panels.values() for curve in curves.values() for value in curve.values())
    drawn[0].set_ylim(0, 1.05 * highest)
    drawn[0].set_ylabel("bubble: idle / total")
    return figure


def plot_families(families: Mapping[str, Mapping[int, float]]) -> Picture:
    """Draw seconds over those of the fastest family: {family: {GPUs: seconds}}; what does not fit is not there."""
    figure = picture(8.5, 3.6)
    axes = figure.add_subplot()
    sizes = sorted({gpus for curve in families.values() for gpus in curve})
    least = {gpus: min(curve[gpus] for curve in families.values() if gpus in curve) for gpus in sizes}
    for (name, curve), colour, mark in zip(families.items(), LINES, "osD^vP", strict=False):
        times = [seconds / least[gpus] for gpus, seconds in curve.items()]
        axes.plot(list(curve), times, f"-{mark}", color=colour, markersize=6, label=name)
    powers(axes, sizes)
    finish(axes, legend="best", size=9, xlabel="GPUs", ylabel="seconds / those of the fastest")
    return figure


def plot_scaling(panels: Mapping[str, Mapping[str, Mapping[int, tuple[float, float]]]]) -> Picture:
    """Draw tokens per second against GPUs, with the model FLOPs utilization (MFU) at each point.

    A dashed line shows where every GPU would be worth as much as the first ones.

    panels  {kind of GPU: {model: {gpus: (tokens per second, MFU)}}}
    """
    figure = picture(10.5, 4.8)
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (kind, models) in zip(drawn, panels.items(), strict=True):
        for (model, points), colour, mark in zip(models.items(), LINES, "osD^vP", strict=False):
            gpus, tokens = list(points), [speed for speed, _ in points.values()]
            axes.plot(gpus, tokens, f"-{mark}", color=colour, markersize=6, label=model)
            axes.plot(gpus, [tokens[0] * n / gpus[0] for n in gpus], "--", color=colour, linewidth=1.0)
            for n, (speed, mfu) in points.items():
                # On the side of the point where the dashed line is not.
                if speed > tokens[0] * n / gpus[0]:
                    note(axes, f"{mfu:.0%}", (n, speed), (-4, 5), ha="right", va="bottom", fontsize=8)
                else:
                    note(axes, f"{mfu:.0%}", (n, speed), (4, -5), ha="left", va="top", fontsize=8)
        axes.set_yscale("log")
        powers(axes, sorted({n for points in models.values() for n in points}))
        axes.margins(x=0.12, y=0.1)
        finish(axes, xlabel=f"{kind} GPUs (at each point: MFU)")
    drawn[0].set_ylabel("tokens per second")
    handles = drawn[0].get_legend_handles_labels()[0]
    handles.sort(key=lambda line: max(line.get_ydata()), reverse=True)  # as the lines lie, the smallest model on top
    meaning = "if each GPU were as fast as in the smallest cluster"
    dashed = Line2D([], [], color=INK, linestyle="--", linewidth=1.0, label=meaning)
    legend_outside(figure, [*handles, dashed])
    return figure


def plot_spending(bars: Mapping[str, Mapping[str, tuple[Mapping[str, float], float]]]) -> Picture:
    """Draw the parts of a step's time in the whole: {group: {layout: ({part: seconds}, MFU)}}."""
    count = sum(len(group) for group in bars.values())
    figure = picture(10.5, 4.6)
    axes = figure.add_subplot()
    left, names, places = 0.0, [], []
    for title, group in bars.items():
        axes.text(left + (len(group) - 1) / 2, 1.09, title, ha="center", va="bottom", fontsize=10, color=INK)
        for name, (seconds, mfu) in group.items():
            bottom, total = 0.0, sum(seconds.values())
            for part, colour in TIME.items():
                height = seconds[part] / total
                axes.bar(left, height, 0.78, bottom, color=colour, edgecolor="white", linewidth=0.5)
                if height > 0.055:
                    look = {"ha": "center", "va": "center", "fontsize": 8, "color": ink_on(colour)}
                    axes.text(left, bottom + height / 2, f"{height:.0%}", **look)
                bottom += height
            axes.text(left, 1.015, f"{mfu:.0%}", ha="center", va="bottom", fontsize=9, weight="bold", color=INK)
            names.append(name)
            places.append(left)
            left += 1.0
        left += 0.6
    axes.set_xticks(places, names, fontsize=8 if count > 8 else 9)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    label = "of a step's time (above the bars: MFU)"
    finish(axes, xlim=(-0.7, left - 0.9), ylim=(0, 1.16), ylabel=label, bars="x")
    legend_outside(figure, patches(TIME), "lower center")
    return figure


# ---- is it right? ---------------------------------------------------------------------------------------------------


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


# What the assumptions of the planner mean (minipar/plan/cluster.py), in words short enough for a label.
MEANINGS = {
    "products": "products: part of the peak",
    "half_work": "products: work at half of that",
    "copies": "copies: part of the bandwidth",
    "links": "links: part of the bandwidth",
    "cards": "links between hosts: part of that",
    "forward_traffic": "bytes moved in forward",
    "backward_traffic": "bytes moved in backward",
    "update_traffic": "bytes moved by the optimizer",
    "all_reduce": "time of an all-reduce",
    "alpha_inside": "latency inside a host",
    "alpha_between": "latency between hosts",
    "contention": "cost of hidden messages",
    "memory_used": "part of the memory used",
}


def plot_tornado(panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, bool]]]]) -> Picture:
    """Draw the change of the predicted time with each constant, the largest effect of the first panel on top.

    A constant that moves nothing by 0.05 % and changes no layout in any panel is left out.

    panels  {question: {constant: {change, as "-20 %": (relative change of time, whether another layout is best now)}}}
    """
    largest: dict[str, dict[str, float]] = {}  # by question and constant
    drawn_names = set()
    for question, effects in panels.items():
        largest[question] = {}
        for name, changed in effects.items():
            largest[question][name] = max(abs(moved) for moved, _ in changed.values())
            if largest[question][name] >= 0.0005 or any(other for _, other in changed.values()):
                drawn_names.add(name)
    first_question = next(iter(panels))
    first = panels[first_question]
    some = [name for name in first if name in drawn_names]
    order = sorted(some, key=lambda name: -largest[first_question][name])
    changes = list(first[order[0]])
    colours = (ORANGE, BLUE)
    figure = picture(10.5, 1.3 + 0.34 * len(order))
    widest = max(max(by_name.values()) for by_name in largest.values())
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
    drawn[0].set_yticks(range(len(order)), [MEANINGS[name] for name in order], fontsize=9)
    drawn[0].invert_yaxis()
    star = Line2D([], [], color=INK, marker="*", linestyle="", label="another layout becomes the best")
    named = dict(zip(changes, colours, strict=True))
    legend_outside(figure, [*patches(named), star])
    return figure


# ---- the order of decisions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """A step of planning: what must hold, and what to change if it does not, cheapest first."""

    name: str
    conditions: Sequence[str]
    remedies: Sequence[str]


DECISIONS = (
    Decision(
        "1  MEMORY",
        (
            r"state:  $(2 + 2 + 12)$ bytes per parameter, ZeRO divides by $d$",
            r"+ in flight $\times\;L/p$ layers $\times\;BT\,(10h + (24h + 5aT)/t)$",
            r"$\leq$ 92 % of the GPU's memory",
        ),
        (
            "ZeRO-1, sequence parallelism",
            "flash attention, selective recompute",
            "more tp inside the host, or pp",
            "ZeRO-3",
            "full recompute (a third more work)",
        ),
    ),
    Decision(
        "2  BANDWIDTH",
        (
            r"tp:  $t \leq g$  and  $(t-1)\,S\beta' / (3h) \ll 1$",
            r"dp:  $BT \geq S\beta$ tokens in a microbatch",
            r"ZeRO-3:  $g\,\nu \geq S\beta$ tokens on a host",
        ),
        ("less tp", "larger microbatches", "ZeRO-1 instead of ZeRO-3", r"tp $\times$ pp if $S\beta > T + g\,\nu$"),
    ),
    Decision(
        "3  BUBBLE",
        (r"$((p-1)/v)\;/\;(m + (p-1)/v) \ll 1$", r"with $m$ = samples of the global batch / $(B\,d)$"),
        ("smaller microbatches, fewer replicas", "interleaving ($v$), ZB-H1", "less pp, more tp or ZeRO"),
    ),
)
LAST = "simulate the best five, measure them"


def plot_decisions(decisions: Sequence[Decision] = DECISIONS, last: str = LAST) -> Picture:
    """Draw the decisions from top to bottom: a box with the conditions, and beside it a box with the remedies.

    Where the conditions hold the way leads down, to `last` after the last decision; where they do not, to the right.
    """
    line, gap, left, right = 0.29, 0.5, (0.05, 4.6), (5.15, 8.45)
    heights = [line * (0.65 + max(len(one.conditions) + 1, len(one.remedies) + 1)) for one in decisions]
    total = sum(heights) + gap * len(decisions) + 2 * line
    figure = picture(8.5, total + 0.1)
    axes = figure.add_subplot()
    axes.set(xlim=(0, 8.5), ylim=(-total - 0.05, 0.05))
    axes.axis("off")
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3}
    top = 0.0
    for one, height in zip(decisions, heights, strict=True):
        for (start, end), fill, title, lines in (
            (left, "#DCEBF5", one.name, one.conditions),
            (right, "#FBF3DD", "else in this order, then 1 again", one.remedies),
        ):
            axes.add_patch(Rectangle((start, top - height), end - start, height, facecolor=fill, edgecolor=INK))
            axes.text(start + 0.12, top - 0.75 * line, title, va="center", fontsize=10.5, weight="bold", color=INK)
            for number, text in enumerate(lines, start=1):
                axes.text(start + 0.12, top - (0.85 + number) * line, text, va="center", fontsize=10, color=INK)
        middle, centre = top - height / 2, sum(left) / 2
        axes.annotate("", (right[0], middle), (left[1], middle), arrowprops=arrow)
        axes.text((left[1] + right[0]) / 2, middle + 0.1, "no", ha="center", va="bottom", fontsize=10, color=INK)
        top -= height + gap
        axes.annotate("", (centre, top), (centre, top + gap), arrowprops=arrow)
        axes.text(centre + 0.15, top + gap / 2, "yes", va="center", fontsize=10, color=INK)
    box = Rectangle((left[0], top - 2 * line), left[1] - left[0], 2 * line, facecolor=PAPER, edgecolor=INK)
    axes.add_patch(box)
    axes.text(sum(left) / 2, top - line, last, ha="center", va="center", fontsize=10.5, color=INK)
    return figure
