"""Draw for chapter 11: a mask, running sums, costs (11.4), a ring, balance, rivals (11.7), attention's share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from chapters.support.draw import RANKS, box, finish, show_cells
from visualize.style import BLUE, GREEN, GREY, INK, LINES, MINT, PAPER, VERMILION, Picture, picture


def _block(axes: Axes, row: int, column: int, colour: str) -> None:
    """Draw a block of a causal table: half of it on the diagonal, nothing above."""
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=PAPER, edgecolor="white"))
    if column < row:
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white"))
    elif column == row:
        corners = [(column, row), (column, row + 1), (column + 1, row + 1)]
        axes.add_patch(Polygon(corners, facecolor=colour, edgecolor="white"))


def plot_mask(blocks: int) -> Picture:
    """Draw a causal table of scores in blocks, and which of the three kinds each is."""
    figure = picture(5.0, 3.5)
    axes = figure.add_subplot()
    for row in range(blocks):
        for column in range(blocks):
            _block(axes, row, column, MINT if column < row else BLUE)
    show_cells(axes, blocks, blocks)
    axes.set(aspect="equal", xlabel="keys", ylabel="queries")
    looks = {"skipped": PAPER, "full": MINT, "diagonal: masked": BLUE}
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, label=name) for name, colour in looks.items()]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def plot_costs(lengths: Sequence[int], costs: Mapping[str, Sequence[tuple[float, float]]]) -> Picture:
    """Plot peak memory and time of each version over the length."""
    figure = picture(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    for (name, rows), colour, marker in zip(costs.items(), (VERMILION, BLUE), "so", strict=True):
        peaks, seconds = zip(*rows, strict=True)
        left.plot(lengths, [peak / 2**20 for peak in peaks], color=colour, marker=marker, label=name)
        right.plot(lengths, [1e3 * second for second in seconds], color=colour, marker=marker, label=name)
    for axes, title in ((left, "peak memory, MiB"), (right, "forward and backward, ms of processor time")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        finish(axes, title, xlabel="T, tokens")
    left.legend(frameon=False, fontsize=8)
    return figure


def plot_ring(ranks: int) -> Picture:
    """Draw whose keys and values each rank has in each step, and in backward whose gradients it adds to."""
    figure = picture(7.2, 2.5)
    forward, backward = figure.subplots(1, 2, width_ratios=[ranks, 1.45 * (ranks + 1)])
    for axes, title, steps in ((forward, "forward", ranks), (backward, "backward", ranks + 1)):
        for rank in range(ranks):
            for step in range(steps):
                owner = (rank - step) % ranks
                colour = RANKS[owner]
                home = step == ranks
                text = f"dK dV\nof {owner}" if home else f"K V of {owner}"
                if axes is backward and not home:
                    text += f"\n+ dK dV of {owner}"
                look = {"edgecolor": INK if home else colour, "linewidth": 1.5}
                box(axes, (step, rank), (0.94, 0.94), colour, text, fontsize=7, va="center", **look)
        columns = [f"step {step}" if step < ranks else "home" for step in range(steps)]
        show_cells(axes, steps, ranks, [f"rank {rank}" for rank in range(ranks)], columns, side=0.94)
        axes.set_title(title, fontsize=9, loc="left")
    return figure


def plot_balance(places: Mapping[str, Sequence[Sequence[int]]], work: Mapping[str, np.ndarray]) -> Picture:
    """Draw for each order of chunks which rank computes which block, and how busy the ranks are in each step.

    places: for each order the chunks of each rank; work: the scores of each (step, rank).
    """
    figure = picture(7.4, 2.9 * len(places))
    grid = figure.subplots(len(places), 2, width_ratios=[1, 1.6], squeeze=False)
    for (order, chunks), (table, steps) in zip(places.items(), grid, strict=True):
        owner = {chunk: rank for rank, own in enumerate(chunks) for chunk in own}
        for row in owner:
            for column in owner:
                _block(table, row, column, RANKS[owner[row]])
        rows = [f"chunk {row}: rank {owner[row]}" for row in range(len(owner))]
        show_cells(table, len(owner), len(owner), rows)
        table.set_aspect("equal")
        table.set_title(f"{order}: who computes which scores", fontsize=9, loc="left")
        _draw_steps(steps, work[order])
    return figure


def _draw_steps(axes: Axes, work: np.ndarray) -> None:
    ranks = work.shape[1]
    longest = work.max(axis=1)
    begins = np.concatenate([[0], np.cumsum(longest)])
    for step, begin in enumerate(begins[:-1]):
        for rank in range(ranks):
            corner, frame = (begin, rank + 0.1), {"facecolor": "white", "edgecolor": GREY, "linewidth": 0.5}
            axes.add_patch(Rectangle(corner, longest[step], 0.8, **frame))
            axes.add_patch(Rectangle(corner, work[step, rank], 0.8, facecolor=RANKS[rank]))
        axes.axvline(begins[step + 1], color=INK, linewidth=0.8)
    show_cells(axes, begins[-1] * 1.001, ranks, [f"rank {rank}" for rank in range(ranks)])
    axes.set_xticks((begins[:-1] + begins[1:]) / 2, [f"step {step}" for step in range(len(longest))])
    share = work.sum() / (ranks * begins[-1])
    axes.set_title(f"busy (coloured) and waiting: {100 * share:.0f} % of the time is work", fontsize=9, loc="left")


def plot_ulysses(ranks: int) -> Picture:
    """Draw tokens x heads before and after an all-to-all: rows of tokens become columns of heads."""
    figure = picture(6.4, 2.7)
    figure.get_layout_engine().set(wspace=0.2)
    panels = figure.subplots(1, 2)
    titles = ("between attentions: own tokens, all heads", "in attention: all tokens, own heads")
    for axes, title, by_head in zip(panels, titles, (False, True), strict=True):
        for token in range(ranks):
            for head in range(ranks):
                rank = head if by_head else token
                box(axes, (head, token), (1, 1), RANKS[rank], f"rank {rank}", edgecolor="white", linewidth=1.5)
        show_cells(axes, ranks, ranks)
        axes.set(aspect="equal", xlabel="heads")
        axes.set_title(title, fontsize=9, loc="left")
    panels[0].set_ylabel("tokens")
    arrow = {"arrowstyle": "-|>", "color": INK}
    look = {"xycoords": "axes fraction", "fontsize": 8, "ha": "center", "va": "center", "arrowprops": arrow}
    panels[1].annotate("all-to-all", (-0.02, 0.5), (-0.32, 0.5), **look)
    return figure


def plot_crossover(
    groups: Sequence[int], ranks: Iterable[int], elements: Callable[[int, int], Mapping[str, Any]]
) -> Picture:
    """Plot elements(c, group), what each method sends per layer and token in units of h, over the ranks c."""
    ranks = list(ranks)
    figure = picture(7.2, 2.9)
    panels = figure.subplots(1, len(groups))
    for axes, group in zip(panels, groups, strict=True):
        for name, colour, marker in (("ring", BLUE, "o"), ("all-gather", GREY, "^"), ("ulysses", VERMILION, "s")):
            values = [float(elements(c, group)[name]) for c in ranks]
            axes.plot(ranks, values, color=colour, marker=marker, markersize=3.5, label=name)
        queries = "one head" if group == 1 else f"{group} heads"
        title = f"{queries} of queries per head of keys"
        finish(axes, title, xlabel="c, ranks of cp", ylim=(0, None), xticks=ranks[::2])
        axes.set_ylabel("elements sent per token, in h", fontsize=8)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def plot_running(history: Sequence[Sequence[float]], output: float, lse: float) -> Picture:
    """Plot the running maximum, sum and unnormalized output of one query after each block, and where they end.

    history: these three after each block; output, lse: over all keys. Of the output one element is drawn.
    """
    figure = picture(8.2, 2.6)
    left, middle, right = figure.subplots(1, 3)
    blocks = np.arange(1, len(history) + 1)
    top, total, unnormalized = np.array(history).T
    left.plot(blocks, top, color=VERMILION, marker="o", markersize=3.5, label="maximum")
    left.plot(blocks, top + np.log(total), color=BLUE, marker="s", markersize=3.5, label="log-sum-exp")
    left.axhline(lse, color=INK, linewidth=0.8, linestyle="--")
    middle.plot(blocks, total, color=GREEN, marker="o", markersize=3.5, label="sum")
    middle.plot(blocks, unnormalized, color=VERMILION, marker="s", markersize=3.5, label="unnormalized output")
    right.plot(blocks, unnormalized / total, color=BLUE, marker="s", markersize=3.5, label="unnormalized / sum")
    right.axhline(output, color=INK, linewidth=0.8, linestyle="--", label="over all keys")
    for axes, title in ((left, "maximum"), (middle, "sums with this maximum"), (right, "divided")):
        axes.margins(y=0.3)
        finish(axes, title, legend="best", size=7.5, xlabel="blocks so far", xticks=blocks)
    return figure


def plot_losses(runs: Mapping[str, Sequence[float]]) -> Picture:
    """Plot the losses of runs over their steps; the first is the right one."""
    figure = picture(6.6, 3.0)
    axes = figure.add_subplot()
    looks = [("-", 6.0, 0.35), ("-", 2.4, 1.0), ("-", 1.4, 1.0), ("-", 1.4, 1.0), ("--", 1.6, 1.0)]
    # The second and the last lie on the first, nearly: a wide line below, a narrower one, and dashes.
    for (name, losses), colour, (line, width, alpha) in zip(runs.items(), (INK, *LINES), looks, strict=False):
        axes.plot(losses, line, color=colour, linewidth=width, alpha=alpha, label=name)
    finish(axes, "loss", legend="best", size=7.5, xlabel="step", ylim=(0, None))
    return figure


def plot_attention_share(tokens: np.ndarray, widths: Sequence[int], layers: int) -> Picture:
    """Plot attention's share of a layer's operations over T, and the bytes of activations for the first width.

    widths: hidden sizes h; the share is T / (T + 12 h). Activations have 34 h bytes per token and layer.
    """
    figure = picture(8.2, 3.0)
    left, right = figure.subplots(1, 2)
    for width, colour in zip(widths, LINES, strict=False):
        left.plot(tokens, 100 * tokens / (tokens + 12 * width), color=colour, linewidth=2, label=f"h = {width:,}")
        left.plot([12 * width], [50], color=colour, marker="o")
    left.axhline(50, color=GREY, linewidth=0.8, linestyle="--")
    finish(left, "attention's share of the operations, %", legend="upper left", xlabel="T, tokens", ylim=(0, 100))
    per_token = {"all activations": 34 * layers, "recomputed": 2 * layers, "one layer": 34}
    for (name, factor), colour in zip(per_token.items(), LINES, strict=False):
        right.plot(tokens, tokens * widths[0] * factor / 1e9, color=colour, linewidth=2, label=name)
    right.plot(
        tokens, tokens * widths[0] * (2 * layers + 34) / 8e9, color=INK, linestyle=":", label="recomputed, c = 8"
    )
    right.axhline(80, color=GREY, linewidth=0.8, linestyle="--")
    right.text(tokens[0], 90, "80 GB", fontsize=8, va="bottom")
    finish(right, f"GB of one sample, h = {widths[0]:,}", legend="lower right", xlabel="T, tokens", yscale="log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    return figure
