"""Pictures of what a run measured: its loss, its memory, the bytes that it sent, the times of collectives.

The files are those of `minipar.train --metrics`, `minipar.train --memory` and `minipar.bench collectives --json`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from minipar.errors import UsageError

from .style import (
    BLUE,
    COLOURS,
    GREY,
    INK,
    LINES,
    NOT_A_ROW,
    Picture,
    byte_label,
    byte_unit,
    number,
    parse_json,
    picture,
    read_json,
    read_text,
    tidy,
)

# ---- loss ------------------------------------------------------------------------------------------------------------

REACH = 10  # steps before and after: of their mean is the smoothed line that is drawn over a noisy curve
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1, 1)))  # of several runs, to differ in grey


def read_metrics(path: str) -> list[dict[str, Any]]:
    """Read the rows of a metrics file, one JSON object per line. UsageError names the line that is not one."""
    rows = []
    for line, text in enumerate(read_text(path).splitlines(), start=1):
        row = parse_json(text, path, line)
        try:
            number(row["step"], 0)
            rows.append(row | {"loss": float("nan") if row["loss"] != row["loss"] else number(row["loss"])})
        except NOT_A_ROW:
            foreign = "not written by minipar.train --metrics"
            raise UsageError(f"{path}, line {line} has no step and loss: {foreign}") from None
    if not rows:
        raise UsageError(f"{path} holds no steps")
    return rows


def plot_loss(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], reference: float | None = None, reference_label: str = ""
) -> Picture:
    """Draw loss in nats per token against the step, counted from 1, for each run ({label: rows with step and loss}).

    A long run has two lines: thin is every step, thick is smoothed; the legend says which. A single run may be called
    "", and the legend then names no run.
    `reference` draws a level to compare with: the entropy of single-byte frequencies, say, which a model beats only
    by looking at what came before.
    """
    figure = picture(7.0, 4.0)
    axes = figure.add_subplot()
    count = max(len(rows) for rows in runs.values())
    figure.suptitle(f"Training loss, {count:,} step{'s' * (count > 1)}", x=0.01, ha="left", fontsize=10.5, color=INK)
    for (label, rows), colour, dashes in zip(runs.items(), LINES * len(runs), DASHES * len(runs), strict=False):
        steps, losses = [row["step"] + 1 for row in rows], [float(row["loss"]) for row in rows]
        name = f"{label}: " if label else ""
        if label.startswith("_"):
            name = f" {name}"  # matplotlib hides labels that begin with "_"
        if len(losses) > 6 * REACH:
            smooth = _smooth(losses)
            axes.plot(steps, losses, color=colour, linewidth=0.9, alpha=0.45)
            text = f"{name}smoothed, {losses[0]:.3f} at first, {smooth[-1]:.3f} at last"
            axes.plot(steps, smooth, color=colour, linestyle=dashes, linewidth=2.0, label=text)
        else:
            text = f"{name}every step, {losses[0]:.3f} at first, {losses[-1]:.3f} at last"
            axes.plot(steps, losses, color=colour, linestyle=dashes, linewidth=1.8, label=text)
        if len(losses) == 1:
            axes.plot(steps, losses, "o", color=colour)
    if any(len(rows) > 6 * REACH for rows in runs.values()):
        text = f"thin line: every step; smoothed: the mean of up to {REACH} steps on either side"
        axes.plot([], [], color=LINES[0] if len(runs) == 1 else GREY, alpha=0.45, linewidth=0.9, label=text)
    if reference is not None:
        text = f"{reference_label} {reference:.3f}".strip()
        axes.axhline(reference, color=GREY, linestyle="--", linewidth=1.5, label=text)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1))  # above the curves
    tidy(axes)
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    """Average each value with up to REACH before and after it; with fewer at the start, where the loss falls fast."""
    averages = []
    for i in range(len(values)):
        reach = min(REACH, i // 4)
        around = values[i - reach : i + reach + 1]  # at the end fewer values follow
        averages.append(math.fsum(around) / len(around))
    return averages


# ---- memory ----------------------------------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")  # minipar.memory's, from the bottom up
LedgerMoment = tuple[str, Sequence[int]]  # phase, bytes of each of KINDS
NARROWEST = 0.25  # of all moments: room for a phase's name


def read_ledger(path: str, rank: int) -> Sequence[LedgerMoment]:
    """Read one rank's moments from a file of `minipar.train --memory`. UsageError for another file or rank."""
    data, foreign = read_json(path), "not written by minipar.train --memory"
    if not isinstance(data, dict) or not isinstance(data.get("ranks"), list) or not data["ranks"]:
        raise UsageError(f"{path} has no list of ranks: {foreign}")
    if data.get("kinds") != list(KINDS):
        raise UsageError(f"{path} has other kinds of memory than {', '.join(KINDS)}: {foreign}")
    try:
        ledgers = {
            int(one["rank"]): [(str(phase), [int(number(size, 0)) for size in held]) for phase, held in one["moments"]]
            for one in data["ranks"]
        }
    except NOT_A_ROW:
        raise UsageError(f"{path} has a rank without its moments: {foreign}") from None
    if rank not in ledgers:
        raise UsageError(f"--rank {rank}: {path} has ranks {min(ledgers)} to {max(ledgers)}")
    if not ledgers[rank] or any(len(held) != len(KINDS) for _, held in ledgers[rank]):
        raise UsageError(f"{path}, rank {rank}: expected moments of {len(KINDS)} numbers each: {foreign}")
    return ledgers[rank]


