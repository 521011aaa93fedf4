"""Draw for chapter 12: dispatch, a choice (12.2), sums and bytes (12.4, 12.5), mistakes, balance, capacity (12.8)."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from chapters.support.draw import RANKS, box, finish, legend_outside, patches, show_cells
from visualize.style import BLUE, GREEN, GREY, INK, LINES, PAPER, PURPLE, VERMILION, Picture, picture, tidy

ARROWS = 3.0  # cells of room for the arrows of the all-to-all, beside the rows that leave


def plot_choice(logits: np.ndarray, weights: np.ndarray, slopes: np.ndarray, moved: int) -> Picture:
    """Plot what follows from moving one logit: the experts' weights (points, E), and the output's slope (points,)."""
    figure = picture(7.2, 2.7)
    left, right = figure.subplots(1, 2)
    for expert, values in enumerate(weights.T):
        width = 2.5 if expert == moved else 1.2
        left.plot(logits, values, color=RANKS[expert], linewidth=width, label=f"expert {expert}")
    left.set_title("weights of the experts", fontsize=9, loc="left")
    left.set_ylim(-0.03, 1.15)
    left.legend(frameon=False, fontsize=7.5, loc="upper left")
    right.plot(logits, slopes, color=RANKS[moved], linewidth=2.5)
    right.axhline(0, color=INK, linewidth=0.6)
    right.set_title(f"slope of the output by the logit of expert {moved}", fontsize=9, loc="left")
    for axes in (left, right):
        axes.set_xlabel(f"logit of expert {moved}")
        tidy(axes)
    return figure


def plot_dispatch(chosen: Sequence[np.ndarray], experts: int) -> Picture:
    """Draw the rows of every rank in the four orders in which they lie before an expert multiplies them.

    The panels go down on the left, across with the all-to-all, whose messages are arrows, and up on the right.
    chosen: for each rank the experts of its tokens, (N, k). Tokens are letters, experts numbers; a row has the colour
    of the rank that holds its expert.
    """
    ranks = len(chosen)
    each = experts // ranks
    own = []  # for each rank (token, expert) of its rows
    token = 0
    for indices in chosen:
        rows = []
        for row in indices:
            rows += [(token, int(expert)) for expert in row]
            token += 1
        own.append(rows)
    by_expert = [sorted(rows, key=lambda row: row[1]) for rows in own]
    leaving = list(chain(*by_expert))
    arrived = []
    for rank in range(ranks):
        arrived.append([(token, expert) for token, expert in leaving if expert // each == rank])
    panels = {
        "1. each token once for each of its experts": own,
        "2. sorted by expert: chunk j is for rank j": by_expert,
        "3. after the all-to-all: by source": arrived,
        "4. sorted again: one product per expert": [sorted(rows, key=lambda row: row[1]) for rows in arrived],
    }
    figure = picture(7.4, 0.75 + 0.62 * ranks)
    longest = max(len(rows) for rows in chain(*panels.values()))
    grid = figure.subplots(2, 2, width_ratios=(longest + ARROWS, longest))
    places = (grid[0, 0], grid[1, 0], grid[1, 1], grid[0, 1])
    for axes, (title, lists) in zip(places, panels.items(), strict=True):
        for rank, rows in enumerate(lists):
            for place, (token, expert) in enumerate(rows):
                text = f"{chr(ord('a') + token)}{expert}"
                box(axes, (place, rank), (0.92, 0.88), RANKS[expert // each], text, fontsize=7.5)
        width = longest if axes in grid[:, 1] else longest + ARROWS
        show_cells(axes, width, ranks, [f"rank {rank}" for rank in range(ranks)], side=0.9)
        axes.set_title(title, fontsize=9, loc="left")
    for axes in grid[:, 1]:
        axes.yaxis.tick_right()
    _draw_all_to_all(grid[1, 0], by_expert, each, longest + ARROWS)
    return figure


def _draw_all_to_all(axes: Axes, by_expert: Sequence[Sequence[tuple[int, int]]], each: int, end: float) -> None:
    """Draw an arrow from each rank to each rank that it sends rows to, in the colour of the receiver."""
    for source, rows in enumerate(by_expert):
        for dest in sorted({expert // each for _, expert in rows}):
            ends = {"xytext": (len(rows), source + 0.44), "xy": (end, dest + 0.44)}
            look = {"arrowstyle": "-|>", "color": RANKS[dest], "shrinkA": 1, "shrinkB": 0, "mutation_scale": 8}
            axes.annotate("", **ends, arrowprops=look, annotation_clip=False)


def plot_ep_or_dp(
    tokens: Sequence[int], elements: Mapping[str, Sequence[float]], crossings: Sequence[float]
) -> Picture:
    """Plot the elements that each method sends per layer over the tokens of a rank, and mark where two are equal."""
    figure = picture(6.0, 3.0)
    axes = figure.add_subplot()
    for (name, values), colour in zip(elements.items(), (VERMILION, BLUE, GREEN), strict=True):
        axes.plot(tokens, values, color=colour, label=name)
    for crossing in crossings:
        axes.axvline(crossing, color=GREY, linewidth=0.8, linestyle="--")
        look: dict[str, Any] = {"ha": "right", "va": "top", "rotation": 90, "fontsize": 8}
        axes.text(crossing, 0.98, f"{crossing:,.0f}", transform=axes.get_xaxis_transform(), **look)
    labels = {"xlabel": "tokens of a rank", "ylabel": "elements sent per layer and rank"}
    finish(axes, legend="best", xscale="log", yscale="log", **labels)
    return figure


def plot_mistakes(runs: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Plot the losses and the gradient norms of runs, each over its steps; the first is the right one."""
    figure = picture(7.4, 2.9)
    left, right = figure.subplots(1, 2)
    for (name, run), colour in zip(runs.items(), (INK, *LINES), strict=False):
        for axes, curve in ((left, "losses"), (right, "norms")):
            is_right = colour == INK
            look = {"linewidth": 3, "alpha": 0.35} if is_right else {"linewidth": 1, "alpha": 1}
            axes.plot(run[curve], color=colour, label=name, **look)
    for axes, title in ((left, "loss"), (right, "gradient norm")):
        finish(axes, title, xlabel="step")
    left.legend(frameon=False, fontsize=7.5)
    return figure


