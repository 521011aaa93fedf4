"""The parser of all command lines, which raises UsageError, and what programs do with that error and with --json."""

import argparse
import difflib
import json
from pathlib import Path
from typing import Any, NoReturn

from minipar.errors import UsageError, error_line, print_line


class UsageParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError where argparse would exit, and names the flag that was probably meant.

    Flags are not abbreviated. Only the rank that `prints` shows `--help`.
    """

    def __init__(self, prints: bool = True, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.prints = prints

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and raise UsageError for what no flag takes. Parsers of subcommands are called by this name, too."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag, _, _ = unknown[0].partition("=")
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
            question = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"unrecognized arguments: {flag}{question}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: Any = None) -> None:
        if self.prints:
            super().print_help(file)


def report(error: UsageError) -> int:
    """Print an error's line, and return the exit code, 2."""
    print_line(error_line(error))
    return 2


def write_json(path: str, value: Any) -> None:
    """Write the value of --json; "-" is standard output, which then gets nothing else. UsageError if not possible."""
    text = json.dumps(value, indent=1)
    try:
        if path == "-":
            print(text)
        else:
            Path(path).write_text(f"{text}\n")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror}") from None
