"""Draw for chapter 13: bits (13.1), a weight (13.2), scales (13.4), sums (13.5, 13.6), losses (13.8)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from chapters.support.draw import finish, show_cells
from visualize.style import BLUE, GREEN, GREY, INK, LINES, ORANGE, PAPER, VERMILION, Picture, ink_on, picture, tidy

PARTS = {"sign": GREY, "exponent": ORANGE, "mantissa": BLUE}


def plot_bits(formats: Mapping[str, tuple[int, int]]) -> Picture:
    """Draw the bits of each format, one row each; formats: bits of the exponent and of the mantissa."""
    figure = picture(7.2, 0.5 + 0.36 * len(formats))
    axes = figure.add_subplot()
    for row, sizes in enumerate(formats.values()):
        place = 0
        for (part, colour), size in zip(PARTS.items(), (1, *sizes), strict=True):
            axes.add_patch(Rectangle((place + 0.05, row + 0.1), size - 0.1, 0.8, facecolor=colour))
            for bit in range(1, size):  # a notch between two bits, which leaves room for the number
                for edge in (row + 0.1, row + 0.74):
                    axes.add_patch(Rectangle((place + bit - 0.05, edge), 0.1, 0.16, facecolor="white"))
            if part != "sign":
                look: dict[str, Any] = {"fontsize": 9, "ha": "center", "va": "center_baseline"}
                axes.text(place + size / 2, row + 0.5, str(size), color=ink_on(colour), weight="bold", **look)
            place += size
    widest = max(1 + sum(sizes) for sizes in formats.values())
    show_cells(axes, widest, len(formats), list(formats))
    axes.tick_params(labelsize=9)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, label=part) for part, colour in PARTS.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="lower right")
    return figure


def plot_weight(curves: Mapping[str, Sequence[float]], below: float, above: float) -> Picture:
    """Plot one weight over steps, for each way of rounding; the shaded band is what the nearest rounding undoes.

    below, above: half of the distances to the two neighbours of the weight's first value.
    """
    figure = picture(6.4, 3.0)
    axes = figure.add_subplot()
    start = next(iter(curves.values()))[0]
    axes.axhspan(start - below, start + above, color=PAPER, zorder=0)
    looks = ((INK, 1.0, "--"), (VERMILION, 2.2, "-"), (BLUE, 2.2, "-"), (GREEN, 1.4, "-"))
    for (name, values), (colour, width, line) in zip(curves.items(), looks, strict=False):
        axes.plot(values, color=colour, linewidth=width, linestyle=line, label=name, drawstyle="steps-post")
    finish(axes, legend="upper left", xlabel="step", ylabel="weight")
    return figure


def plot_scales(sizes: np.ndarray, shift: int, errors: Mapping[str, Sequence[float]], scales: Sequence[int]) -> Picture:
    """Plot where gradients lie in fp16's range with and without a scale, and the error of a gradient by its scale.

    sizes: log2 of gradients' absolute values; shift: log2 of the scale; errors: relative, one for each of `scales`,
    which are powers of two.
    """
    figure = picture(7.6, 3.0)
    left, right = figure.subplots(1, 2)
    bins = np.arange(-48, 22, 2)
    left.axvspan(-24, -14, color=PAPER, zorder=0)
    left.axvspan(-14, 16, color=GREY, alpha=0.3, zorder=0, linewidth=0)
    for values, colour, label in ((sizes, INK, "as they are"), (sizes + shift, GREEN, f"times $2^{{{shift}}}$")):
        shares = 100 * np.histogram(values, bins)[0] / len(values)
        left.stairs(shares, bins, color=colour, linewidth=1.8, label=label)
    left.margins(y=0.35)
    for x, text in ((-19, "sub-\nnormal"), (1, "fp16, normal")):
        left.text(x, 0.98, text, transform=left.get_xaxis_transform(), fontsize=7.5, ha="center", va="top")
    labels = {"xlabel": "log2 of the absolute value", "ylabel": "share of the values, %"}
    finish(left, legend="center left", xlim=(-48, 18), **labels)
    for (name, values), colour in zip(errors.items(), (VERMILION, BLUE), strict=False):
        right.plot(scales, values, color=colour, marker="o", markersize=3, label=name)
    labels = {"xlabel": "log2 of the loss scale", "ylabel": "relative error of the gradient"}
    finish(right, legend="best", yscale="log", **labels)
    return figure


def plot_ring_error(ranks: Sequence[int], curves: Mapping[str, Sequence[float]], bounds: Sequence[float]) -> Picture:
    """Plot the largest error of sums of p gradients over p, and its bound; both in units of sum |G|.

    A curve may end before the last p.
    """
    figure = picture(6.4, 3.3)
    axes = figure.add_subplot()
    axes.plot(ranks, bounds, color=INK, linewidth=1, linestyle="--", label="$(p-1)\\,2^{-8}$")
    for (name, values), colour in zip(curves.items(), (VERMILION, ORANGE, BLUE), strict=False):
        axes.plot(ranks[: len(values)], values, color=colour, marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="p, terms of the sum", ylabel="largest error / sum of |G|")
    axes.set_xticks(ranks, [str(p) for p in ranks])
    axes.minorticks_off()
    finish(axes, legend="best")
    return figure


def plot_standing_still(
    partial: Mapping[str, Sequence[float]], runs: Mapping[str, Sequence[float]], limit: float
) -> Picture:
    """Plot partial sums on their way around the ring, and the distance to the solution in trainings, step by step.

    partial: each from 1, the first term, to the sum; the place in the ring is a share of the whole way.
    """
    figure = picture(7.8, 3.2)
    left, right = figure.subplots(1, 2)
    for (name, values), colour in zip(partial.items(), (INK, BLUE, VERMILION), strict=False):
        exact = colour == INK
        place = np.linspace(0, 100, len(values))
        width, line = (1.0, "--") if exact else (2.2, "-")
        left.plot(place, values, color=colour, linewidth=width, linestyle=line, label=name, zorder=3 if exact else 2)
    left.set(xlabel="way around the ring, %", ylabel="partial sum / first term")
    left.set_ylim(-0.05, 1.3)
    left.legend(frameon=False, fontsize=7.5, loc="upper right")
    looks = ((BLUE, "-"), (VERMILION, "-"), (BLUE, ":"), (VERMILION, ":"))
    for (name, values), (colour, line) in zip(runs.items(), looks, strict=False):
        right.plot(values, color=colour, linestyle=line, linewidth=1.8, label=name)
    right.axhline(limit, color=INK, linewidth=0.7)
    right.set(yscale="log", xlabel="step", ylabel="squared distance / that at the start")
    right.legend(frameon=False, fontsize=7.5)
    for axes in (left, right):
        tidy(axes)
    return figure


def plot_losses(runs: Mapping[str, Sequence[float]], window: int) -> Picture:
    """Plot the losses of runs, means over `window` steps: all of them, and the last third enlarged."""
    figure = picture(7.6, 3.1)
    left, right = figure.subplots(1, 2)
    looks = ((GREY, 5.0, "-"), (BLUE, 2.2, "-"), (VERMILION, 1.6, "-"), (INK, 1.0, "--"))
    for (name, losses), (colour, width, line) in zip(runs.items(), looks, strict=False):
        means = np.convolve(losses, np.full(window, 1 / window), "valid")
        steps = np.arange(window, len(losses) + 1)
        for axes, start in ((left, 0), (right, 2 * len(means) // 3)):
            axes.plot(steps[start:], means[start:], color=colour, linewidth=width, linestyle=line, label=name)
    for axes, title in ((left, "loss, all steps"), (right, "loss, the last third")):
        finish(axes, title, xlabel="step", ylabel=f"mean loss of the last {window} steps")
    left.legend(frameon=False, fontsize=8)
    return figure


def plot_roundoff(powers: np.ndarray, errors: Mapping[str, np.ndarray], largest: Mapping[str, float]) -> Picture:
    """Plot the largest relative rounding error of formats over the size of what is rounded, to the largest value.

    errors: for each format one of the values from each power of two to the next; nan: out of range.
    """
    figure = picture(7.2, 3.1)
    axes = figure.add_subplot()
    for (name, values), colour in zip(errors.items(), LINES, strict=False):
        edges = np.minimum([*powers, powers[-1] + 1], np.log2(largest[name]))
        axes.stairs(values, edges, baseline=None, color=colour, linewidth=2, label=name)
    axes.set_yscale("log", base=2)
    axes.set(
        xlabel="log2 of the value, a step for each power of two",
        ylabel="largest relative error",
        xlim=(powers[0], powers[-1] + 1),
    )
    axes.legend(frameon=False, fontsize=8, ncols=2)
    tidy(axes)
    return figure
