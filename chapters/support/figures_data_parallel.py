"""Figure of chapter 4: the time of a step by bucket size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visualize.style import (
    BLUE,
    GREEN,
    INK,
    VERMILION,
    Picture,
    byte_label,
    picture,
    tidy,
)


def plot_bucket_sizes(rows: Sequence[Mapping[str, Any]], naive: float, computation: float) -> Picture:
    """Draw seconds of a step against the size of its buckets, between two levels.

    rows         {"bucket_bytes", "seconds", "buckets"}, one point each
    naive        the step with one all-reduce after backward: nothing hidden
    computation  the step without any communication: everything hidden
    """
    rows = sorted(rows, key=lambda row: row["bucket_bytes"])
    figure = picture(7.5, 4.2)
    axes = figure.add_subplot()
    sizes, times = [row["bucket_bytes"] for row in rows], [row["seconds"] * 1e3 for row in rows]
    axes.axhline(naive * 1e3, color=VERMILION, linestyle="--", linewidth=1.5, label="one all-reduce after backward")
    axes.plot(sizes, times, "o-", color=BLUE, linewidth=1.8, label="buckets (their number above each point)")
    axes.axhline(computation * 1e3, color=GREEN, linestyle="--", linewidth=1.5, label="computation alone")
    for row, size, time in zip(rows, sizes, times, strict=True):
        axes.annotate(
            str(row["buckets"]), (size, time), xytext=(0, 8), textcoords="offset points", ha="center", color=INK
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: byte_label(value))
    axes.set_ylim(0, 1.15 * max(*times, naive * 1e3))
    axes.set_xlabel("bucket size")
    axes.set_ylabel("time of a step (ms)")
    axes.legend(frameon=False, loc="lower right")
    tidy(axes)
    return figure