def plot_ledger(
    runs: Mapping[str, Sequence[LedgerMoment]], model_state: Mapping[str, int] | None = None, title: str = ""
) -> Picture:
    """Draw the memory of one rank over one step, stacked by kind, a panel for each run: {name: the ledger's moments}.

    The title of the picture says whose memory it is; that of a panel is the name of its run.

    The horizontal axis has the moments at which memory changed, in order, whatever time lies between them; a phase of
    few moments is widened to hold its name. `model_state` draws a dashed level in the panels that it names: the bytes
    of parameters, gradients and optimizer state by a formula.
    """
    top = max(sum(held) for moments in runs.values() for _, held in moments)
    unit, scale = byte_unit(top)
    figure = picture(max(5.0, 0.9 + 2.55 * len(runs)), 4.2)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (label, moments) in zip(panels, runs.items(), strict=True):
        _stack(axes, moments, scale)
        if model_state is not None and label in model_state:
            axes.axhline(model_state[label] / scale, color=INK, linestyle="--", linewidth=1.3)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_xlabel("every allocation and release, in order", fontsize=8)
    panels[0].set_ylim(0, 1.15 * max(top, 1) / scale)
    panels[0].set_ylabel(f"memory of one rank ({unit})")
    handles: list[Artist] = [Patch(color=COLOURS[kind], label=kind) for kind in KINDS]
    if model_state:
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.3, label="model state, formula"))
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    columns = min(len(handles), 3 if len(runs) < 3 else len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _stack(axes: Axes, moments: Sequence[LedgerMoment], scale: float) -> None:
    """Draw one panel: the areas, the phases and the peak."""
    spans = [(phase, len(list(group))) for phase, group in groupby(phase for phase, _ in moments)]
    least = NARROWEST * len(moments)
    places, bounds = [], [0.0]
    for _, count in spans:
        width = max(count, least)
        places += [bounds[-1] + width * i / count for i in range(count)]
        bounds.append(bounds[-1] + width)
    places.append(bounds[-1])  # the last moment lasts until here

    levels = [[0.0] * len(places)]
    for kind, held in zip(KINDS, zip(*(held for _, held in moments), strict=True), strict=True):
        levels.append([below + now / scale for below, now in zip(levels[-1], [*held, held[-1]], strict=True)])
        axes.fill_between(places, levels[-2], levels[-1], step="post", color=COLOURS[kind], linewidth=0)
    axes.step(places, levels[-1], where="post", color=INK, linewidth=0.8)

    for bound in bounds[1:-1]:
        axes.axvline(bound, color=INK, linewidth=0.8, linestyle=":")
    middles = [(start + end) / 2 for start, end in pairwise(bounds)]
    axes.set_xticks(middles, [phase for phase, _ in spans], fontsize=8, rotation=90 if len(spans) > 3 else 0)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, bounds[-1])
    tidy(axes)
    axes.grid(visible=False, axis="x")

    totals = levels[-1]
    peak = max(range(len(totals)), key=totals.__getitem__)
    share = places[peak] / bounds[-1]
    axes.plot(places[peak], totals[peak], marker=CARETDOWN, color=INK, markersize=7, clip_on=False)  # its tip is there
    side = "left" if share < 0.35 else "right" if share > 0.65 else "center"
    look = {"ha": side, "fontsize": 9, "color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}
    text = f"peak {byte_label(totals[peak] * scale)}"
    axes.annotate(text, (places[peak], totals[peak]), xytext=(0, 10), textcoords="offset points", **look)


# ---- communication ---------------------------------------------------------------------------------------------------

Row = Mapping[str, Any]
UNKNOWN = ("mpi_seconds", "wire_bytes", "wire_bytes_expected")  # null for MPI, which does not say what it sends
NUMBERS = ("ranks", "bytes", "seconds", *UNKNOWN)


def plot_bytes(rows: Sequence[Row]) -> Picture:
    """Draw the bytes sent by each operation, counted (bar) and by the formula (mark).

    rows: {"op", "axis" (optional), "bytes", "expected" (optional)}, one bar each, from the top down.
    """
    figure = picture(7.0, 1.2 + 0.42 * len(rows))
    axes = figure.add_subplot()
    places = range(len(rows))
    counted = [row["bytes"] for row in rows]
    axes.barh(places, counted, height=0.6, color=BLUE, label="counted")
    ends = [max(row["bytes"], row.get("expected") or 0) for row in rows]
    for place, value, end in zip(places, counted, ends, strict=True):
        axes.annotate(f"{value:,}", (end, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    known = [place for place in places if rows[place].get("expected") is not None]
    if known:
        expected = [rows[place]["expected"] for place in known]
        axes.plot(expected, known, "|", color=INK, markersize=22, markeredgewidth=2.5, label="formula")
    axes.set_yticks(places, [f"{row['op']} ({row['axis']})" if row.get("axis") else row["op"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max([*ends, 1]))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set_xlabel("bytes sent")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9, markerscale=0.5)
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
