"""`python -m minipar.bench SUBCOMMAND`: each is a module with HELP, `add_arguments(parser)` and `run(comm, args)`."""

from __future__ import annotations

from minipar.bench import collectives, layouts, machine, modelled, overlap, pipeline, step
from minipar.comm import Communicator, main
from minipar.errors import UsageParser

SUBCOMMANDS = {
    "collectives": collectives,
    "step": step,
    "overlap": overlap,
    "pipeline": pipeline,
    "machine": machine,
    "layouts": layouts,
    "modelled": modelled,
}


def bench(comm: Communicator) -> None:
    """Read the command line and run the subcommand on every rank."""
    prints = comm.rank == 0
    parser = UsageParser(
        prog="minipar.bench",
        description="Measure this machine and this project, each beside a baseline in the same run.",
        prints=prints,
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    for name, module in SUBCOMMANDS.items():
        module.add_arguments(subparsers.add_parser(name, help=module.HELP, prints=prints))
    args = parser.parse_args()
    SUBCOMMANDS[args.subcommand].run(comm, args)


if __name__ == "__main__":
    main(bench)
