"""The parser of all command lines, which raises UsageError, and output that a full disk cannot break."""

import argparse
import difflib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from minipar import __version__
from minipar.errors import UsageError, error_line, print_line


class UsageParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError where argparse would exit, and names the flag that was probably meant.

    It has `--version`. Only the rank that `prints` shows that and `--help`.
    """

    def __init__(self, *args: Any, prints: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prints = prints
        self.add_argument(
            "--version", action="version", version=f"minipar {__version__}", help="show it and exit"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in sys.argv[1:] if args is None else args:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break  # the rest is not this parser's to judge
            flag = word.partition("=")[0]
            if re.fullmatch(r"--[\w-]+", flag) and flag not in self._option_string_actions:
                near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
                question = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"unrecognized arguments: {flag}{question}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if self.prints:
            write_out(message)


def report(error: UsageError) -> int:
    """Print an error's line, unless nobody reads the output any more, and return the exit code, 2."""
    if not isinstance(error.__context__, BrokenPipeError):
        print_line(error_line(error))
    return 2


def write_out(text: str) -> None:
    """Write to standard output at once. UsageError if nobody reads it or its disk is full."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # The flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(f"standard output cannot be written: {error.strerror}") from None


def write_json(path: str, value: Any) -> None:
    """Write the value of --json; "-" is standard output, which then gets nothing else. UsageError if not possible."""
    text = json.dumps(value, indent=1) + "\n"
    if path == "-":
        write_out(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror}") from None
