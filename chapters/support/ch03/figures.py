"""Draw for chapter 3: collectives (3.1), blocks on each rank (3.3, 3.4), orders (3.5), times (3.7); a tree (more/)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from chapters.support.draw import RANKS, box, finish
from visualize.style import BLUE, GREEN, GREY, INK, PAPER, VERMILION, Picture, at_lightness, byte_label, ink_on, picture

Panel = tuple[str, np.ndarray]  # a title, and for each rank and chunk the set of the ranks in it, as bits
LINES = ((BLUE, "-", "o"), (VERMILION, "--", "s"), (GREEN, "-.", "^"))


def draw_collectives(panels: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Picture:
    """Draw what each rank has before and after each collective: {name: (before, after)}, (rank, chunk) each.

    The value of rank r's chunk c is one bit, 1 << (ranks * r + c), so a sum tells what is in it. 0 is an empty place.
    """
    figure = picture(9.5, 3.9)
    grid = figure.subplots(2, len(panels) // 2, squeeze=False)
    for place, (axes, (name, pair)) in enumerate(zip(grid.flat, panels.items(), strict=True)):
        ranks, chunks = pair[0].shape
        for left, moment, blocks in zip((0, chunks + 1.2), ("before", "after"), pair, strict=True):
            for (rank, chunk), value in np.ndenumerate(blocks):
                face, text = _content(int(value), ranks)
                corner = (left + chunk, rank)
                box(axes, corner, (1, 1), face, text, fontsize=8.5, va="center", edgecolor="white", linewidth=1.2)
            axes.text(left + chunks / 2, ranks + 0.15, moment, ha="center", va="top", fontsize=8, color=INK)
        arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (chunks + 1.1, ranks / 2), (chunks + 0.1, ranks / 2), arrowprops=arrow)
        names = [f"rank {r}" for r in range(ranks)] if place % grid.shape[1] == 0 else []
        axes.set_yticks(np.arange(ranks) + 0.5 if names else [], names, fontsize=8)
        axes.set_xticks([])
        axes.set(xlim=(0, 2 * chunks + 2.2), ylim=(ranks + 0.7, -0.9), aspect="equal")
        axes.text(chunks + 0.6, -0.25, name, ha="center", fontsize=10, fontweight="bold", color=INK)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.supxlabel("2b: chunk b of what rank 2 brings. Σb: the sum of all ranks' chunks b. Grey: nothing", fontsize=9)
    return figure


def _content(value: int, ranks: int) -> tuple[str, str]:
    """Return the colour and the text of a block of `draw_collectives`."""
    members = [divmod(bit, ranks) for bit in range(ranks * ranks) if value >> bit & 1]  # (rank, chunk)
    if not members:
        return PAPER, ""
    letter = "abcdefgh"[members[0][1]]
    if len(members) > 1:
        return at_lightness(BLUE, 35), f"Σ{letter}"
    rank = members[0][0]
    return at_lightness(RANKS[rank], 80), f"{rank}{letter}"


NOTE = "columns: chunks. Digits: the ranks whose contributions are in a block; Σ: all of them. Framed: just changed"


def plot_blocks(rows: Sequence[Sequence[Panel]]) -> Picture:
    """Draw which ranks' contributions each rank's blocks hold, one panel for each moment.

    rows: rows of panels. A block that differs from the panel before it is framed; a panel "at first" begins anew.
    """
    columns = max(map(len, rows))
    two_lines = [any("\n" in title for title, _ in row) for row in rows]  # titles of two lines need more room
    figure = picture(7.0, 0.35 + 1.2 * 6.4 / columns * len(rows) + 0.2 * sum(two_lines))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    before = None
    for line, row in zip(grid, rows, strict=True):
        for axes in line[len(row) :]:
            axes.set_axis_off()
        for place, (axes, (title, blocks)) in enumerate(zip(line, row, strict=False)):
            before = blocks if title == "at first" else before
            _panel(axes, blocks, before)
            axes.set_title(title, fontsize=9)
            ranks, chunks = blocks.shape
            names = [f"rank {r}" for r in range(ranks)] if place == 0 else []
            axes.set_yticks(range(ranks) if names else [], names, fontsize=8)
            axes.set_xticks(range(chunks), map(str, range(chunks)), fontsize=8)
            before = blocks
    figure.supxlabel(NOTE, fontsize=9)
    return figure


def _panel(axes: Axes, blocks: np.ndarray, before: np.ndarray | None) -> None:
    ranks, chunks = blocks.shape
    everyone = (1 << ranks) - 1
    framed = []
    for (rank, chunk), value in np.ndenumerate(blocks):
        members = [str(r) for r in range(ranks) if value >> r & 1]
        face = at_lightness(BLUE, 35 if value == everyone else 102 - 10 * len(members))
        if before is not None and before[rank, chunk] != value:
            look = {"fill": False, "edgecolor": ink_on(face), "linewidth": 1.6}
            framed.append(Rectangle((chunk - 0.43, rank - 0.43), 0.86, 0.86, **look))
        text = "Σ" if value == everyone else "".join(members)
        box(axes, (chunk - 0.5, rank - 0.5), (1, 1), face, text, fontsize=9, va="center", edgecolor="white")
    for frame in framed:
        axes.add_patch(frame)
    axes.set(xlim=(-0.5, chunks - 0.5), ylim=(ranks - 0.5, -0.5), aspect="equal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_tree(levels: int) -> Picture:
    """Draw an all-reduce in a binary tree: arrays go up and are added, the sum comes down."""
    figure = picture(7.0, 2.6)
    axes = figure.add_subplot()
    axes.set_axis_off()
    width = 2 ** (levels - 1)
    axes.set(xlim=(-0.2, width + 1.8), ylim=(levels - 0.45, -0.6))
    number = 0
    for level in range(levels):
        count = 2**level
        for place in range(count):
            x = (place + 0.5) * width / count
            if level > 0:
                parent = (place // 2 + 0.5) * width / (count // 2)
                for shift, colour, style in ((-0.07, BLUE, "<|-"), (0.07, VERMILION, "-|>")):
                    look = {"arrowstyle": style, "color": colour, "shrinkA": 12, "shrinkB": 12}
                    axes.annotate("", (x + shift, level), (parent + shift, level - 1), arrowprops=look)
            if level == levels - 1:
                sends = "n"  # a leaf
            elif level == 0:
                sends = "2n"  # the root
            else:
                sends = "3n"
            box(
                axes, (x - 0.42, level - 0.2), (0.84, 0.4), PAPER, f"rank {number}: {sends}", edgecolor=INK, va="center"
            )
            number += 1
    for height, colour, text in ((0.0, BLUE, "up: arrays,\nadded on the way"), (0.7, VERMILION, "down: the sum")):
        axes.text(width + 0.1, height, text, color=colour, fontsize=9, va="center")
    axes.text(width + 0.1, 1.4, "in each box: what\nthe rank sends", color=INK, fontsize=9, va="center")
    return figure


def plot_orders(differing: Mapping[str, int], elements: int) -> Picture:
    """Draw for each algorithm how many of its sums differ from those from left to right."""
    figure = picture(7.0, 0.8 + 0.32 * len(differing))
    axes = figure.add_subplot()
    places = range(len(differing))
    axes.barh(places, list(differing.values()), color=BLUE)
    for place, count in zip(places, differing.values(), strict=True):
        axes.text(count, place, f" {count:,}", va="center", fontsize=8)
    axes.set_yticks(places, [name.replace("_", " ") for name in differing], fontsize=8)
    axes.invert_yaxis()
    label = f"of {elements:,} float32 sums: those that differ from left to right"
    finish(axes, bars="y", xlim=(0, 1.15 * max(*differing.values(), 1)), xlabel=label)
    return figure


def plot_crossover(
    times: Mapping[tuple[str, int], float],
    formulas: Mapping[str, Callable[[np.ndarray], np.ndarray]],
    crossings: Mapping[str, float],
) -> Picture:
    """Draw the time of each algorithm against the size of the array: formulas as lines, measured times as marks.

    times      {(algorithm, bytes): seconds}
    formulas   {algorithm: seconds as a function of bytes}
    crossings  {name of a crossing: bytes}, dotted lines
    """
    figure = picture(7.0, 3.6)
    axes = figure.add_subplot()
    sizes = sorted({size for _, size in times})
    fine = np.geomspace(sizes[0], sizes[-1], 200)
    for (name, formula), (colour, dashes, mark) in zip(formulas.items(), LINES, strict=False):
        points = {size: seconds for (algorithm, size), seconds in times.items() if algorithm == name}
        label = name.replace("_", " ")
        axes.plot(fine, formula(fine) * 1e3, color=colour, linestyle=dashes, label=label)
        axes.plot(list(points), [seconds * 1e3 for seconds in points.values()], mark, color=colour)
    for name, size in crossings.items():
        axes.axvline(size, color=GREY, linestyle=":")
        text = name.replace(" overtakes", "\novertakes")
        axes.text(size * 1.06, 0.03, text, fontsize=9, color=INK, transform=axes.get_xaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, map(byte_label, sizes))
    label = "size of the array; lines: formulas, marks: simulated"
    finish(axes, legend="upper left", size=9, xlabel=label, ylabel="time of an all-reduce (ms)")
    return figure
