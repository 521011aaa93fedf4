"""Figures of chapter 14: how far right layouts drift, six runs beside the right ones, two precisions as judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from chapters.support.ch14 import layouts
from visualize.style import BLUE, GREEN, GREY, INK, ORANGE, PAPER, VERMILION, Picture, picture, tidy

COLOURS = {"bfloat16": VERMILION, "float32": BLUE, "float64": GREEN}
SHORT = {"bfloat16": "bf16", "float32": "float32", "float64": "float64"}
Found = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]  # by precision and layout: losses, gradients


def plot_drift(rates: Mapping[str, Found], steps: Sequence[int], limits: Mapping[str, Sequence[float]]) -> Picture:
    """Plot the gradient's difference to one device over steps: a band of right layouts for each precision.

    The grey zone is at step 1 alone: later the drift of right layouts is as large.
    One panel for each learning rate; limits: by precision, what counts as equal in each of the steps.
    """
    figure = picture(8.0, 3.6)
    panels = figure.subplots(1, len(rates), sharey=True)
    for axes, (rate, found) in zip(panels, rates.items(), strict=True):
        axes.add_patch(Rectangle((0.8, 1e-2), 0.5, 10, facecolor=PAPER, zorder=0))
        axes.text(1.4, 4.5, "grey: where a mistake is at step 1", fontsize=8, va="center")
        for dtype, colour in COLOURS.items():
            if dtype not in found:
                continue
            low, high = layouts.gradient_range(found[dtype])
            axes.fill_between(steps, low, high, color=colour, alpha=0.35, linewidth=0)
            axes.plot(steps, high, color=colour, linewidth=1.8, marker="o", markersize=3, label=SHORT[dtype])
            axes.plot(steps, limits[dtype], color=colour, linewidth=1.0, linestyle="--")
        axes.set(xscale="log", yscale="log", xlabel="step, counted from 1", xlim=(0.8, 125), ylim=(1e-17, 10))
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.minorticks_off()
        without = "".join(f", without {SHORT[dtype]}" for dtype in COLOURS if dtype not in found)
        axes.set_title(f"learning rate {rate}{without}", fontsize=9, loc="left")
        tidy(axes)
    panels[0].set_ylabel("difference of the gradient\nto one device, relative")
    handles, labels = panels[0].get_legend_handles_labels()
    title = "bands: 17 right layouts; dashes: what compare takes as equal"
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8, title=title)
    return figure


def plot_six(runs: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], which: int, ylabel: str) -> Picture:
    """Plot each run's loss (which 0) or gradient norm (which 1) over the steps, upon that of the right run."""
    figure = picture(8.0, 4.2)
    panels = figure.subplots(2, (len(runs) + 1) // 2, squeeze=False)
    for axes, (name, run) in zip(panels.flat, runs.items(), strict=False):
        axes.plot(run["right"][which], color=GREY, linewidth=5, label="one device")
        axes.plot(run["run"][which], color=VERMILION, linewidth=1.4, label="the run")
        axes.set_title(name, fontsize=10, loc="left", weight="bold")
        right, values = (np.array(run[each][which]) for each in ("right", "run"))
        largest = np.abs(values / right - 1).max()
        amount = "less than 0.01" if largest < 1e-4 else f"up to {100 * largest:.2f}"
        axes.set_title(f"differs by {amount} %", fontsize=8, loc="right")
        if right.max() > 5 * right.min():
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
        tidy(axes)
    for axes in panels[-1]:
        axes.set_xlabel("step, from 0")
    for axes in panels[:, 0]:
        axes.set_ylabel(ylabel)
    panels[0, 0].legend(frameon=False, fontsize=8)
    return figure


def plot_sums(counts: Sequence[int], found: Mapping[str, Sequence[float]], roundoffs: Mapping[str, float]) -> Picture:
    """Plot how far two orders of one sum differ, over the number of terms, and u times the root of that number."""
    figure = picture(6.6, 3.2)
    axes = figure.add_subplot()
    for dtype, values in found.items():
        axes.plot(counts, values, "o", color=COLOURS[dtype], markersize=4, label=SHORT[dtype])
        axes.plot(counts, roundoffs[dtype] * np.sqrt(counts), color=COLOURS[dtype], linewidth=1, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="terms of the sum, n", ylabel="difference / root of the squares' sum")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    look = {"frameon": False, "fontsize": 8, "title": "dashes: u times the root of n"}
    axes.legend(loc="center left", bbox_to_anchor=(0.05, 0.33), title_fontsize=8, **look)
    tidy(axes)
    return figure


def plot_eighteen(found: Found, published: Mapping[str, Sequence[float]], at: Sequence[int]) -> Picture:
    """Plot each layout's loss less that of one device over the steps, and the published ones at three steps.

    found: for each panel's title, the layouts of one precision.
    """
    figure = picture(8.0, 3.3)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (title, runs) in zip(panels, found.items(), strict=True):
        single = np.array(runs["single"]["losses"])
        for name, run in runs.items():
            if name != "single":
                losses = np.array(run["losses"])
                axes.plot(np.arange(1, len(losses) + 1), losses - single, color=BLUE, linewidth=0.9, alpha=0.7)
        for name, losses in published.items():
            if name != "single":
                differences = np.subtract(losses, published["single"])
                axes.plot(at, differences, "x", color=VERMILION, markersize=6, markeredgewidth=1.6)
        axes.plot([], [], color=BLUE, label="minipar, 17 layouts")
        axes.plot([], [], "x", color=VERMILION, label="torchtitan, 7 layouts")
        axes.axhline(0, color=INK, linewidth=0.7)
        axes.set(xlabel="step, counted from 1")
        axes.set_title(title, fontsize=9, loc="left")
        tidy(axes)
    panels[0].set_ylabel("loss less that of one device")
    panels[0].legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def plot_judge(differences: Mapping[str, tuple[float, float]], ratio: float) -> Picture:
    """Plot each run's difference in float32 against that in float64: a mistake is on the diagonal.

    Runs whose points cannot be told apart share a label.
    ratio: the epsilon of float32 / that of float64.
    """
    figure = picture(5.6, 4.0)
    axes = figure.add_subplot()
    ends = np.array([1e-8, 10.0])
    axes.plot(ends, ends, color=INK, linewidth=1)
    axes.plot(ends, ends / ratio, color=INK, linewidth=1, linestyle="--")
    axes.text(2e-7, 2e-3, "equally large: a mistake", fontsize=8.5, ha="left", va="bottom")
    axes.text(3e-6, 3e-15, "smaller by the ratio of\nthe epsilons: rounding", fontsize=8.5, ha="left", va="top")
    spots: list[tuple[list[str], tuple[float, float]]] = []
    for name, spot in sorted(differences.items(), key=lambda item: item[1]):
        if spots and np.allclose(spot, spots[-1][1], rtol=0.05, atol=0):
            spots[-1][0].append(name)
        else:
            spots.append(([name], spot))
    for place, (names, spot) in enumerate(spots):
        axes.plot(*spot, "o", color=BLUE, markersize=6)
        offset, side = ((4, 7), "right") if place % 2 else ((-4, -16), "left")  # neighbours on two sides of the line
        look = {"textcoords": "offset points", "ha": side, "fontsize": 10, "weight": "bold"}
        axes.annotate(", ".join(sorted(names)), spot, xytext=offset, **look)
    axes.set(xscale="log", yscale="log", xlim=(1e-8, 30), ylim=(1e-17, 300))
    axes.set(xlabel="largest difference in float32, relative", ylabel="the same in float64")
    tidy(axes)
    return figure


Check = tuple[str, Mapping[str, str], str]  # a question, what some answers mean, and the answer that leads on
CHECKS: tuple[Check, ...] = (
    ("Are the weights before step 1 equal?", {"no": "each rank drew its own: start from one file"}, "yes"),
    ("Is the loss of step 1 equal?", {"no": "forward: data, positions, masks, sums of tp and cp"}, "yes"),
    ("Is the gradient of step 1 equal?", {"no": "backward: factor = a size of the layout? which parameters?"}, "yes"),
    ("Is the norm of step 1 equal?", {"no": "the norm's sum over pp, tp, dp, experts"}, "yes"),
    ("Is the update of step 1 equal?", {"no": "rate, decay, clipping, optimizer state, masters"}, "yes"),
    (
        "How do later steps begin to differ?",
        {
            "not at all": "equal within rounding, no mistake is seen",
            "at once": "warm-up, zero_grad, clipping, overflow, resume",
        },
        "slowly",
    ),
    (
        "Is the difference as large in float64?",
        {"yes": "a mistake: look at the first step that differs", "no": "rounding, and your run amplifies it"},
        "",
    ),
)


def draw_checks(checks: Sequence[Check] = CHECKS) -> Picture:
    """Draw the order of the checks: questions from top to bottom, and what each answer means or leads to."""
    rows = sum(len(meanings) for _, meanings, _ in checks)
    figure = picture(8.0, 0.5 * rows + 0.3)
    axes = figure.add_subplot()
    arrow = {"arrowstyle": "->", "color": INK}
    top = 0
    for question, meanings, onward in checks:
        box(axes, 0.0, top, 4.2, question, BLUE, "white", len(meanings))
        for row, (answer, meaning) in enumerate(meanings.items(), top):
            axes.annotate("", (5.1, row), (4.2, row), arrowprops=arrow)
            axes.text(4.65, row - 0.12, answer, fontsize=8, ha="center", va="bottom")
            box(axes, 5.1, row, 6.4, meaning, ORANGE, INK)
        top += len(meanings)
        if onward:
            axes.annotate("", (0.6, top - 0.3), (0.6, top - 0.68), arrowprops=arrow)
            axes.text(0.75, top - 0.5, onward, fontsize=8, va="center")
    axes.set(xlim=(-0.1, 11.6), ylim=(rows - 0.5, -0.6))
    axes.axis("off")
    return figure


def box(axes: Axes, x: float, y: float, width: float, text: str, colour: str, ink: str, rows: int = 1) -> None:
    """Draw a text in a box of one or more rows that begins at x and has the middle of its first row at y."""
    axes.add_patch(Rectangle((x, y - 0.32), width, rows - 0.36, facecolor=colour, edgecolor="none"))
    axes.text(x + 0.12, y + (rows - 1) / 2, text, fontsize=8.5, color=ink, va="center")
