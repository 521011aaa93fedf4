"""Every flag of every command as text: its type, default and choices.

`PYTHONPATH=tests/helpers python -m command_flags` writes tests/flags.txt again: look at the difference before it is
committed.
"""

import argparse
import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from minipar import generate
from minipar.bench.__main__ import SUBCOMMANDS, bench
from minipar.comm.threads import serial
from minipar.compare import differences
from minipar.plan import __main__ as plan
from minipar.train.config import parse
from minipar.train.settings import FOR_MODELS, INTERVALS, MODELS, NEEDS, TrainConfig, flags
from visualize import __main__ as visualize

RECORDED = Path(__file__).parents[1] / "flags.txt"
COMMANDS: dict[str, Callable[[], object]] = {
    "train": lambda: parse(["--help"]),
    "plan": lambda: plan.main(["--help"]),
    "generate": lambda: generate.main(["--help"]),
    "compare": lambda: differences.main(["--help"]),
    "visualize": lambda: visualize.main(["--help"]),
    "bench": lambda: bench(serial()),
}


def arguments_of(command: str) -> list[argparse.Action]:
    """Return the arguments that a command's parsers are given."""
    added = []
    add = argparse.ArgumentParser.add_argument

    def remember(self: argparse.ArgumentParser, *names: str, **options: object) -> argparse.Action:
        added.append(add(self, *names, **options))
        return added[-1]

    with (
        mock.patch.object(argparse._ActionsContainer, "add_argument", remember),
        mock.patch("sys.argv", ["program", "--help"]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        COMMANDS[command]()
    return added


def as_text(action: argparse.Action) -> str:
    """Write what a flag takes, and what it is without being given."""
    name = " ".join(action.option_strings) or action.dest
    kind = getattr(action.type, "__name__", "text")
    choices = None if action.choices is None else list(action.choices)
    taken = f"{type(action).__name__} {kind} nargs={action.nargs} metavar={action.metavar} choices={choices}"
    return f"{name}: {taken} default={action.default} required={action.required}"


def every_flag() -> str:
    """Write the flags of all commands, and the limits of training's."""
    lines = []
    for command in COMMANDS:
        lines += [f"== {command}", *map(as_text, arguments_of(command))]
    lines.append("== limits of train")
    for _, _, flag, default in flags(TrainConfig()):
        limits = {"within": INTERVALS.get(flag), "of": FOR_MODELS.get(flag, (MODELS, ""))}
        if flag in NEEDS:
            limits["needs"] = NEEDS[flag]
        lines.append(f"{flag}: default={default!r} {limits}")
    return "\n".join([*lines, f"== subcommands of bench: {' '.join(SUBCOMMANDS)}", ""])


if __name__ == "__main__":
    RECORDED.write_text(every_flag(), encoding="utf-8")
