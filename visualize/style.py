"""What all pictures share: colours that colour-blind readers can tell apart, one look, one way to be saved."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from minipar.errors import UsageError

# Okabe and Ito's eight colours ("Color Universal Design", 2008), without black.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#999999"
DARK = "#3A3A3A"
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
INK, PAPER = "#222222", "#ECECEC"
MINT = "#9FDBCA"  # green, light enough to differ from the others in greyscale

# The same thing has the same colour in every picture.
COLOURS = {
    "forward": BLUE,
    "backward": ORANGE,
    "F": BLUE,  # a pipeline's actions: forward, whole backward, or its two halves for inputs and weights
    "B": ORANGE,
    "I": PURPLE,
    "W": MINT,
    "recompute": SKY,
    "optimizer": GREEN,
    "all_reduce": PURPLE,
    "reduce_scatter": VERMILION,
    "all_gather": YELLOW,
    "broadcast": SKY,
    "all_to_all": GREEN,
    "barrier": INK,
    "send": SKY,
    "recv": GREY,
    # What memory holds; with the optimizer's green five lightnesses that grey print tells apart.
    "parameters": BLUE,
    "gradients": ORANGE,
    "activations": YELLOW,
    "buffers": DARK,
}
FORMATS = (".png", ".svg", ".pdf")


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in a fixed order: its own, or the next free one for names that have none."""
    order = list(COLOURS)
    names = sorted(set(names), key=lambda name: (order.index(name) if name in order else len(order), name))
    taken = {COLOURS.get(name) for name in names}
    free = [colour for colour in (GREY, SKY, VERMILION, YELLOW, PURPLE, GREEN) if colour not in taken]
    chosen: dict[str, str] = {}
    for name in names:
        chosen[name] = COLOURS.get(name) or (free.pop(0) if free else GREY)
    return chosen


def lightness(colour: str) -> float:
    """CIE L*, 0 (black) to 100 (white): what is left of a colour in greyscale."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 216 / 24389 else y * 24389 / 27


def at_lightness(colour: str, target: float) -> str:
    """The colour mixed with black or with white until its lightness is `target`."""
    end = 0.0 if target < lightness(colour) else 1.0
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        red, green, blue = (part + (end - part) * middle for part in to_rgb(colour))
        mixed = to_hex((red, green, blue))
        if (lightness(mixed) > target) == (end == 0.0):
            low = middle
        else:
            high = middle
    return mixed


def ink_on(colour: str) -> str:
    """The colour of text that can be read on `colour`."""
    return "white" if lightness(colour) < 55 else INK


class Picture(Figure):
    """A Figure without pyplot's global state, which shows itself in a notebook (the one hosting an MPI engine too)."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def picture(width: float, height: float) -> Picture:
    """An empty picture; width and height in inches."""
    return Picture(figsize=(width, height), layout="constrained", facecolor="white")


def tidy(axes: Axes) -> None:
    """Fewer lines: no frame above and to the right, a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=PAPER, linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, path: str) -> None:
    """Write a picture (.png, .svg or .pdf), making its directory. UsageError if that is not possible."""
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"--out {path}: the name must end in {', '.join(FORMATS)}")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from None


def read_text(path: str) -> str:
    """A file's text. UsageError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file") from None


def read_json(path: str) -> Any:
    """A file's JSON value. UsageError if it is not JSON."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None


def write_json(path: str, value: Any) -> None:
    """Write what --json asks for; "-" is standard output, which then gets nothing else. UsageError if not possible."""
    text = json.dumps(value, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror}") from None


def byte_label(value: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError
