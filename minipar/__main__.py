"""The command `minipar`, also as `python -m minipar`: `minipar train ...` is `python -m minipar.train ...`."""

import runpy
import sys
from importlib.util import find_spec

from minipar.errors import print_line

COMMANDS = {
    "train": "train a GPT, a Llama or a Mixtral; on N ranks: mpirun -n N minipar train ...",
    "plan": "find the fastest layouts of a model on a cluster; needs no MPI",
    "generate": "continue a text with a trained model",
    "compare": "name the step, parameters and factor by which two runs differ",
    "bench": "measure this machine and minipar; most with mpirun -n N",
    "visualize": "draw traces, schedules, memory, losses and plans",
}


def main() -> None:
    """Run the sub-command that the command line names.

    Without one, print the list; exit with 2 for an unknown one.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        # The pictures lie beside minipar in a checkout, and inside it where minipar is installed.
        module = "visualize" if find_spec(f"minipar.{name}") is None else f"minipar.{name}"
        sys.argv = [f"minipar {name}", *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif name.startswith("-"):
        print("usage: minipar COMMAND ...\n")
        for command, what in COMMANDS.items():
            print(f"  {command:<11}{what}")
    else:
        print_line(f"minipar: error: {name} is no command; expected {', '.join(COMMANDS)}")
        sys.exit(2)


if __name__ == "__main__":
    main()
