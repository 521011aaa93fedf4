"""The command `minipar`, also as `python -m minipar`: `minipar train ...` is `python -m minipar.train ...`."""

import os
import runpy
import sys

from minipar import __version__
from minipar.errors import UsageError, error_line, print_line
from minipar.pictures import full_name

COMMANDS = {
    "train": (
        "minipar.train",
        "train a GPT, a Llama or a Mixtral; on N ranks: mpirun -n N minipar train ...",
    ),
    "plan": ("minipar.plan", "find the fastest layouts of a model on a cluster; needs no MPI"),
    "generate": ("minipar.generate", "continue a text with a trained model"),
    "compare": ("minipar.compare", "name the step, parameters and factor by which two runs differ"),
    "bench": ("minipar.bench", "measure this machine and minipar; most with mpirun -n N"),
    "visualize": ("visualize", "draw traces, schedules, memory, losses and plans"),
}
HELP = "usage: minipar COMMAND ...\n\n" + "".join(
    f"  {name:<11}{what} (python -m {module})\n" for name, (module, what) in COMMANDS.items()
)


def main() -> None:
    """Run the sub-command that the command line names.

    Without one, print the list; exit with 2 for an unknown one.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        module, _ = COMMANDS[name]
        if name == "visualize":
            module = full_name(module)
        sys.argv = [f"minipar {name}", *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    # MPI has not started here, so the launcher's variable says which rank prints.
    first = all(
        os.environ.get(variable, "0") == "0"
        for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    )
    if name in ("-h", "--help", "--version"):
        text = f"minipar {__version__}\n" if name == "--version" else HELP
        sys.stdout.write(text if first else "")
        return
    if first:
        print_line(
            error_line(UsageError(f"minipar {name}: no such command; expected {', '.join(COMMANDS)}"))
        )
    sys.exit(2)


if __name__ == "__main__":
    main()
