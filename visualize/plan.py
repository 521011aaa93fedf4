"""The planner's predictions: its best plans (`minipar.plan --json`), and predictions next to measured layouts.

The measured ones are the rows of `minipar.bench machine --json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes

from minipar.errors import UsageError

from .style import (
    AXIS_COLOURS,
    BLUE,
    DARK,
    GREEN,
    GREY,
    INK,
    NOT_A_ROW,
    ORANGE,
    SKY,
    VERMILION,
    YELLOW,
    Picture,
    number,
    picture,
    read_json,
    signed_percent,
    tidy,
)

# ---- plans -----------------------------------------------------------------------------------------------------------

# Parts of a step's time and of memory, from the bottom of a bar to its top. Only the optimizer is part of both.
TIME = {
    "compute": SKY,
    "tp": AXIS_COLOURS["tp"],
    "pp": AXIS_COLOURS["pp"],
    "dp": AXIS_COLOURS["dp"],
    "bubble": GREY,
    "optimizer": GREEN,
}
MEMORY = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "activations": YELLOW, "buffers": DARK}
HATCHES = {"tp": "////", "pp": "....", "bubble": "xxxx"}  # of parts of time whose colours are alike in grey
AXES = ("dp", "cp", "ep", "tp", "etp", "pp")
# Where no mesh has context or expert parallelism, its axis and its part of the time are not drawn. etp is drawn where a
# mesh does not cut experts over all of tp.
OPTIONAL = {axis: AXIS_COLOURS[axis] for axis in ("cp", "ep")}
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
MEMORY_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def read_plan(path: str) -> dict[str, Any]:
    """Read the file. UsageError if it is not a planner's."""
    search = read_json(path)
    try:
        plans, meshes, gpu = search["plans"], search["meshes"], search["gpu"]
        for plan in plans:
            times = [plan["seconds"][part] for part in (*TIME, "total")]
            times += [plan["seconds"].get(axis, 0) for axis in OPTIONAL]
            for value in (*times, *(plan["memory_bytes"][part] for part in MEMORY), plan["mfu"], plan["zero_stage"]):
                number(value, 0)
        for mesh in meshes:
            number(mesh["seconds"], 0)
            number(mesh["memory_bytes"], 0)
        sizes = [size for mesh in (*plans, *meshes) for size in _sizes(mesh)]
        sizes += [plan.get("zero_replicas", 1) for plan in plans]
        for value in (*sizes, gpu["memory"], search["gpus"], search["global_batch"], search["seq_len"]):
            number(value, 1)
        number(search["assumptions"]["memory_used"], 0)
        if not (plans and str(gpu["name"]) and str(search["model"]["name"])):
            raise ValueError
    except NOT_A_ROW:
        raise UsageError(f"{path} was not written by minipar.plan --json") from None
    return search  # type: ignore[no-any-return]


def _sizes(mesh: dict[str, Any]) -> tuple[Any, ...]:
    """Return a mesh's sizes in the order of AXES."""
    return mesh["dp"], *(mesh.get(axis, 1) for axis in OPTIONAL), mesh["tp"], _etp(mesh), mesh["pp"]


def _etp(mesh: dict[str, Any]) -> Any:
    """Return over how many ranks of tp a mesh cuts an expert: none given means all."""
    etp = mesh.get("etp")
    return mesh["tp"] if etp is None else etp


def _drawn(axis: str, meshes: Sequence[dict[str, Any]]) -> bool:
    """Return whether an axis is drawn."""
    if axis == "etp":
        return any(_etp(mesh) != mesh["tp"] for mesh in meshes)
    return axis not in OPTIONAL or any(mesh.get(axis, 1) > 1 for mesh in meshes)


