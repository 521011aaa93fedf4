"""python -m visualize trace|mesh|loss|traffic|memory|plan|layouts FILE --out FIG; schedule|gallery: see --help"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minipar.errors import UsageError, UsageParser
from visualize import agreement, communication, loss, memory, mesh, plan, schedule_command, style, timeline


def _steps(text: str) -> slice:
    """ "2:4" as a slice: steps 2 and 3; "-1:" the last one."""
    first, colon, last = text.partition(":")
    if not colon:
        raise ValueError(text)
    return slice(int(first) if first else None, int(last) if last else None)


_steps.__name__ = "A:B"  # what argparse calls it: "invalid A:B value: '3'"


def main(argv: Sequence[str]) -> int:
    """Draw. Returns the exit code: 2 when the input is wrong, with one line on standard error."""
    parser = UsageParser(prog="python -m visualize", description="Draw what minipar measured.", allow_abbrev=False)
    names = "trace|mesh|loss|traffic|memory|plan|layouts|schedule|gallery"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    every = UsageParser(add_help=False)
    every.add_argument("--out", required=True, metavar="FIG", help="the picture: .png, .svg or .pdf")

    trace = commands.add_parser("trace", parents=[every], help="every rank's timeline, from minipar.train --trace")
    trace.add_argument("file", metavar="FILE.json", help="Chrome trace JSON")
    trace.add_argument(
        "--steps",
        type=_steps,
        metavar="A:B",
        help="steps A to B-1, counted from 0; --steps=-1: is the last one (default: the last two)",
    )
    trace.add_argument("--arrows", action="store_true", help="draw each message from sender to receiver")

    grid = commands.add_parser("mesh", help="who sends how much to whom, from minipar.train --trace")
    grid.add_argument("file", metavar="FILE.json", help="Chrome trace JSON")
    grid.add_argument("--out", metavar="FIG", help="the picture: .png, .svg or .pdf")
    grid.add_argument("--json", metavar="FILE", help="bytes and messages by axis, rank and pair; - is standard output")

    curve = commands.add_parser("loss", parents=[every], help="the loss curve, from minipar.train --metrics")
    curve.add_argument("files", metavar="FILE.jsonl", nargs="+", help="metrics, one line per step; several to compare")
    curve.add_argument("--reference", type=float, metavar="NATS", help="a level to compare with, such as an entropy")
    curve.add_argument("--reference-label", default="reference", metavar="TEXT", help="what that level is")

    traffic = commands.add_parser("traffic", parents=[every], help="time and bytes, from minipar.bench collectives")
    traffic.add_argument("file", metavar="FILE.json", help="rows of the benchmark")

    held = commands.add_parser("memory", parents=[every], help="memory over a step, from minipar.train --memory")
    held.add_argument("files", metavar="FILE.json", nargs="+", help="ledgers; several to compare, a panel each")
    held.add_argument("--rank", type=int, default=0, metavar="R", help="whose memory (default: 0)")

    chosen = commands.add_parser("plan", parents=[every], help="what a planner weighed, from minipar.plan --json")
    chosen.add_argument("file", metavar="FILE.json", help="the planner's JSON")

    compared = commands.add_parser(
        "layouts", parents=[every], help="predicted against measured, from minipar.bench layouts --machine"
    )
    compared.add_argument("file", metavar="FILE.json", help="rows of the benchmark")

    schedule_command.add_schedule(commands)
    schedule_command.add_gallery(commands)

    try:
        told = parser.parse_args(argv)
        if told.command == "schedule":
            written = schedule_command.run_schedule(told)
        elif told.command == "gallery":
            written = schedule_command.run_gallery(told)
        elif told.command == "mesh":
            written = _mesh(told)
        else:
            written = _draw(told)
    except UsageError as error:
        print(f"visualize: error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def _mesh(told: argparse.Namespace) -> list[str]:
    """The picture of a mesh, its numbers, or both."""
    if not (told.out or told.json):
        raise UsageError("nothing to do: give --out FIG or --json FILE")
    traffic = mesh.mesh_traffic(timeline.read_trace(told.file), told.file)
    if told.out:
        style.save(mesh.plot_mesh(traffic), told.out)
    if told.json:
        style.write_json(told.json, mesh.mesh_numbers(traffic))
    return [] if told.json == "-" else [path for path in (told.out, told.json) if path]


def _draw(told: argparse.Namespace) -> list[str]:
    """The picture of a file."""
    if told.command == "trace":
        figure = timeline.plot_timeline(timeline.read_trace(told.file), told.steps, told.arrows)
    elif told.command == "loss":
        runs = {Path(file).stem: loss.read_metrics(file) for file in told.files}
        figure = loss.plot_loss(runs, told.reference, told.reference_label)
    elif told.command == "plan":
        figure = plan.plot_plan(plan.read_plan(told.file))
    elif told.command == "layouts":
        figure = agreement.plot_agreement(agreement.read_layouts(told.file))
    elif told.command == "memory":
        names = [Path(file).stem for file in told.files]
        names = names if len(set(names)) == len(names) else told.files  # files of one name in several directories
        ledgers = [memory.read_ledger(file, told.rank) for file in told.files]
        titles = [f"{name}, rank {told.rank}" for name in names]
        figure = memory.plot_ledger(dict(zip(titles, ledgers, strict=True)))
    else:
        figure = communication.plot_bench(communication.read_bench(told.file))
    style.save(figure, told.out)
    return [told.out]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
