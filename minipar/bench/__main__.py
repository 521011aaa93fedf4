"""`python -m minipar.bench SUBCOMMAND`: the command line of all benchmarks."""

from __future__ import annotations

from minipar.bench import bits, collectives, machine, pipeline, step
from minipar.cli import UsageParser
from minipar.comm.communicator import Communicator
from minipar.comm.launch import launch
from minipar.errors import UsageError

# The function that adds a benchmark's flags, and the one that every rank runs: its docstring's first line is the help.
SUBCOMMANDS = {
    "collectives": (collectives.add_flags, collectives.run),
    "step": (step.add_flags, step.run_step),
    "zero": (step.add_flags, step.run_zero),
    "overlap": (step.add_flags, step.run_overlap),
    "pipeline": (pipeline.add_flags, pipeline.run),
    "bits": (bits.add_flags, bits.run),
    "machine": (machine.add_flags, machine.run),
}
ONE_PROCESS = ("step", "bits")
SEVERAL_RANKS = ("collectives", "pipeline", "machine")


def bench(comm: Communicator) -> None:
    """Read the command line and run the subcommand on every rank."""
    prints = comm.rank == 0
    parser = UsageParser(
        prog="minipar.bench",
        description="Measure this machine and this project, each next to a baseline in the same run.",
        prints=prints,
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    for name, (add_flags, run) in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=str(run.__doc__).splitlines()[0], prints=prints)
        subparser.add_argument("--json", metavar="FILE", help="write the rows as JSON (- for standard output)")
        add_flags(subparser)
        subparser.set_defaults(run=run)
    args = parser.parse_args()
    command = f"python -m minipar.bench {args.subcommand}"
    if args.subcommand in ONE_PROCESS and comm.size > 1:
        raise UsageError(f"{command} runs in one process; mpirun started {comm.size}: run it without mpirun")
    if args.subcommand in SEVERAL_RANKS and comm.size == 1:
        raise UsageError(f"{command} needs at least 2 ranks: mpirun -n 8 {command}")
    args.run(comm, args)


if __name__ == "__main__":
    launch(bench)
