"""Draw for chapter 2: a block (first page), attention (2.2), shares of a step (2.4), memory over backward (2.8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from chapters.support.draw import finish
from minipar.nn import GPTConfig
from visualize.style import BLUE, GREY, INDIGO, INK, LINES, ORANGE, PAPER, YELLOW, Picture, ink_on, picture

PARTS = (BLUE, YELLOW, INDIGO, ORANGE, GREY)  # grey print tells their lightnesses apart

Moment = tuple[str, int, int]  # where, bytes held there, the most held since the moment before


@dataclass(frozen=True)
class Operation:
    """One operation of a block: its name, the shape of its output, and what it keeps for backward, in elements."""

    name: str
    shape: str
    keeps: str
    kept: int


def block_operations(B: int, T: int, h: int, a: int) -> list[Operation]:
    """List the operations of a GPT-2 block, for B samples of T tokens, h elements per token and a heads."""
    N = B * T
    norm = ("(B, T, h)", "normalized rows, 1/deviations: N h + N", N * h + N)
    scores = ("(B, T, h)", "q, k, v, output: 4 N h; probabilities: a B T²", 4 * N * h + a * B * T**2)
    return [
        Operation("ln_1", *norm),
        Operation("c_attn", "(B, T, 3h)", "its input: N h", N * h),
        Operation("attention, a heads", *scores),
        Operation("attn.c_proj", "(B, T, h)", "nothing more: its input is the output above", 0),
        Operation("+", "(B, T, h)", "nothing", 0),
        Operation("ln_2", *norm),
        Operation("c_fc", "(B, T, 4h)", "its input: N h", N * h),
        Operation("gelu", "(B, T, 4h)", "its input, the tanh: 8 N h", 8 * N * h),
        Operation("mlp.c_proj", "(B, T, h)", "its input: 4 N h", 4 * N * h),
        Operation("+", "(B, T, h)", "nothing", 0),
    ]


def plot_block(operations: Sequence[Operation], skips: Sequence[tuple[int, int]]) -> Picture:
    """Draw a block's operations from top to bottom, and beside each what it keeps for backward, as a bar.

    skips: (operation before which a skip path leaves, operation at which it is added). The bars are to scale.
    """
    figure = picture(7.0, 0.9 + 0.44 * len(operations))
    axes = figure.add_subplot()
    left, right, bars = 0.0, 2.6, 4.35  # edges of the boxes; where the bars begin
    longest = max(operation.kept for operation in operations)
    scale = 2.6 / longest
    for row, operation in enumerate(operations):
        axes.add_patch(Rectangle((left, row + 0.14), right - left, 0.62, facecolor=PAPER, edgecolor=INK, linewidth=0.9))
        axes.text((left + right) / 2, row + 0.45, operation.name, ha="center", va="center", fontsize=9)
        axes.text(right + 0.1, row + 0.45, operation.shape, va="center", fontsize=9)
        axes.add_patch(_arrow((left + right) / 2, row - 0.24, row + 0.14))
        if operation.kept:
            width = operation.kept * scale
            axes.add_patch(Rectangle((bars, row + 0.5), width, 0.3, facecolor=YELLOW, edgecolor=INK, linewidth=0.7))
        axes.text(bars, row + 0.28, operation.keeps, va="center", fontsize=8.5)
    for start, end in skips:
        y = (start - 0.12, end + 0.45)
        axes.plot([(left + right) / 2, left - 0.35, left - 0.35], [y[0], y[0], y[1]], color=BLUE, linewidth=1.8)
        axes.add_patch(FancyArrowPatch((left - 0.35, y[1]), (left, y[1]), **ARROW, color=BLUE))
    for x, text in (((left + right) / 2, "operation"), (right + 0.1, "output"), (bars, "kept for backward")):
        axes.text(x, -0.75, text, ha="center" if x < right else "left", va="center", fontsize=9.5, weight="bold")
    axes.add_patch(_arrow((left + right) / 2, len(operations) - 0.24, len(operations) + 0.14))
    axes.set_xlim(-0.5, bars + 3.0)
    axes.set_ylim(len(operations) + 0.2, -1.0)
    axes.set_axis_off()
    return figure


ARROW: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}


def _arrow(x: float, start: float, end: float) -> FancyArrowPatch:
    """Create a short arrow downwards."""
    return FancyArrowPatch((x, start), (x, end), **ARROW, color=INK)


def plot_attention(probabilities: np.ndarray, gradients: np.ndarray) -> Picture:
    """Draw a head's probabilities and the gradients of its scores, (T, T) each: a row for each token that looks."""
    figure = picture(7.2, 3.4)
    left, right = figure.subplots(1, 2)
    size = np.abs(gradients).max()
    first = left.imshow(probabilities, cmap="Blues", vmin=0, vmax=0.5)
    second = right.imshow(gradients, cmap="RdBu_r", vmin=-size, vmax=size)
    for axes, image, title in ((left, first, "probabilities"), (right, second, "gradients of the scores")):
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("token that is looked at")
        figure.colorbar(image, ax=axes, shrink=0.85)
    left.set_ylabel("token that looks")
    return figure