def _unit(values: Iterable[float], units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the first of these units, with its size, that is at most the largest value, or the last one."""
    largest = max(values)
    return next((unit for unit in units if unit[1] <= largest), units[-1])


def plot_plan(search: dict[str, Any]) -> Picture:
    """Draw the parts of time and of memory of the best plans, and every mesh as a point of the two.

    The plans are numbered, fastest first: below their bars and at their points.
    """
    plans = search["plans"]
    figure = picture(max(10.5, 4.5 + 1.2 * len(plans)), 4.8)
    time, memory, both = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    every = (*plans, *search["meshes"])
    axes = [axis for axis in AXES if _drawn(axis, every)]
    first = {"compute": TIME["compute"], "tp": TIME["tp"]}
    parts = first | {axis: OPTIONAL[axis] for axis in axes if axis in OPTIONAL} | TIME
    seconds = _unit((plan["seconds"]["total"] for plan in plans), TIME_UNITS)
    held = _unit((mesh["memory_bytes"] for mesh in search["meshes"]), MEMORY_UNITS)
    _bars(time, plans, "seconds", seconds[1], parts, axes)
    time.set_ylabel(f"time of a step ({seconds[0]})")
    time.set_title("time; above the bars: MFU", loc="left", fontsize=10)
    for place, plan in enumerate(plans):
        height = plan["seconds"]["total"] / seconds[1]
        look = {"ha": "center", "va": "bottom", "fontsize": 8, "color": INK}
        time.text(place, height, f"{plan['mfu']:.1%}", **look)
    _bars(memory, plans, "memory_bytes", held[1], MEMORY, axes)
    memory.set_ylabel(f"memory of the fullest rank ({held[0]})")
    memory.set_title("memory", loc="left", fontsize=10)
    _points(both, search, seconds, held)
    model, gpu = search["model"]["name"], search["gpu"]["name"]
    tokens = f"{search['global_batch']} sequences of {search['seq_len']} tokens per step"
    figure.suptitle(f"The {len(plans)} fastest plans for {model} on {search['gpus']} x {gpu}, {tokens}", fontsize=12)
    return figure


def _bars(
    axes: Axes, plans: Sequence[dict[str, Any]], key: str, unit: float, parts: dict[str, str], mesh: Sequence[str]
) -> None:
    """Draw a bar for each plan, stacked from its parts, and below it the sizes of these axes of its mesh."""
    bottom = [0.0] * len(plans)
    for part, colour in parts.items():
        heights = [plan[key].get(part, 0) / unit for plan in plans]
        look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5, "hatch": HATCHES.get(part)}
        axes.bar(range(len(plans)), heights, 0.7, bottom, label=part, **look)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    names = []
    for place, plan in enumerate(plans, start=1):
        sizes = dict(zip(AXES, _sizes(plan), strict=True))
        names.append("\n".join([f"plan {place}", *(f"{axis} {sizes[axis]}" for axis in mesh), _zero_name(plan)]))
    axes.set_xticks(range(len(plans)), names, fontsize=8)
    axes.set_ylim(0, 1.4 * max(*bottom, 1e-9))
    # Narrower than by default: three columns of memory's names would touch the axis.
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", columnspacing=1.0, handlelength=1.2)
    tidy(axes)


def _points(axes: Axes, search: dict[str, Any], seconds: tuple[str, float], held: tuple[str, float]) -> None:
    """Draw each mesh at its memory and its time, in these units, and the memory at which the search ends."""
    best = {_sizes(plan) for plan in search["plans"]}
    shown = [mesh for mesh in search["meshes"] if _sizes(mesh) in best]
    others = [mesh for mesh in search["meshes"] if mesh not in shown]
    plans = f"plans 1 to {len(search['plans'])}" if len(search["plans"]) > 1 else "plan 1"
    for meshes, colour, shape, size, label in (
        (others, GREY, "o", 4, "any other mesh"),
        (shown, BLUE, "s", 7, f"{plans}, with bars on the left"),
    ):
        places = [(mesh["memory_bytes"] / held[1], mesh["seconds"] / seconds[1]) for mesh in meshes]
        axes.plot([x for x, _ in places], [y for _, y in places], shape, color=colour, markersize=size, label=label)
    for mesh in shown:
        same = (plan for plan in search["plans"] if _sizes(plan) == _sizes(mesh))
        name = str(search["plans"].index(next(same)) + 1)
        place = (mesh["memory_bytes"] / held[1], mesh["seconds"] / seconds[1])
        look = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 9, "color": INK}
        axes.annotate(name, place, xytext=(0, -6), **look)
    used = search["assumptions"]["memory_used"]
    label = f"{used:.0%} of a GPU's memory: the limit"
    limit = used * search["gpu"]["memory"] / held[1]
    if limit < 3 * max(mesh["memory_bytes"] for mesh in search["meshes"]) / held[1]:  # else it would squeeze the points
        axes.axvline(limit, color=VERMILION, linestyle="--", label=label)
    axes.set_xlabel(f"memory of the fullest rank ({held[0]})")
    axes.set_ylabel(f"time of a step ({seconds[0]})")
    axes.set_title(f"{len(search['meshes'])} meshes, each at its fastest", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.margins(y=0.15)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.15 * (high - low))
    tidy(axes)


# ---- predicted against measured --------------------------------------------------------------------------------------

NUMBERS = ("seconds_min", "seconds", "seconds_max", "predicted_seconds", "peak_bytes", "predicted_bytes")
LEAST = 1e-9  # of each of these: the axes are logarithmic
MEASURED = "measured: median and range of the steps' time, peak memory"
MEDIANS = "measured: median of the steps' time, peak memory"


def read_layouts(path: str) -> list[dict[str, Any]]:
    """Read the rows. UsageError if they are not of `bench machine`."""
    rows = read_json(path)
    try:
        for row in rows:
            shortest, median, longest, *_ = (number(row[key], LEAST) for key in NUMBERS)
            if not (shortest <= median <= longest and layout_name(row)):
                raise ValueError
        if not rows:
            raise ValueError
    except NOT_A_ROW:
        raise UsageError(f"{path} was not written by minipar.bench machine --json") from None
    return rows  # type: ignore[no-any-return]


def _zero_name(row: dict[str, Any]) -> str:
    """Name a ZeRO stage, and how often its shards are repeated."""
    replicas = row.get("zero_replicas", 1)
    return f"ZeRO-{row['zero_stage']}" + (f" x{replicas}" if replicas > 1 else "")


def layout_name(row: dict[str, Any]) -> str:
    """Name a layout by its axes above 1 and by what else is not the default."""
    words = [f"{axis} {row[axis]}" for axis in ("dp", "tp", "pp") if row[axis] > 1] or ["one device"]
    words += [_zero_name(row)] * (row["zero_stage"] > 0)
    words += [row["schedule"] or ""] * (row["schedule"] is not None)
    words += ["SP"] * (row["sequence_parallel"] is True) + ["recompute"] * (row["recompute"] == "full")
    words += [f"{row['microbatches']} microbatches"] * (row["microbatches"] > 1)
    return ", ".join(words)


def plot_agreement(rows: Sequence[dict[str, Any]]) -> Picture:
    """Draw a line for each layout, slowest first: time of a step, and peak memory of the fullest rank."""
    rows = sorted(rows, key=lambda row: -row["seconds"])
    figure = picture(9.4, 2.0 + 0.27 * len(rows))
    time, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    places = range(len(rows))
    measured = [1000 * row["seconds"] for row in rows]
    ends = [1000 * row["seconds_max"] for row in rows]
    spread = [[1000 * (row["seconds"] - row["seconds_min"]) for row in rows]]
    spread += [[end - middle for end, middle in zip(ends, measured, strict=True)]]
    time.errorbar(measured, places, xerr=spread, fmt="none", ecolor=BLUE, elinewidth=2.5, alpha=0.35)
    predicted = [1000 * row["predicted_seconds"] for row in rows]
    # A record may hold the medians alone: then no range is drawn, and none is named.
    has_ranges = max(spread[0]) > 0 or max(spread[1]) > 0
    label = MEASURED if has_ranges else MEDIANS
    _pairs(time, measured, predicted, ends, label)
    time.set_xlabel("time of a step, ms of the cpu clock")
    held = [row["peak_bytes"] / 1e6 for row in rows]
    _pairs(memory, held, [row["predicted_bytes"] / 1e6 for row in rows], held, label)
    memory.set_xlabel("memory of the fullest rank, MB")
    time.set_yticks(places, [layout_name(row) for row in rows], fontsize=9)
    time.invert_yaxis()
    figure.suptitle(f"{len(rows)} layouts of one model. Percentages: predicted / measured - 1", fontsize=11, color=INK)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
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
        look = {"va": "center", "ha": "left", "fontsize": 8, "color": INK}
        spot = {"xytext": (8, 0), "textcoords": "offset points"}
        axes.annotate(signed_percent(other / one), (max(other, end), place), **spot, **look)
    low, high = min(*measured, *predicted), max(*measured, *predicted)
    axes.set_xlim(low / 1.2, high * max(high / low, 1.5) ** 0.2)
    ticks = [step * 10.0**power for power in range(-1, 8) for step in (1, 2, 5)]
    axes.set_xticks([tick for tick in ticks if low / 1.2 <= tick <= high * 1.2], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tidy(axes)
