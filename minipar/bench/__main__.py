"""`python -m minipar.bench SUBCOMMAND`: the command line of all benchmarks."""

from __future__ import annotations

from minipar.bench import bits, collectives, context, layouts, machine, pipeline, reductions, step
from minipar.cli import UsageParser
from minipar.comm.communicator import Communicator
from minipar.comm.launch import main

# The function that adds a benchmark's flags, and the one that every rank runs: its docstring's first line is the help.
SUBCOMMANDS = {
    "collectives": (collectives.add_arguments, collectives.run),
    "step": (step.add_step_flags, step.run_step),
    "zero": (step.add_step_flags, step.run_zero),
    "overlap": (step.add_overlap_flags, step.run_overlap),
    "pipeline": (pipeline.add_arguments, pipeline.run),
    "context": (context.add_arguments, context.run),
    "reductions": (reductions.add_arguments, reductions.run),
    "bits": (bits.add_arguments, bits.run),
    "machine": (machine.add_arguments, machine.run),
    "layouts": (layouts.add_layouts_flags, layouts.run_layouts),
    "modelled": (layouts.add_modelled_flags, layouts.run_modelled),
}


def bench(comm: Communicator) -> None:
    """Read the command line and run the subcommand on every rank."""
    prints = comm.rank == 0
    parser = UsageParser(
        prog="minipar.bench",
        description="Measure this machine and this project, each next to a baseline in the same run.",
        prints=prints,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    for name, (add_arguments, run) in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=str(run.__doc__).splitlines()[0], prints=prints, allow_abbrev=False
        )
        subparser.add_argument("--json", metavar="FILE", help="write the rows as JSON (- for standard output)")
        add_arguments(subparser)
        subparser.set_defaults(run=run)
    args = parser.parse_args()
    args.run(comm, args)


if __name__ == "__main__":
    main(bench)
