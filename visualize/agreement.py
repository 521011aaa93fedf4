"""Predicted against measured, layout by layout, from the file that `minipar.bench layouts --machine --json` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from minipar.errors import UsageError
from visualize.style import BLUE, INK, NOT_A_ROW, VERMILION, Picture, number, picture, read_json, tidy

NUMBERS = ("seconds_min", "seconds", "seconds_max", "predicted_seconds", "peak_bytes", "predicted_bytes")
LEAST = 1e-9  # of each of these: the axes are logarithmic


def read_layouts(path: str) -> list[dict[str, Any]]:
    """Read the rows. UsageError if they are not of `bench layouts`, or without predictions."""
    rows = read_json(path)
    try:
        for row in rows:
            shortest, median, longest, *_ = (number(row[key], LEAST) for key in NUMBERS)
            if not (shortest <= median <= longest and layout_name(row)):
                raise ValueError
        if not rows:
            raise ValueError
    except NOT_A_ROW:
        raise UsageError(f"{path} was not written by minipar.bench layouts --machine FILE --json") from None
    return rows  # type: ignore[no-any-return]


def layout_name(row: dict[str, Any]) -> str:
    """Name a layout by its axes above 1 and by what else is not the default."""
    words = [f"{axis} {row[axis]}" for axis in ("dp", "tp", "pp") if row[axis] > 1] or ["one device"]
    words += [f"ZeRO-{row['zero_stage']}"] * (row["zero_stage"] > 0)
    words += [row["schedule"] or ""] * (row["schedule"] is not None)
    words += ["SP"] * row["sequence_parallel"] + ["recompute"] * (row["recompute"] == "full")
    words += [f"{row['microbatches']} microbatches"] * (row["microbatches"] > 1)
    return ", ".join(words)


def plot_agreement(rows: Sequence[dict[str, Any]]) -> Picture:
    """Draw a line for each layout, slowest first: time of a step, and peak memory of the fullest rank."""
    rows = sorted(rows, key=lambda row: -row["seconds"])
    figure = picture(12.5, 2.0 + 0.25 * len(rows))
    time, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    places = range(len(rows))
    measured = [1000 * row["seconds"] for row in rows]
    ends = [1000 * row["seconds_max"] for row in rows]
    spread = [[1000 * (row["seconds"] - row["seconds_min"]) for row in rows]]
    spread += [[end - middle for end, middle in zip(ends, measured, strict=True)]]
    time.errorbar(measured, places, xerr=spread, fmt="none", ecolor=BLUE, elinewidth=2.5, alpha=0.35)
    predicted = [1000 * row["predicted_seconds"] for row in rows]
    _pairs(time, measured, predicted, ends, "measured: median, range of the steps")
    time.set_xlabel("time of a step, ms of the cpu clock (logarithmic)")
    held = [row["peak_bytes"] / 1e6 for row in rows]
    _pairs(memory, held, [row["predicted_bytes"] / 1e6 for row in rows], held, "measured: the ledger's peak")
    memory.set_xlabel("memory of the fullest rank, MB (logarithmic)")
    time.set_yticks(places, [layout_name(row) for row in rows], fontsize=8.5)
    time.invert_yaxis()
    title = f"{len(rows)} layouts of one model, measured and predicted. Percentages: predicted / measured - 1"
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def _pairs(
    axes: Axes, measured: Sequence[float], predicted: Sequence[float], ends: Sequence[float], label: str
) -> None:
    """Draw the two points of each row, and right of them, and of `ends`, their relative difference."""
    places = range(len(measured))
    axes.set_xscale("log")
    axes.plot(measured, places, "o", color=BLUE, markersize=6, label=label)
    axes.plot(predicted, places, "|", color=VERMILION, markersize=13, markeredgewidth=2.2, label="predicted")
    for place, one, other, end in zip(places, measured, predicted, ends, strict=True):
        percent = round(100 * (other / one - 1))
        look = {"va": "center", "ha": "left", "fontsize": 8, "color": INK}
        spot = {"xytext": (8, 0), "textcoords": "offset points"}
        axes.annotate(f"{percent:+d} %" if percent else "0 %", (max(other, end), place), **spot, **look)
    low, high = min(*measured, *predicted), max(*measured, *predicted)
    axes.set_xlim(low / 1.2, high * max(high / low, 1.5) ** 0.16)
    ticks = [step * 10.0**power for power in range(-1, 8) for step in (1, 2, 5)]
    axes.set_xticks([tick for tick in ticks if low / 1.2 <= tick <= high * 1.2], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9)
    tidy(axes)
