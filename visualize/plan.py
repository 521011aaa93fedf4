"""The trade-off that a planner found, from the file that `minipar.plan --json` writes."""

from __future__ import annotations

from typing import Any

from minipar.errors import UsageError
from visualize.style import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    VERMILION,
    YELLOW,
    Picture,
    picture,
    read_json,
    tidy,
)

# Parts of a step's time and of memory, from the bottom of a bar to its top.
TIME = {"compute": BLUE, "tp": PURPLE, "pp": VERMILION, "dp": ORANGE, "bubble": GREY, "optimizer": GREEN}
MEMORY = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "activations": YELLOW, "buffers": DARK}


def read_plan(path: str) -> dict[str, Any]:
    """The file. UsageError if it is not a planner's."""
    found = read_json(path)
    try:
        for plan in found["plans"]:
            bars = [plan["seconds"][part] for part in TIME] + [plan["memory_bytes"][part] for part in MEMORY]
            float(sum(bars)), plan["dp"], plan["tp"], plan["pp"], plan["zero_stage"]
        for mesh in found["meshes"]:
            float(mesh["seconds"] + mesh["memory_bytes"]), mesh["dp"], mesh["tp"], mesh["pp"]
        float(found["gpu"]["memory"] + found["gpus"]), found["gpu"]["name"], found["model"]["name"]
        if not found["plans"]:
            raise ValueError("no plans")
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{path} was not written by minipar.plan --json") from None
    return found  # type: ignore[no-any-return]


def plot_plan(found: dict[str, Any]) -> Picture:
    """Three panels: the parts of time and of memory of the best plans, and every mesh as a point of the two."""
    plans, meshes = found["plans"], found["meshes"]
    figure = picture(13.0, 4.6)
    time, memory, both = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    names = [f"dp {p['dp']}\ntp {p['tp']}\npp {p['pp']}\nZeRO-{p['zero_stage']}" for p in plans]
    for axes, parts, key, unit, label in (
        (time, TIME, "seconds", 1.0, "time of a step (s)"),
        (memory, MEMORY, "memory_bytes", 1e9, "memory of the fullest rank (GB)"),
    ):
        bottom = [0.0] * len(plans)
        for part, colour in parts.items():
            heights = [plan[key][part] / unit for plan in plans]
            axes.bar(
                range(len(plans)), heights, 0.7, bottom, color=colour, label=part, edgecolor="white", linewidth=0.5
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set_xticks(range(len(plans)), names, fontsize=8)
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.45 * max(bottom))
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center")
        tidy(axes)
    for plan, height in zip(plans, [plan["seconds"]["total"] for plan in plans], strict=True):
        time.text(plans.index(plan), height, f"{plan['mfu']:.1%}", ha="center", va="bottom", fontsize=8, color=INK)
    shown = {(plan["dp"], plan["tp"], plan["pp"]) for plan in plans}
    for mesh in meshes:
        one = mesh["dp"], mesh["tp"], mesh["pp"]
        x, y = mesh["memory_bytes"] / 1e9, mesh["seconds"]
        both.plot(x, y, "o", color=BLUE if one in shown else GREY, markersize=7 if one in shown else 4)
    both.axvline(found["gpu"]["memory"] / 1e9, color=GREY, linestyle="--")
    both.set_xlabel(f"memory (GB; dashed: {found['gpu']['name']})")
    both.set_ylabel("time of a step (s)")
    both.set_title(f"all {len(meshes)} meshes that fit, each at its fastest", fontsize=9)
    both.set_xlim(left=0)
    both.set_ylim(bottom=0)
    tidy(both)
    figure.suptitle(
        f"{found['model']['name']} on {found['gpus']} x {found['gpu']['name']}, batch {found['global_batch']} x "
        f"{found['seq_len']} (MFU above the bars)"
    )
    return figure
