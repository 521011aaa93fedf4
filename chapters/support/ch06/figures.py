"""Draw for chapter 6: a block over t ranks with its shapes (6.3, 6.9), and how matrices are cut (6.4)."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from chapters.support.draw import RANKS, box
from visualize.style import DARK, INK, MINT, PAPER, Picture, picture

# (title of the block; the mapping that enters a pair and what its backward sends; the same of the one that leaves it)
PLAIN = ("tensor parallelism: f and g", "f", "backward:\nall-reduce", "g", "forward:\nall-reduce")
SEQUENCE = (
    "with sequence parallelism: all-gather and reduce-scatter",
    "all-\ngather",
    "backward:\nreduce-scatter",
    "reduce-\nscatter",
    "backward:\nall-gather",
)
STEP, HALF = 0.8, 1.32  # inches from node to node, and from the attention of a block to its MLP


def plot_cuts(matrices: Sequence[tuple[str, int, int, int, int]], ranks: int) -> Picture:
    """Draw matrices to scale, each part in the colour and with the number of the rank that holds it.

    matrices: (name, rows, columns, dim along which it is cut, groups of equal stretches that are cut each).
    """
    gap = 0.45 * min(min(rows, columns) for _, rows, columns, _, _ in matrices)
    tallest = max(rows for _, rows, _, _, _ in matrices)
    total = sum(columns for _, _, columns, _, _ in matrices) + gap * len(matrices)
    figure = picture(7.5, 0.3 + 7.3 * 1.12 * tallest / total)
    axes = figure.add_subplot()
    left = 0.0
    for name, rows, columns, dim, groups in matrices:
        pieces = groups * ranks
        for piece in range(pieces):
            step = (rows, columns)[dim] / pieces
            corner = (left, -(piece + 1) * step) if dim == 0 else (left + piece * step, -rows)
            size = (columns, step) if dim == 0 else (step, rows)
            colour = RANKS[piece % ranks % len(RANKS)]
            box(axes, corner, size, colour, str(piece % ranks), edgecolor="white", linewidth=0.6)
        for group in range(1, groups):
            place = left + group * columns / groups
            axes.plot([place, place], [0, -rows], color=INK, linewidth=1.6)
        axes.text(left + columns / 2, 0.008 * total, name, ha="center", va="bottom", fontsize=9)
        left += columns + gap
    axes.set_xlim(-0.01 * total, total)
    axes.set_ylim(-tallest * 1.02, tallest * 0.1)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure


def block_halves(sequence: bool) -> dict[str, list[tuple[str, str]]]:
    """List the operations of both halves of a block, each with the shape, on every rank, of what leaves it."""
    outside = "B, T/t, h" if sequence else "B, T, h"
    _, enter, _, leave, _ = SEQUENCE if sequence else PLAIN
    pairs = {
        "attention": (("c_attn\ncolumns", "B, T, 3h/t"), ("heads", "B, T, h/t")),
        "MLP": (("c_fc\ncolumns", "B, T, 4h/t"), ("gelu", "B, T, 4h/t")),
    }
    return {
        half: [
            ("Layer-\nNorm", outside),
            (enter, "B, T, h"),
            *pair,
            ("c_proj\nrows", "B, T, h"),
            (leave, outside),
            ("drop-\nout", outside),
            ("+", outside),
        ]
        for half, pair in pairs.items()
    }


def plot_blocks(*sequence: bool) -> Picture:
    """Draw a Transformer block over t ranks, one below the other, without or with sequence parallelism.

    Each half of a block is a chain of operations; above each edge stands the shape of what one rank has there. A
    shaded band says what differs between the ranks; between two bands is a mapping, the only place that sends.
    """
    height = 0.34 + 2 * HALF
    figure = picture(7.0, height * len(sequence))
    figure.set_layout_engine("none")  # every place is given in inches
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 7.0)
    axes.set_ylim(-height * len(sequence), 0)
    axes.set_axis_off()
    for place, with_sequence in enumerate(sequence):
        top = -height * place
        axes.text(0.1, top - 0.28, (SEQUENCE if with_sequence else PLAIN)[0], fontsize=10, weight="bold", color=INK)
        for row, (half, nodes) in enumerate(block_halves(with_sequence).items()):
            _draw_half(axes, top - 0.34 - HALF * row, half, nodes, with_sequence)
    return figure


def _draw_half(axes: Axes, top: float, half: str, nodes: Sequence[tuple[str, str]], sequence: bool) -> None:
    _, enter, at_enter, leave, at_leave = SEQUENCE if sequence else PLAIN
    places = [0.84 + STEP * i for i in range(len(nodes))]
    middle, bottom = top - 0.66, top - HALF + 0.08
    first, last = (places[[name for name, _ in nodes].index(name)] for name in (enter, leave))
    hatch = "////" if sequence else None
    for left, right, colour, pattern in (
        (0.08, first, PAPER, hatch),
        (first, last, MINT, None),
        (last, 6.94, PAPER, hatch),
    ):
        size = (right - left, HALF - 0.12)
        axes.add_patch(
            Rectangle((left, bottom), *size, facecolor=colour, edgecolor="white", hatch=pattern, linewidth=0, zorder=0)
        )
    whose = "own tokens" if sequence else "same on all"
    own = "heads" if half == "attention" else "columns"
    for x, text in (
        ((0.08 + first) / 2, whose),
        ((first + last) / 2, f"{half}: all tokens, each rank its own {own}"),
        ((last + 6.94) / 2, whose),
    ):
        axes.text(x, top - 0.15, text, fontsize=8, style="italic", ha="center", va="center", color=INK)
    shapes = [nodes[-1][1], *(shape for _, shape in nodes)]
    widths = [0.2 if name in ("+", "f", "g") else 0.52 for name, _ in nodes]
    starts = [0.12, *(x + wide / 2 for x, wide in zip(places, widths, strict=True))]
    stops = [*(x - wide / 2 - 0.03 for x, wide in zip(places, widths, strict=True)), 6.92]
    centres = [0.48, *((a + b) / 2 for a, b in zip(places[:-1], places[1:], strict=True)), None]
    for left, right, centre, shape in zip(starts, stops, centres, shapes, strict=True):
        arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (right, middle), (left, middle), arrowprops=arrow, zorder=1)
        if centre is not None:  # the sum has the shape of its terms
            axes.text(centre, middle + 0.27, shape, fontsize=8, ha="center", va="bottom", color=INK)
    plus = places[-1]
    axes.plot(
        [0.2, 0.2, plus, plus], [middle, bottom + 0.06, bottom + 0.06, middle - 0.19], color=INK, linewidth=1, zorder=1
    )
    for x, wide, (name, _) in zip(places, widths, nodes, strict=True):
        sends = name in (enter, leave)
        look = {"facecolor": DARK if sends else "white", "edgecolor": INK, "boxstyle": "round,pad=0.02", "zorder": 2}
        axes.add_patch(FancyBboxPatch((x - wide / 2, middle - 0.17), wide, 0.34, **look))
        colour = "white" if sends else INK
        axes.text(x, middle, name, fontsize=8, ha="center", va="center", color=colour, zorder=3, linespacing=1.0)
        if sends:
            note = at_enter if name == enter else at_leave
            axes.text(x, middle - 0.23, note, fontsize=8, ha="center", va="top", color=INK, linespacing=1.0)
