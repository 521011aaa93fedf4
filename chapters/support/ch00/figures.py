"""Draw the figure of chapter 0 (section 0.1): what each rank holds under four strategies.

`python -m chapters.support.ch00.figures FILE` draws it into a file.
"""

import sys

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from visualize.style import INK, LINES, PAPER, Picture, picture, save

RANKS = 4
STRATEGIES = {
    "data parallelism": "all-reduce of gradients",
    "ZeRO stage 1": "reduce-scatter, all-gather",
    "tensor parallelism": "all-reduce of activations",
    "pipeline": "activations to a neighbour",
}
KINDS = ("samples", "parameters", "Adam's means")


def held(strategy: str, kind: str, rank: int) -> np.ndarray:
    """Return which elements of a kind a rank holds: (RANKS, 1) samples, else (RANKS, RANKS) by layer and column."""
    shape = (RANKS, 1) if kind == "samples" else (RANKS, RANKS)
    everything = np.ones(shape, dtype=bool)
    one_row = np.zeros(shape, dtype=bool)
    one_row[rank] = True
    if kind == "samples":
        shares_samples = strategy in ("data parallelism", "ZeRO stage 1")
        return one_row if shares_samples else everything
    if strategy == "tensor parallelism":
        return np.eye(RANKS, dtype=bool)[[rank] * RANKS]
    if strategy == "pipeline" or (strategy == "ZeRO stage 1" and kind == "Adam's means"):
        return one_row
    return everything


def draw_four_strategies() -> Picture:
    """Draw a panel for each strategy: a column for each rank, a grid for each kind, filled where the rank holds it."""
    figure = picture(7.5, 1.9)
    for i, (strategy, sent) in enumerate(STRATEGIES.items()):
        axes = figure.add_subplot(1, len(STRATEGIES), i + 1)
        for rank in range(RANKS):
            for row, kind in enumerate(KINDS):
                draw_grid(axes, 1.25 * rank, -1.4 * row, held(strategy, kind, rank), LINES[rank])
            axes.text(1.25 * rank + 0.5, 0.12, str(rank), ha="center", fontsize=8, color=INK)
        axes.text(2.4, 0.62, strategy, ha="center", fontsize=9, weight="bold", color=INK)
        axes.text(2.4, -4.4, f"sent: {sent}", ha="center", fontsize=7, color=INK)
        if i == 0:
            axes.text(-0.15, 0.12, "rank", ha="right", fontsize=8, color=INK)
            for row, kind in enumerate(KINDS):
                words = kind.replace(" ", "\n")
                axes.text(-0.15, -1.4 * row - 0.5, words, ha="right", va="center", fontsize=8, color=INK)
        axes.set_xlim(-0.1, 4.9)
        axes.set_ylim(-4.6, 0.9)
        axes.set_aspect("equal")
        axes.set_axis_off()
    return figure


def draw_grid(axes: Axes, left: float, top: float, filled: np.ndarray, colour: str) -> None:
    """Draw a grid of cells into a unit square, those that are filled in a colour."""
    rows, columns = filled.shape
    for row in range(rows):
        for column in range(columns):
            corner = (left + column / columns, top - (row + 1) / rows)
            face = colour if filled[row, column] else PAPER
            axes.add_patch(Rectangle(corner, 1 / columns, 1 / rows, facecolor=face, edgecolor="white", linewidth=0.8))


if __name__ == "__main__":
    save(draw_four_strategies(), sys.argv[1])
