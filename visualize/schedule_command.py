"""`python -m visualize schedule`: a schedule by name or from a file, checked, simulated, and drawn or told in numbers.

And `python -m visualize gallery`: the pictures of schedules that the README shows.
"""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from minipar.errors import UsageError
from minipar.parallel.pipeline import (
    SCHEDULES,
    Durations,
    Schedule,
    Timeline,
    check,
    load_csv,
    make,
    save_csv,
    simulate,
)
from visualize.schedule import gallery, plot_schedule, plot_schedules, stages_per_rank
from visualize.style import save, write_json

MOST = 100_000  # forwards in one schedule


def duration(text: str) -> Fraction:
    """ "3", "0.601" or "1/3", exactly."""
    if not re.fullmatch(r"\d{1,12}(\.\d{0,12})?|\.\d{1,12}|\d{1,12}/\d{1,12}", text):
        raise ValueError(text)
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError(text) from None


duration.__name__ = "duration (as 3, 0.5 or 1/3)"  # what argparse calls it


def add_schedule(commands: Any) -> None:
    """The flags of `visualize schedule`."""
    parser = commands.add_parser("schedule", help="a pipeline schedule, simulated; no training needed")
    add = parser.add_argument
    add("--schedule", required=True, metavar="NAME|FILE.csv", help=f"{', '.join(SCHEDULES)}, or a file as PyTorch's")
    add("--stages", type=int, metavar="P", help="pipeline ranks; a file says this itself, and the next two")
    add("--microbatches", type=int, metavar="M", help="in one step")
    add("--virtual-stages", type=int, metavar="V", help="stages per rank, for interleaved-1f1b (default 2)")
    for flag, meta, default, what in (
        ("--forward", "TF", 1, "time of a stage's forward (default 1)"),
        ("--backward-input", "TB", 1, "of its backward for the input's gradient (default 1)"),
        ("--backward-weight", "TW", 1, "of its backward for the weights' gradients (default 1)"),
        ("--comm", "TC", 0, "of a message between ranks (default 0)"),
    ):
        add(flag, type=duration, metavar=meta, default=Fraction(default), help=what)
    add("--out", metavar="FIG", help="the picture: .png, .svg or .pdf")
    add("--json", metavar="FILE", help="bubble, makespan and peak activations; - is standard output")
    add("--csv", metavar="FILE", help="the schedule in PyTorch's format")


def run_schedule(told: argparse.Namespace) -> list[str]:
    """Do it. Returns what it wrote, for the terminal."""
    if not (told.out or told.json or told.csv):
        raise UsageError("nothing to do: give --out FIG, --json FILE or --csv FILE")
    times = told.forward, told.backward_input, told.backward_weight
    if not sum(times) > 0:
        raise UsageError("--forward + --backward-input + --backward-weight = 0: the schedule takes no time")
    schedule = _schedule(told)
    check(schedule)
    timeline = simulate(schedule, Durations(*times, told.comm))
    written = []
    if told.out:
        save(plot_schedule(timeline), told.out)
        written.append(told.out)
    if told.csv:
        try:
            save_csv(schedule, told.csv)
        except OSError as error:
            raise UsageError(f"--csv {told.csv} cannot be written: {error.strerror}") from None
        written.append(told.csv)
    if told.json:
        write_json(told.json, numbers(timeline))
        written.append(told.json)
    return [] if told.json == "-" else written


def _schedule(told: argparse.Namespace) -> Schedule:
    name = told.schedule
    if name not in SCHEDULES and (Path(name).suffix.lower() == ".csv" or Path(name).is_file()):
        for flag in ("stages", "microbatches", "virtual_stages"):
            if getattr(told, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} {getattr(told, flag)}: {name} says this itself")
        return load_csv(name)
    if name not in SCHEDULES:
        return make(name, 1, 1)  # says what there is
    if told.stages is None or told.microbatches is None:
        raise UsageError(f"--schedule {name} needs --stages P and --microbatches M")
    if told.stages * told.microbatches * (told.virtual_stages or 2) > MOST:
        raise UsageError(
            f"--schedule {name}: stages*microbatches = {told.stages}*{told.microbatches}: more than can be shown"
        )
    return make(name, told.stages, told.microbatches, told.virtual_stages)


def numbers(timeline: Timeline) -> dict[str, Any]:
    """What the simulation found; times in the units of the durations given."""
    return {
        "schedule": timeline.schedule.name,
        "stages": len(timeline.ranks),
        "virtual_stages": stages_per_rank(timeline),
        "microbatches": timeline.schedule.microbatches,
        "bubble_fraction": float(timeline.bubble_fraction),
        "bubble_rate": float(timeline.bubble_rate),
        "makespan": float(timeline.makespan),
        "peak_activations": timeline.peak_activations,
    }


def add_gallery(commands: Any) -> None:
    """The flag of `visualize gallery`."""
    parser = commands.add_parser("gallery", help="the README's pictures of schedules, made again")
    parser.add_argument("--out", required=True, metavar="DIR", help="the directory: visualize/gallery")


def run_gallery(told: argparse.Namespace) -> list[str]:
    """Make the pictures. Returns their paths."""
    pictures = {
        "schedules": plot_schedules(gallery(4, 8)),
        "schedule_1f1b_8x32": plot_schedule(simulate(make("1f1b", 8, 32))),
        "schedule_zbv": plot_schedule(simulate(make("zbv", 4, 8))),
    }
    paths = [str(Path(told.out) / f"{name}.png") for name in pictures]
    for figure, path in zip(pictures.values(), paths, strict=True):
        save(figure, path)
    return paths
