"""`python -m minipar.bench SUBCOMMAND`: the command line of all benchmarks."""

from __future__ import annotations

from minipar.bench import collectives, layouts, machine, pipeline, step
from minipar.comm.communicator import Communicator
from minipar.comm.launch import main
from minipar.errors import UsageParser

SUBCOMMANDS = {
    "collectives": collectives.COLLECTIVES,
    "step": step.STEP,
    "zero": step.ZERO,
    "overlap": step.OVERLAP,
    "pipeline": pipeline.PIPELINE,
    "machine": machine.MACHINE,
    "layouts": layouts.LAYOUTS_BENCH,
    "modelled": layouts.MODELLED,
}


def bench(comm: Communicator) -> None:
    """Read the command line and run the subcommand on every rank."""
    prints = comm.rank == 0
    parser = UsageParser(
        prog="minipar.bench",
        description="Measure this machine and this project, each next to a baseline in the same run.",
        prints=prints,
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    for name, subcommand in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=subcommand.help, prints=prints)
        subparser.add_argument("--json", metavar="FILE", help="write the rows as JSON (- for standard output)")
        subcommand.add_arguments(subparser)
    args = parser.parse_args()
    SUBCOMMANDS[args.subcommand].run(comm, args)


if __name__ == "__main__":
    main(bench)
