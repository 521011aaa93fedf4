"""The command line: python -m visualize trace|mesh|loss|traffic|memory|plan|layouts|compare|schedule|gallery."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from minipar.cli import UsageParser, write_json
from minipar.errors import UsageError, print_line
from minipar.parallel.pipeline.actions import Durations, Schedule, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import SCHEDULES, make

from . import mesh, schedule, shares, style, timeline
from .comparison import plot_comparison, read_comparison
from .measurements import plot_bench, plot_ledger, plot_loss, read_bench, read_ledger, read_metrics
from .plan import plot_agreement, plot_plan, read_layouts, read_plan
from .schedule_file import load_csv, save_csv
from .style import Picture, printable

MOST = 100_000  # actions in one schedule, of a name or a file: it is checked and simulated in some seconds
MOST_RANKS = 1024  # of a schedule: a row for each
MOST_BYTES = 8 << 20  # of a file
FIGURE = "the picture: .png, .svg or .pdf"


def main(argv: Sequence[str]) -> int:
    """Draw, and return the exit code: 2 when the input is wrong, with one line on standard error."""
    try:
        options = build_parser().parse_args(argv)
        with rc_context({"text.parse_math": False}):  # a "$" in a name is a "$"
            paths = options.run(options)
        for path in paths:
            print(printable(path))
    except UsageError as error:
        print_line(f"visualize: error: {printable(str(error))}")
        return 2
    return 0


def build_parser() -> UsageParser:
    """Build the parser, in which each command's `run` draws and returns the paths it wrote."""
    names = "trace|mesh|loss|traffic|memory|plan|layouts|compare|schedule|gallery"
    parser = UsageParser(prog="minipar visualize", description="Draw what minipar measured.")
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)

    def command(name: str, run: Callable[[argparse.Namespace], list[str]], what: str) -> Any:
        added = commands.add_parser(name, help=what)
        added.set_defaults(run=run)
        return added.add_argument

    def drawing(name: str, draw: Callable[[argparse.Namespace], Picture], what: str) -> Any:
        """Add a command that draws one picture."""

        def run(options: argparse.Namespace) -> list[str]:
            style.save(draw(options), options.out)
            return [options.out]

        add = command(name, run, what)
        add("--out", required=True, metavar="FIG", help=FIGURE)
        return add

    def reading(name: str, read: Callable[[str], Any], plot: Callable[[Any], Picture], what: str, content: str) -> None:
        """Add a command that draws one file."""
        add = drawing(name, lambda options: plot(read(options.file)), what)
        add("file", metavar="FILE.json", help=content)

    add = command("trace", run_trace, "every rank's timeline, from minipar.train --trace")
    add("file", metavar="FILE.json", help="Chrome trace JSON")
    add("--out", metavar="FIG", help=FIGURE)
    what = "seconds of each step, and how much of it each rank computes, communicates and waits; - is standard output"
    add("--json", metavar="FILE", help=what)
    steps = "a slice as Python's, counted from 0: 0:2 is the first two steps, --steps=-1: the last (the default, "
    steps += "unless the trace has at most two)"
    add("--steps", type=step_slice, metavar="A:B", help=steps)
    add("--arrows", action="store_true", help="draw each message from sender to receiver")

    add = command("mesh", run_mesh, "bytes between ranks, axis by axis, from minipar.train --trace")
    add("file", metavar="FILE.json", help="Chrome trace JSON")
    add("--out", metavar="FIG", help=FIGURE)
    add("--json", metavar="FILE", help="bytes and messages by axis, rank and pair; - is standard output")

    add = drawing("loss", draw_loss, "the loss curve, from minipar.train --metrics")
    add("files", metavar="FILE.jsonl", nargs="+", help="metrics, one line per step; several to compare")
    add("--reference", type=float, metavar="NATS", help="a level to compare with, such as an entropy")
    add("--reference-label", default="reference", metavar="TEXT", help="the name of that level")

    reading("traffic", read_bench, plot_bench, "time and bytes, from minipar.bench collectives", "the benchmark's rows")

    add = drawing("memory", draw_memory, "memory over a step, from minipar.train --memory")
    add("files", metavar="FILE.json", nargs="+", help="ledgers; several to compare, a panel each")
    add("--rank", type=int, default=0, metavar="R", help="the rank whose memory is drawn (default: 0)")

    reading("plan", read_plan, plot_plan, "the plans of a search, from minipar.plan --json", "the planner's JSON")
    what = "predicted against measured, from minipar.bench machine"
    reading("layouts", read_layouts, plot_agreement, what, "the benchmark's rows")

    what = "where two runs' gradients differ and how much, from minipar.compare --json"
    reading("compare", read_comparison, plot_comparison, what, "the comparison's JSON")

    add = command("schedule", run_schedule, "a pipeline schedule, simulated; no training needed")
    add("--schedule", required=True, metavar="NAME|FILE.csv", help=f"{', '.join(SCHEDULES)}, or a file as PyTorch's")
    add("--stages", type=int, metavar="P", help="pipeline ranks; a file says this itself, and the next two")
    add("--microbatches", type=int, metavar="M", help="in one step")
    add("--virtual-stages", type=int, metavar="V", help="stages per rank, for interleaved-1f1b (default 2)")
    time: dict[str, Any] = {"type": duration, "default": Fraction(1)}
    add("--forward", **time, metavar="TF", help="time of a stage's forward (default 1)")
    add("--backward-input", **time, metavar="TB", help="of its backward for the input's gradient (default 1)")
    add("--backward-weight", **time, metavar="TW", help="of its backward for the weights' gradients (default 1)")
    add("--comm", type=duration, default=Fraction(0), metavar="TC", help="of a message between ranks (default 0)")
    add("--out", metavar="FIG", help=FIGURE)
    add("--json", metavar="FILE", help="bubble, makespan and peak activations; - is standard output")
    add("--csv", metavar="FILE", help="the schedule in PyTorch's format")

    add = command("gallery", run_gallery, "the README's pictures of schedules, drawn again")
    add("--out", required=True, metavar="DIR", help="the directory: visualize/gallery")
    return parser


