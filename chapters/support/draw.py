"""Draw what figures of several chapters draw alike: panels, legends, notes, boxes, grids, rows of time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from visualize.style import GREY, INK, LINES, YELLOW, ink_on, tidy

RANKS = (*LINES, GREY, YELLOW)  # a colour for each rank, and for what it holds


def finish(axes: Axes, title: str = "", legend: str = "", size: float = 8, bars: str = "", **settings: Any) -> None:
    """Give a panel its title, on the left, its legend and what else Axes.set takes, and tidy it.

    legend  where it stands; without a place there is none
    size    of the legend's font; the title's is larger by one
    bars    the axis, "x" or "y", along which bars stand beside one another: it gets no lines of the grid
    """
    axes.set(**settings)
    axes.set_title(title, loc="left", fontsize=size + 1)
    if legend:
        axes.legend(frameon=False, fontsize=size, loc=legend)
    tidy(axes)
    if bars:
        axes.grid(visible=False, axis=bars)


def legend_outside(
    figure: Figure, handles: Sequence[Artist], place: str = "upper center", ncols: int = 0, **look: Any
) -> None:
    """Explain what is drawn in all panels, beside them: in one row, or in `ncols` columns."""
    look = {"frameon": False, "fontsize": 9} | look
    figure.legend(handles=handles, loc=f"outside {place}", ncols=ncols or len(handles), **look)


def patches(colours: Mapping[str, str]) -> list[Artist]:
    """Return what a legend shows for colours, given by name."""
    return [Patch(color=colour, label=name) for name, colour in colours.items()]


def note(axes: Axes, text: str, spot: tuple[float, float], shift: tuple[float, float], **look: Any) -> None:
    """Write a text so many points beside a spot of the data."""
    axes.annotate(text, spot, xytext=shift, textcoords="offset points", color=INK, **look)


def box(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    colour: str,
    text: str,
    fontsize: float = 8,
    va: str = "center_baseline",
    **look: Any,
) -> None:
    """Draw a rectangle with a text in its middle that can be read on its colour."""
    axes.add_patch(Rectangle(corner, *size, facecolor=colour, **look))
    x, y = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    axes.text(x, y, text, ha="center", va=va, fontsize=fontsize, color=ink_on(colour))


def show_cells(
    axes: Axes, width: float, height: float, rows: Sequence[str] = (), columns: Sequence[str] = (), side: float = 1.0
) -> None:
    """Show cells without frame and ticks, the first row on top, with a name beside each row and below each column.

    side  of what is drawn in a cell; the rest of the cell, which is 1 wide, is a gap
    """
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_xticks(np.arange(len(columns)) + side / 2, columns)
    axes.set_yticks(np.arange(len(rows)) + side / 2, rows)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def show_time(axes: Axes, rows: Sequence[str], end: float, label: str) -> None:
    """Show rows over time, the first one on top: their names, no ticks, and a line for the time below."""
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set_xlim(0, end)
    axes.set_xticks([])
    axes.set_xlabel(label, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
