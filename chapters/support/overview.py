"""The picture with which chapter 0 opens: eight devices, and what each strategy divides among them and sends.

Each later chapter shows the same picture with its own rows marked. `python -m chapters.support.overview FILE` draws it
without a mark into a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from visualize.style import COLOURS, GREY, INK, VERMILION, Picture, picture, save

DEVICES = 8
KINDS = ("parameters", "gradients", "optimizer state", "activations", "tokens")
KIND_COLOURS = (COLOURS["parameters"], COLOURS["gradients"], COLOURS["optimizer"], COLOURS["activations"], GREY)
WHOLE = "whole"  # every device has all of it
CUT = "cut"  # every device has an eighth of it
FALLING = "falling"  # the first device has as much as one device alone, each further one an eighth less


@dataclass(frozen=True)
class Row:
    """One strategy on eight devices: what each device has of the five KINDS, what it sends, and when."""

    key: str
    name: str
    has: tuple[str, str, str, str, str]
    sends: str
    when: str


ROWS = (
    Row("one", "one device", (WHOLE,) * 5, "nothing", ""),
    Row("dp", "data parallelism", (WHOLE, WHOLE, WHOLE, CUT, CUT), "gradients", "all-reduce, once per step"),
    Row("zero1", "ZeRO 1", (WHOLE, WHOLE, CUT, CUT, CUT), "gradients, parameters", "reduce-scatter, then all-gather"),
    Row("zero2", "ZeRO 2", (WHOLE, CUT, CUT, CUT, CUT), "gradients, parameters", "the same"),
    Row("zero3", "ZeRO 3, FSDP", (CUT, CUT, CUT, CUT, CUT), "parameters, gradients", "2 all-gathers, a reduce-scatter"),
    Row("tp", "tensor parallelism", (CUT, CUT, CUT, CUT, WHOLE), "activations", "two sums per block, each way"),
    Row("pp", "pipeline", (CUT, CUT, CUT, FALLING, WHOLE), "activations", "from stage to stage"),
    Row(
        "cp",
        "context parallelism",
        (WHOLE, WHOLE, WHOLE, CUT, CUT),
        "keys, values; gradients",
        "ring per block; all-reduce per step",
    ),
    Row("ep", "expert parallelism", (CUT, CUT, CUT, CUT, CUT), "tokens", "to their experts and back, per block"),
)

CAPTION = (
    "Each box is one device. It is filled with what the device holds: all of it, or its own eighth.\n"
    "Tensor parallelism is drawn with sequence parallelism. Of expert parallelism only the experts are drawn.\n"
    "A pipeline under 1F1B: the first device holds as many activations as one microbatch of all layers, the last an "
    "eighth."
)
BOX = 0.085  # the width of one device, as a part of a column
GAP = 0.02


def draw_strategies(here: Sequence[str] = ()) -> Picture:
    """Draw the nine rows. `here` has the keys of those that a chapter is about; the others are pale."""
    unknown = set(here) - {row.key for row in ROWS}
    if unknown:
        raise ValueError(f"no such rows: {sorted(unknown)}")
    figure = picture(10.0, 4.3)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-2.05, len(KINDS) + 4.05)
    axes.set_ylim(len(ROWS) + 1.1, -0.75)
    for column, kind in enumerate(KINDS):
        axes.text(column + 0.42, -0.35, kind, ha="center", va="center", fontsize=8, color=INK)
    axes.text(len(KINDS) + 0.1, -0.35, "each device sends", va="center", fontsize=8, color=INK)
    axes.text(len(KINDS) + 1.75, -0.35, "when", va="center", fontsize=8, color=INK)
    caption = axes.text(-1.9, len(ROWS) + 0.6, CAPTION, va="center", fontsize=7.5, color=INK)
    caption.set_in_layout(False)  # the layout would make room for its whole width beside the axes
    for number, row in enumerate(ROWS):
        draw_row(axes, number, row, is_here=row.key in here, is_pale=bool(here) and row.key not in here)
    return figure


def draw_row(axes: Axes, number: int, row: Row, is_here: bool, is_pale: bool) -> None:
    """Draw one strategy: its name, a strip of devices for each kind, and its messages."""
    alpha = 0.35 if is_pale else 1.0
    words = 0.65 if is_pale else 1.0  # words stay legible, also on a phone
    weight = "bold" if is_here else "normal"
    middle = number + 0.5
    if is_here:
        frame = Rectangle((-2.0, number + 0.06), len(KINDS) + 6.0, 0.88, fill=False, edgecolor=VERMILION, linewidth=1.4)
        axes.add_patch(frame)
    axes.text(-1.9, middle, row.name, va="center", fontsize=8.5, color=INK, alpha=words, fontweight=weight)
    devices = 1 if row.key == "one" else DEVICES
    for column, (has, colour) in enumerate(zip(row.has, KIND_COLOURS, strict=True)):
        for device in range(devices):
            draw_device(axes, column, number, device, has, colour, alpha)
    axes.text(len(KINDS) + 0.1, middle, row.sends, va="center", fontsize=8, color=INK, alpha=words)
    axes.text(len(KINDS) + 1.75, middle, row.when, va="center", fontsize=8, color=INK, alpha=words)


def draw_device(axes: Axes, column: int, number: int, device: int, has: str, colour: str, alpha: float) -> None:
    """Draw one device as a box, filled with what it has: everything, the eighth that is its own, or as FALLING says."""
    left = column + device * (BOX + GAP)
    top = number + 0.16
    height = 0.68
    frame = Rectangle((left, top), BOX, height, fill=False, edgecolor=INK, linewidth=0.5, alpha=alpha)
    axes.add_patch(frame)
    if has == CUT:
        top = top + device * height / DEVICES
        height = height / DEVICES
    if has == FALLING:
        top = top + device * height / DEVICES
        height = height * (DEVICES - device) / DEVICES
    axes.add_patch(Rectangle((left, top), BOX, height, color=colour, alpha=alpha, linewidth=0))


if __name__ == "__main__":
    save(draw_strategies(), sys.argv[1])