def step_slice(text: str) -> slice:
    """Parse "2:4", steps 2 and 3, or "-1:", the last one."""
    match = re.fullmatch(r"(-?\d{1,9})?:(-?\d{1,9})?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"invalid A:B value: {text!r}")
    return slice(*(None if bound is None else int(bound) for bound in match.groups()))


def duration(text: str) -> Fraction:
    """Parse "3", "0.601" or "1/3", exactly."""
    match = re.fullmatch(r"\d{1,12}(\.\d{0,12})?|\.\d{1,12}|\d{1,12}/0*[1-9]\d{0,11}", text)
    if not match:
        raise argparse.ArgumentTypeError(f"invalid duration (as 3, 0.5 or 1/3) value: {text!r}")
    return Fraction(text)


# ---- commands that draw one picture ----------------------------------------------------------------------------------


def draw_loss(options: argparse.Namespace) -> Picture:
    """Draw the loss of each run."""
    rows = [read_metrics(file) for file in options.files]
    runs = dict(zip(names_of(options.files), rows, strict=True))
    return plot_loss(runs, options.reference, printable(options.reference_label))


def draw_memory(options: argparse.Namespace) -> Picture:
    """Draw one rank's memory, a panel for each file."""
    ledgers = [read_ledger(file, options.rank) for file in options.files]
    title = f"Memory of rank {options.rank} during one training step, by kind"
    return plot_ledger(dict(zip(names_of(options.files), ledgers, strict=True)), title=title)


def names_of(files: Sequence[str]) -> list[str]:
    """Name several files by their stems, or by their paths if stems are alike; a single one needs no name."""
    if len(files) == 1:
        return [""]
    names = [printable(Path(file).stem) for file in files]
    if len(set(names)) < len(names):
        names = [printable(file) for file in files]
    return names


# ---- commands with other results -------------------------------------------------------------------------------------


def run_trace(options: argparse.Namespace) -> list[str]:
    """Draw the timeline of a trace, write what its ranks do with their time, or both."""
    if not (options.out or options.json):
        raise UsageError("nothing to do: give --out FIG or --json FILE")
    trace = timeline.read_trace(options.file)
    if options.out:
        style.save(timeline.plot_timeline(trace, options.steps, options.arrows), options.out)
    if options.json:
        write_json(options.json, shares.trace_values(trace, options.steps))
    return [] if options.json == "-" else [path for path in (options.out, options.json) if path]


def run_mesh(options: argparse.Namespace) -> list[str]:
    """Draw the mesh of a trace, write its bytes, or both."""
    if not (options.out or options.json):
        raise UsageError("nothing to do: give --out FIG or --json FILE")
    traffic = mesh.mesh_traffic(timeline.read_trace(options.file), options.file)
    if options.out:
        style.save(mesh.plot_mesh(traffic), options.out)
    if options.json:
        write_json(options.json, mesh.mesh_values(traffic))
    return [] if options.json == "-" else [path for path in (options.out, options.json) if path]


def run_schedule(options: argparse.Namespace) -> list[str]:
    """Check and simulate a schedule by name or from a file, and draw it or write its results."""
    if not (options.out or options.json or options.csv):
        raise UsageError("nothing to do: give --out FIG, --json FILE or --csv FILE")
    times = options.forward, options.backward_input, options.backward_weight
    if not sum(times) > 0:
        raise UsageError("--forward + --backward-input + --backward-weight = 0: the schedule takes no time")
    chosen = choose_schedule(options)
    check(chosen)
    durations = Durations(*times, options.comm)
    simulated = simulate(chosen, durations)
    values = schedule.timeline_values(simulated, durations)
    if options.out:
        style.save(schedule.plot_schedule(simulated), options.out)
    if options.csv:
        try:
            save_csv(chosen, options.csv)
        except OSError as error:
            raise UsageError(f"--csv {options.csv} cannot be written: {error.strerror}") from None
    if options.json:
        write_json(options.json, values)
    return [] if options.json == "-" else [path for path in (options.out, options.csv, options.json) if path]


def choose_schedule(options: argparse.Namespace) -> Schedule:
    """Make the named schedule, or read it from a file, which states its sizes itself."""
    name = options.schedule
    if name not in SCHEDULES and (Path(name).suffix.lower() == ".csv" or os.path.isfile(name)):
        for flag in ("stages", "microbatches", "virtual_stages"):
            if getattr(options, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: {name} says this itself")
        style.check_file(name, MOST_BYTES)
        chosen = load_csv(name)
        if len(chosen.ranks) > MOST_RANKS:
            raise UsageError(f"{name}: {len(chosen.ranks)} ranks, one per line: more than {MOST_RANKS} cannot be shown")
        check_actions(name, chosen)
        if (forwards := chosen.stages * chosen.microbatches) > MOST:
            raise UsageError(f"{name}: stages*microbatches = {forwards}: more than {MOST} cannot be shown")
        return chosen
    if name not in SCHEDULES:
        return make(name, 1, 1)  # raises UsageError with the names that exist
    if options.stages is None or options.microbatches is None:
        raise UsageError(f"--schedule {name} needs --stages P and --microbatches M")
    if options.stages > MOST_RANKS:
        raise UsageError(f"--stages {options.stages}: more than {MOST_RANKS} ranks cannot be shown")
    if options.stages * options.microbatches * (options.virtual_stages or 2) > MOST:
        sizes = f"{options.stages}*{options.microbatches}"
        raise UsageError(f"--schedule {name}: stages*microbatches = {sizes}: more than can be shown")
    chosen = make(name, options.stages, options.microbatches, options.virtual_stages)
    check_actions(f"--schedule {name}", chosen)
    return chosen


def check_actions(name: str, chosen: Schedule) -> None:
    """Raise UsageError if a schedule has more actions than can be shown."""
    actions = sum(len(rank) for rank in chosen.ranks)
    if actions > MOST:
        raise UsageError(f"{name}: {actions} actions: more than {MOST} cannot be shown")


def run_gallery(options: argparse.Namespace) -> list[str]:
    """Draw the README's pictures of schedules."""
    half = Durations(Fraction(1, 2), Fraction(1, 2), Fraction(1, 2))  # of a stage, where a rank has two
    pictures = {
        "schedules": schedule.plot_schedules(schedule.gallery(4, 8)),
        "schedule_1f1b_8x16": schedule.plot_schedule(simulate(make("1f1b", 8, 16))),
        "schedule_zbv": schedule.plot_schedule(simulate(make("zbv", 4, 8), half)),
    }
    paths = {str(Path(options.out) / f"{name}.png"): figure for name, figure in pictures.items()}
    for path, figure in paths.items():
        style.save(figure, path)
    return list(paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