def plot_balance(runs: Mapping[str, np.ndarray]) -> Picture:
    """Draw each expert's share of the rows in each step, one on another; runs: for each run (steps, E) counts."""
    figure = picture(7.4, 3.0)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (name, load) in zip(panels, runs.items(), strict=True):
        shares = load / load.sum(axis=1, keepdims=True)
        looks = [RANKS[expert % len(RANKS)] for expert in range(load.shape[1])]
        axes.stackplot(np.arange(len(load)), 100 * shares.T, colors=looks, linewidth=0)
        busiest = shares[-(len(shares) // 4 or 1) :].max(axis=1).mean() * load.shape[1]
        title = f"{name}\nbusiest: {busiest:.1f} x the mean"
        finish(axes, title, xlim=(0, len(load) - 1), ylim=(0, 100), xlabel="step")
    panels[0].set_ylabel("rows of each expert, %", fontsize=8)
    experts = next(iter(runs.values())).shape[1]
    legend_outside(figure, patches({f"expert {e}": RANKS[e % len(RANKS)] for e in range(experts)}), ncols=4)
    return figure


def plot_exchange(sent: Mapping[str, Sequence[int]], even: float) -> Picture:
    """Plot the bytes that each rank of ep sends in a step, for each run, and those of even routing as a line."""
    figure = picture(6.0, 2.8)
    axes = figure.add_subplot()
    width = 0.8 / len(sent)
    for i, ((name, values), colour) in enumerate(zip(sent.items(), LINES, strict=False)):
        axes.bar(np.arange(len(values)) + (i - (len(sent) - 1) / 2) * width, values, width, color=colour, label=name)
    axes.axhline(even, color=INK, linewidth=0.8, linestyle="--", label="even routing")
    axes.set(xlabel="rank of ep", xticks=range(max(map(len, sent.values()))), ylabel="bytes sent over ep in a step")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(y=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    tidy(axes)
    return figure


def draw_sums(ranks: int, experts_ranks: int) -> Picture:
    """Draw whose tokens each rank's gradient covers before any sum, and which ranks then sum it.

    ranks: of data parallelism; experts_ranks: neighbours that share the experts. Left a parameter that every rank
    holds, right the experts. Ranks of one colour hold the same parameters.
    """
    figure = picture(8.2, 0.9 + 0.3 * ranks)
    titles = ("router, norms, attention: on all ranks", f"experts: {experts_ranks} ranks share them")
    for axes, title, own in zip(figure.subplots(1, 2), titles, (1, experts_ranks), strict=True):
        for rank in range(ranks):
            kind = rank % own
            for source in range(ranks):
                covers = source // own == rank // own
                box(axes, (source, rank), (0.92, 0.88), RANKS[kind] if covers else PAPER, "")
        names = [f"rank {rank}" for rank in range(ranks)]
        columns = [f"of {rank}" for rank in range(ranks)]
        show_cells(axes, ranks, ranks, names, columns, side=0.9)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_xlabel("tokens that the gradient covers before the sum", fontsize=8)
        terms = ranks // own
        sums = f"one sum of {terms} terms" if own == 1 else f"{own} sums, each of {terms} terms"
        axes.set_title(f"{title}\n{sums}", fontsize=9, loc="left")
    return figure


def plot_capacity(
    rows: np.ndarray, capacity: int, factors: Sequence[float], shares: Mapping[str, Sequence[float]]
) -> Picture:
    """Draw which rows of each expert are kept, dropped and padded; and for runs what is dropped over the factor.

    rows: of each expert, (E,); shares: for each run per cent of its rows, one for each factor.
    """
    figure = picture(8.2, 2.8)
    left, right = figure.subplots(1, 2)
    experts = np.arange(len(rows))
    kept = np.minimum(rows, capacity)
    left.bar(experts, capacity - kept, 0.8, bottom=kept, facecolor="white", edgecolor=GREY, hatch="///", linewidth=0.5)
    left.bar(experts, kept, 0.8, color=BLUE)
    left.bar(experts, rows - kept, 0.8, bottom=np.full(len(rows), capacity), color=VERMILION)
    left.axhline(capacity, color=INK, linewidth=0.9)
    handles = [*patches({"kept": BLUE, "dropped": VERMILION})]
    handles.append(Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=GREY, hatch="///", label="padded"))
    left.legend(handles=handles, frameon=False, fontsize=7.5, ncols=3, loc="upper right")
    top = 1.25 * max(int(rows.max()), capacity)
    finish(left, f"rows of each expert, capacity {capacity}", bars="x", xlabel="expert", xticks=experts, ylim=(0, top))
    left.tick_params(axis="x", labelsize=8)
    for (name, values), colour in zip(shares.items(), (INK, GREEN, PURPLE), strict=True):
        right.plot(factors, values, color=colour, linewidth=2, label=name)
    finish(right, "rows dropped, %", legend="upper right", xlabel="F, capacity factor", ylim=(0, None))
    return figure
