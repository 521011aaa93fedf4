"""Everything that all pictures share: colour-blind safe colours, one look, and how files are read and written."""

from __future__ import annotations

import io
import json
import math
import os
import stat
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from minipar.errors import UsageError, print_line

# Okabe and Ito's eight colours ("Color Universal Design", 2008), without black.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#999999"
DARK = "#3A3A3A"
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
INK, PAPER = "#222222", "#ECECEC"
MINT = "#9FDBCA"  # green, light enough to differ from the others in greyscale
INDIGO, WINE = "#332288", "#882255"  # Paul Tol's, for the operations that are rarely seen

# The same thing has the same colour in every picture, and no collective that of a computation.
COLOURS = {
    "forward": BLUE,
    "backward": ORANGE,
    "F": BLUE,  # a pipeline's actions: forward, whole backward, or its two halves for inputs and weights
    "B": ORANGE,
    "I": PURPLE,
    "W": MINT,
    "optimizer": GREEN,
    "all_reduce": SKY,
    "reduce_scatter": VERMILION,
    "all_gather": YELLOW,
    "broadcast": WINE,
    "all_to_all": INDIGO,
    "barrier": INK,
    "send": DARK,
    "recv": GREY,
    # Kinds of memory; with the optimizer's green five lightnesses that grey print tells apart.
    "parameters": BLUE,
    "gradients": ORANGE,
    "activations": YELLOW,
    "buffers": DARK,
}
FORMATS = (".png", ".svg", ".pdf")


def colours(names: Iterable[str]) -> dict[str, str]:
    """Assign a colour to each name, in a fixed order: its own, or the next free one for a name that has none."""
    order = list(COLOURS)
    names = sorted(set(names), key=lambda name: (order.index(name) if name in order else len(order), name))
    taken = {COLOURS.get(name) for name in names}
    free = [colour for colour in (GREY, SKY, VERMILION, YELLOW, PURPLE, GREEN) if colour not in taken]
    return {name: COLOURS.get(name) or (free.pop(0) if free else GREY) for name in names}


@cache
def lightness(colour: str) -> float:
    """Compute CIE L*, a colour's lightness in greyscale: 0 (black) to 100 (white)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 216 / 24389 else y * 24389 / 27


@cache
def at_lightness(colour: str, target: float) -> str:
    """Mix a colour with black or with white until its lightness is `target`."""
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
    """Choose the colour of text that can be read on `colour`."""
    return "white" if lightness(colour) < 55 else INK


# The mesh axes, with lightnesses that differ in grey. None is the colour of a kind of memory.
AXIS_COLOURS = {
    "tp": at_lightness(PURPLE, 65),
    "cp": at_lightness(GREEN, 8),
    "ep": at_lightness(YELLOW, 88),
    "dp": WINE,
    "pp": at_lightness(VERMILION, 48),
}


class Picture(Figure):
    """A Figure without pyplot's global state, which shows itself in a notebook, on an MPI engine too."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def picture(width: float, height: float) -> Picture:
    """Create an empty picture; width and height in inches."""
    return Picture(figsize=(width, height), layout="constrained", facecolor="white")


def tidy(axes: Axes) -> None:
    """Remove the frame above and on the right, and draw a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=PAPER, linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, path: str) -> None:
    """Write a picture (.png, .svg or .pdf) and make its directory. UsageError if that is not possible."""
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"--out {path}: the name must end in {', '.join(FORMATS)}")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of characters that the font lacks, in names from a file
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from None


def printable(text: str) -> str:
    """Escape line breaks and other control characters, so that a path cannot change what a terminal shows."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def check_file(path: str, most: float = math.inf, remedy: str = "") -> None:
    """Raise UsageError if a path is not a file (a pipe or a device may have no end) or has more than `most` bytes."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        if status.st_size > most:
            raise OSError(0, f"{status.st_size:,} bytes are more than {most:,}{remedy}")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None


LONG, MOST_BYTES = 16 << 20, 200 << 20  # of a file: from where reading it is announced, and the most that is read


def read_text(path: str) -> str:
    """Read a file's text. UsageError if it cannot be read or has more than MOST_BYTES.

    From LONG bytes on, a line on standard error says at once that it may take long.
    """
    check_file(path, MOST_BYTES, "; write one of fewer steps")
    size = os.path.getsize(path)
    if size >= LONG:
        print_line(f"visualize: reading {size / 1e6:.0f} MB from {printable(path)}, which can take minutes")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file") from None


def parse_json(text: str, path: str, line: int | None = None) -> Any:
    """Parse the JSON value of a file or of one of its lines. UsageError if it is not JSON, or nested too deep."""
    name = path if line is None else f"{path}, line {line}"
    try:
        value = json.loads(text)
        if r"\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no character and has no picture
        return value
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not JSON that can be read: {error.reason}") from None
    except json.JSONDecodeError as error:
        place = f"line {line or error.lineno}, column {error.colno}"
        raise UsageError(f"{name} is not JSON: {error.msg} in {place}") from None
    except RecursionError:
        raise UsageError(f"{name} is not JSON that can be read: nested too deep") from None
    except ValueError:
        raise UsageError(f"{name} is not JSON that can be read: an integer of thousands of digits") from None


def read_json(path: str) -> Any:
    """Read a file's JSON value. UsageError if it cannot be read or is not JSON."""
    return parse_json(read_text(path), path)


LARGEST = 1e18  # of any number in a file: a picture could not show more


def number(value: Any, least: float = -LARGEST) -> float:
    """Convert a JSON number to a float. TypeError or ValueError if it is none, or not from `least` to LARGEST."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.40} is not a number")
    if not least <= value <= LARGEST:
        raise ValueError(f"{value!r:.40} is not between {least:g} and {LARGEST:g}")
    return float(value)


NOT_A_ROW = (AttributeError, KeyError, TypeError, ValueError, OverflowError)  # raised by foreign JSON


UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def byte_unit(value: float) -> tuple[str, int]:
    """Choose the unit in which bytes are written, and its size: 1536 -> ("KiB", 1024)."""
    return next((unit, size) for unit, size in UNITS if abs(value) >= size or size == 1)


def signed_percent(ratio: float) -> str:
    """Write how far a ratio is from 1, in percent, and no sign at zero: 1.11 -> '+11 %', 0.999 -> '0 %'."""
    percent = round(100 * (ratio - 1))
    return f"{percent:+d} %" if percent else "0 %"


def byte_label(value: float, unit: tuple[str, int] | None = None) -> str:
    """Write bytes with four digits, in their own unit or a given one: 1536 -> '1.5 KiB'."""
    name, size = unit or byte_unit(value)
    return f"{value / size:.{4 if value >= size else 3}g} {name}"