def shares(config: GPTConfig, length: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parameters, and the operations of a forward per sample, of each part of a GPT."""
    h, layers = config.n_embd, config.n_layer
    parameters = {
        "attention projections": layers * 4 * h**2,
        "attention scores": 0,
        "MLP": layers * 8 * h**2,
        "embeddings, head": (config.vocab_size + config.n_positions) * h,
        "biases, norms": layers * 13 * h + 2 * h,
    }
    operations = {
        "attention projections": layers * 8 * length * h**2,
        "attention scores": layers * 4 * length**2 * h,
        "MLP": layers * 16 * length * h**2,
        "embeddings, head": 2 * length * h * config.vocab_size,
    }
    return parameters, operations


def plot_shares(bars: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw a bar of length 100 % for each entry, cut into its parts: {bar: {part: amount}}, the same parts in each."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    figure = picture(7.0, 1.2 + 0.5 * len(bars))
    axes = figure.add_subplot()
    for place, bar in enumerate(bars.values()):
        total, left = sum(bar.values()), 0.0
        for part, colour in zip(parts, PARTS * len(parts), strict=False):
            share = 100 * bar.get(part, 0.0) / total
            axes.barh(place, share, left=left, height=0.66, color=colour, edgecolor="white", linewidth=0.8)
            if share >= 4:
                look = {"ha": "center", "va": "center", "color": ink_on(colour), "fontsize": 9}
                axes.text(left + share / 2, place, f"{share:.0f}", **look)
            left += share
    for part, colour in zip(parts, PARTS * len(parts), strict=False):
        axes.barh(0, 0, color=colour, label=part)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    finish(axes, xlim=(0, 100), xlabel="share (%)", bars="y")
    figure.legend(loc="outside upper center", ncols=min(3, len(parts)), frameon=False, fontsize=8.5)
    return figure


def plot_memory(runs: Mapping[str, Sequence[Moment]], turn: str | None = None) -> Picture:
    """Draw bytes held at named moments (line) and the peaks between (dots): {run: moments}, the same moments in each.

    `turn` names the moment at which forward ends and backward begins.
    """
    figure = picture(7.0, 4.0)
    axes = figure.add_subplot()
    names: list[str] = []
    for i, (label, moments) in enumerate(runs.items()):
        colour, line, mark = LINES[i % len(LINES)], ("-", "--", ":")[i % 3], "vos"[i % 3]
        names = [name for name, _, _ in moments]
        held = [now / 2**20 for _, now, _ in moments]
        peaks = [peak / 2**20 for _, _, peak in moments]
        text = f"{label}: held (peak {max(peaks):.1f} MiB)"
        axes.plot(range(len(names)), held, line, color=colour, linewidth=2.0, label=text)
        axes.fill_between(range(len(names)), held, color=colour, alpha=0.12, linewidth=0)
        places = [place - 0.5 for place in range(1, len(names))]
        axes.plot(places, peaks[1:], mark, color=colour, markersize=5, label=f"{label}: most held in between")
    if turn is not None:
        axes.axvline(names.index(turn), color=INK, linestyle=":", linewidth=1.0)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    figure.legend(frameon=False, fontsize=8.5, ncols=2, loc="outside upper center")
    finish(axes, ylabel="memory (MiB)", ylim=(0, None))
    return figure
