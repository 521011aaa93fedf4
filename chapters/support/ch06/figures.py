"""Draw for chapters 6 and 6b: cut matrices, blocks and links (6), logits, memory and mistakes (6b), grouped heads."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from chapters.support.draw import RANKS, box, finish, note, show_cells
from visualize.style import COLOURS, DARK, INK, MINT, PAPER, VERMILION, Picture, picture

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

    matrices: (name, rows, columns, dim along which it is cut, groups of equal stretches that are cut each). Three
    groups are those of queries, keys and values.
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
        for group, name_of_group in enumerate("qkv" if groups == 3 else ""):
            place = left + (group + 0.5) * columns / groups
            axes.text(place, -rows - 0.008 * total, name_of_group, ha="center", va="top", fontsize=9)
        axes.text(left + columns / 2, 0.008 * total, name, ha="center", va="bottom", fontsize=9)
        left += columns + gap
    words = "Drawn to scale: a row for each input, a column for each output."
    note = f"{words}\nColour and number: the rank that holds a part."
    axes.text(0, -tallest, note, va="bottom", fontsize=9, linespacing=1.5)
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


def draw_groups(heads: int, kv_heads: int, rank_counts: Sequence[int]) -> Picture:
    """Draw which heads each rank has with grouped queries: a panel for each number of ranks.

    A frame is a rank. It holds its heads of q and, below, the heads of k and v that they read. A copy of a head
    which another rank holds, too, has a dashed edge.
    """
    figure = picture(7.0, 1.75 * len(rank_counts))
    panels = figure.subplots(len(rank_counts), 1, squeeze=False)[:, 0]
    for axes, ranks in zip(panels, rank_counts, strict=True):
        own = heads // ranks
        for rank in range(ranks):
            left = rank * own
            frame = Rectangle((left + 0.04, -1.42), own - 0.08, 2.36, fill=False, edgecolor=INK, linewidth=1.0)
            axes.add_patch(frame)
            axes.text(left + own / 2, 1.0, f"rank {rank}", ha="center", va="bottom", fontsize=8, color=INK)
            for head in range(left, left + own):
                box(
                    axes,
                    (head + 0.12, 0.12),
                    (0.76, 0.7),
                    RANKS[head * kv_heads // heads],
                    f"q{head}",
                    edgecolor="white",
                )
            readers = heads // kv_heads
            for group in sorted({head // readers for head in range(left, left + own)}):
                first = max(left, group * readers)
                width = min(left + own, (group + 1) * readers) - first
                edge = {"edgecolor": "white"}
                if width < readers:
                    edge = {"edgecolor": INK, "linestyle": "--", "linewidth": 1.6}
                for low, letter in ((-0.58, "k"), (-1.32, "v")):
                    corner, size = (first + 0.12, low), (width - 0.24, 0.6)
                    box(axes, corner, size, RANKS[group], f"{letter}{group}", **edge)
        title = f"{ranks} ranks" if ranks <= kv_heads else f"{ranks} ranks: a head with a dashed edge is on two ranks"
        axes.set_title(title, loc="left", fontsize=9)
        axes.set(xlim=(-0.02, heads + 0.02), ylim=(-1.5, 1.35))
        axes.set_axis_off()
    return figure


def draw_split_loss(tokens: int, columns: int, ranks: int) -> Picture:
    """Draw the logits of a few tokens over the ranks, and the three columns of values that the loss needs from all."""
    figure = picture(7.0, 2.5)
    axes = figure.add_subplot()
    own = columns // ranks
    for rank in range(ranks):
        left = rank * own
        for token in range(tokens):
            box(axes, (left, -token - 1), (own, 0.9), RANKS[rank], f"N x V/t, rank {rank}" if token == 0 else "")
    right = float(columns)
    steps = (("all-reduce:\nmaximum", (r"$\mu$",)), ("all-reduce:\nsum", ("$E$", "target's\nlogit")), ("", ("loss",)))
    for label, names in steps:
        arrow = {"arrowstyle": "-|>", "color": INK}
        axes.annotate("", (right + 2.3, -tokens / 2), (right + 0.3, -tokens / 2), arrowprops=arrow)
        axes.text(right + 1.3, -tokens / 2 + 0.3, label, ha="center", va="bottom", fontsize=8, color=INK)
        right += 2.6
        for name in names:
            for token in range(tokens):
                box(axes, (right, -token - 1), (0.9, 0.9), PAPER, "")
            axes.text(right + 0.45, 0.15, name, ha="center", va="bottom", fontsize=8, color=INK)
            right += 1.2
    axes.text(-0.2, -tokens / 2, "tokens", rotation=90, ha="right", va="center", fontsize=8, color=INK)
    axes.set(xlim=(-1.0, right), ylim=(-tokens - 0.2, 1.3))
    axes.set_axis_off()
    return figure


def plot_kept(bars: Mapping[str, Sequence[float]], kinds: Sequence[str]) -> Picture:
    """Draw the bytes that a layer keeps for backward on each rank: a stacked bar for each way to divide it."""
    figure = picture(7.0, 2.4)
    axes = figure.add_subplot()
    looks = ((COLOURS["activations"], "///"), (VERMILION, "..."), (COLOURS["forward"], ""))
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for kind, part, (colour, hatch) in zip(kinds, parts, looks, strict=True):
            label = kind if place == 0 else None
            axes.barh(place, part / 1e6, 0.6, left, color=colour, hatch=hatch, edgecolor="white", label=label)
            left += part / 1e6
        axes.text(left, place, f"  {left:,.0f} MB", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    widest = max(sum(parts) for parts in bars.values()) / 1e6
    finish(axes, legend="lower right", bars="y", xlabel="MB kept by a layer on each rank", xlim=(0, 1.15 * widest))
    return figure


def plot_links(
    bars: Mapping[str, tuple[float, float]], lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], alone: float
) -> Picture:
    """Draw the time of a layer on several links, beside the time on one device.

    bars   milliseconds of computation and of sums that nothing hides, on 8 ranks
    lines  numbers of ranks, and the milliseconds of the layer on each
    """
    figure = picture(8.0, 3.1)
    left, right = figure.subplots(1, 2)
    for place, (computation, exposed) in enumerate(bars.values()):
        first = place == 0
        left.bar(place, computation, 0.6, color=COLOURS["forward"], label="computation" if first else None)
        label = "sums that nothing hides" if first else None
        left.bar(
            place, exposed, 0.6, computation, color=COLOURS["all_reduce"], hatch="///", edgecolor="white", label=label
        )
        total = computation + exposed
        left.text(place, total, f"{total:.1f}", ha="center", va="bottom", fontsize=9, color=INK)
    left.set_xticks(range(len(bars)), list(bars))
    for (name, (ranks, milliseconds)), colour in zip(lines.items(), RANKS, strict=False):
        right.plot(ranks, milliseconds, marker="o", markersize=4, label=name, color=colour)
    ranks = next(iter(lines.values()))[0]
    right.set_xscale("log", base=2)
    right.set_xticks(ranks, [str(count) for count in ranks])
    for axes in (left, right):
        axes.axhline(alone, color=INK, linestyle="--", linewidth=1)
    note(left, f"one device: {alone:.1f} ms", (left.get_xlim()[0], alone), (4, 3), fontsize=8)
    finish(left, "a layer on t = 8 ranks", "upper left", bars="x", ylabel="ms", ylim=(0, 26))
    finish(right, "the same layer, t ranks", "upper left", xlabel="t", ylabel="ms", ylim=(0, 26))
    return figure


def draw_caught(caught: Mapping[str, set[str]], checks: Sequence[str]) -> Picture:
    """Draw a table: a row for each mistake, a column for each check, filled where the check has noticed it."""
    figure = picture(6.0, 0.5 + 0.32 * len(caught))
    axes = figure.add_subplot()
    for row, noticed in enumerate(caught.values()):
        for column, check in enumerate(checks):
            colour, text = (RANKS[0], "caught") if check in noticed else (PAPER, "")
            box(axes, (column, row), (0.94, 0.86), colour, text)
    show_cells(axes, len(checks), len(caught), list(caught), list(checks), side=0.92)
    return figure
