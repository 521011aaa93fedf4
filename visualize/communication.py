"""Bytes sent next to their formula, and times of collectives next to MPI's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from minipar.errors import UsageError
from visualize.style import (
    BLUE,
    GREY,
    INK,
    LINES,
    NOT_A_ROW,
    Picture,
    byte_label,
    number,
    picture,
    read_json,
    save,
    tidy,
)

Row = Mapping[str, Any]
UNKNOWN = ("mpi_seconds", "wire_bytes", "wire_bytes_expected")  # null for MPI, which does not say what it sends
NUMBERS = ("ranks", "bytes", "seconds", *UNKNOWN)


def plot_bytes(rows: Sequence[Row], path: str | None = None) -> Picture:
    """Draw the bytes sent by each operation, counted (bar) and by the formula (mark).

    rows: {"op", "axis" (optional), "bytes", "expected" (optional)}, one bar each, from the top down. `path` also saves.
    """
    figure = picture(7.0, 1.2 + 0.42 * len(rows))
    axes = figure.add_subplot()
    places = range(len(rows))
    counted = [row["bytes"] for row in rows]
    axes.barh(places, counted, height=0.6, color=BLUE, label="counted")
    ends = [max(row["bytes"], row.get("expected") or 0) for row in rows]
    for place, value, end in zip(places, counted, ends, strict=True):
        axes.annotate(f"{value:,}", (end, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    formula = [
        (row["expected"], place) for place, row in zip(places, rows, strict=True) if row.get("expected") is not None
    ]
    if formula:
        axes.plot(*zip(*formula, strict=True), "|", color=INK, markersize=22, markeredgewidth=2.5, label="formula")
    axes.set_yticks(places, [f"{row['op']} ({row['axis']})" if row.get("axis") else row["op"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max([*ends, 1]))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set_xlabel("bytes sent")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9, markerscale=0.5)
    if path is not None:
        save(figure, path)
    return figure


def read_bench(path: str) -> list[Row]:
    """Read the rows of `minipar.bench collectives --json FILE`. UsageError if the file is something else."""
    rows, foreign = read_json(path), "not written by minipar.bench collectives"
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path} is not a list of rows: {foreign}")
    for place, row in enumerate(rows):
        missing = [name for name in ("op", "algorithm", *NUMBERS) if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{path}, row {place} lacks {', '.join(missing)}: {foreign}")
        try:
            if not (isinstance(row["op"], str) and isinstance(row["algorithm"], str)):
                raise TypeError("op and algorithm are not texts")
            for name in NUMBERS:
                if row[name] is not None or name not in UNKNOWN:
                    number(row[name], 0)
        except NOT_A_ROW as error:
            raise UsageError(f"{path}, row {place}: {error}: {foreign}") from None
    return rows


def plot_bench(rows: Sequence[Row]) -> Picture:
    """Draw each operation's time, next to MPI's own, and its bytes sent, next to the formula, against the array's size.

    rows: as `minipar.bench collectives --json` writes them; seconds, bytes, and bytes sent by one rank.
    """
    rows = [row for row in rows if row["bytes"] > 0]  # a barrier has no size to be drawn against
    if not rows:
        raise UsageError("the benchmark holds no operation on an array of one byte or more")
    operations = list(dict.fromkeys(row["op"] for row in rows))
    figure = picture(10.0, 0.9 + 2.9 * len(operations))
    grid = figure.subplots(len(operations), 2, squeeze=False)
    for (time, wire), op in zip(grid, operations, strict=True):
        lines: dict[str, list[Row]] = defaultdict(list)
        for row in sorted((row for row in rows if row["op"] == op), key=lambda row: row["bytes"]):
            lines[f"{row['algorithm']}, {row['ranks']} ranks"].append(row)
        for (label, line), colour in zip(lines.items(), LINES * len(lines), strict=False):
            _points(time, line, "seconds", "o-", color=colour, markersize=4, label=label)
            _points(time, line, "mpi_seconds", ":", color=colour, linewidth=1.2)
            _points(wire, line, "wire_bytes", "o", color=colour, markersize=5, fillstyle="none")
            _points(wire, line, "wire_bytes_expected", "-", color=colour, linewidth=1.0)
        time.plot([], [], ":", color=GREY, label="MPI's own")
        wire.plot([], [], "o", color=GREY, fillstyle="none", label="counted")
        wire.plot([], [], "-", color=GREY, label="formula")
        _log_axes(time, f"{op}: time", "s")
        _log_axes(wire, f"{op}: bytes sent by a rank", "B")
    return figure


def _points(axes: Axes, line: Sequence[Row], name: str, style: str, **looks: Any) -> None:
    """Draw one curve of the benchmark, without the rows that have no such value, or 0 on a logarithmic axis."""
    known = [row for row in line if row[name]]
    axes.plot([row["bytes"] for row in known], [row[name] for row in known], style, **looks)


def _log_axes(axes: Axes, title: str, unit: str) -> None:
    """Make both axes logarithmic, with bytes below and seconds or bytes on the left."""
    if not any(len(line.get_xdata()) for line in axes.lines):
        axes.set_axis_off()  # no row has this value
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: byte_label(value))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("size of the array")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
