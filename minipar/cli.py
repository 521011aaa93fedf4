"""The parser of all command lines, which raises UsageError, and output that a full disk cannot break."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from minipar import __version__
from minipar.errors import UsageError, error_line
from minipar.hints import did_you_mean, suggest, suggest_flag


def report(error: UsageError | MemoryError) -> int:
    """Print an error's line, unless nobody reads the output any more, and return the exit code, 2."""
    if not isinstance(error.__context__, BrokenPipeError):
        print(error_line(error), file=sys.stderr)
    return 2


class UsageParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError for a mistake, with the flag or name that was probably meant.

    It has `--version`, and prints that and `--help` on one rank.
    """

    def __init__(self, *args: Any, prints: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prints = prints  # whether this rank prints
        self.unknown: list[str] = []  # flags of the command line that the parser does not have
        version = f"minipar {__version__}"
        self.add_argument("--version", action="version", version=version, help="show the version and exit")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if word.startswith("--") and word.endswith("=--"):  # before Python 3.13 the value would be an empty list
                raise UsageError(f"argument {word[:-3]}: expected one argument")
        self.unknown = list(self._unknown_flags(words))
        known, unknown = super().parse_known_args(words, namespace)
        if unknown:
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{self._meant()}")
        return known, unknown

    def _unknown_flags(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the flags that this parser does not have; those of a sub-command are its parser's to judge."""
        for word in words:
            flag = word.partition("=")[0]
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            if re.match("--?[A-Za-z]", word) and " " not in word and flag not in self._option_string_actions:
                yield flag

    def _meant(self) -> str:
        """Return the question which of the parser's flags were meant by the unknown ones."""
        meant = dict.fromkeys(suggest_flag(flag, self._option_string_actions) for flag in self.unknown)
        return did_you_mean(", ".join(filter(None, meant)))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Add to argparse's message the choice that is spelled most like the value."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = suggest(str(value), [str(choice) for choice in action.choices or ()])
            raise argparse.ArgumentError(action, f"{error.message}{did_you_mean(near)}") from None

    def error(self, message: str) -> NoReturn:
        if self.unknown:  # probably why another one is missing
            message += f"; there is no {', '.join(self.unknown)}{self._meant()}"
        raise UsageError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if self.prints:
            write_out(message)  # argparse would ignore a full disk or show a traceback, depending on its version


@contextmanager
def writing(what: str, *files: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a UsageError about `what`.

    A block that fails leaves none of `files`.
    """
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        for file in files:
            with suppress(OSError):
                if file.is_file():  # devices and pipes stay
                    file.unlink()
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"{what} cannot be written: {error.strerror or error}") from None


def write_json(path: str, value: Any) -> None:
    """Write the value of --json; "-" is standard output, which then gets nothing else.

    UsageError if not possible.
    """
    text = json.dumps(value, indent=1) + "\n"
    if path == "-":
        write_out(text)
        return
    with writing(f"--json {path}"):
        Path(path).write_text(text)


def write_out(text: str) -> None:
    """Write to standard output at once. UsageError if nobody reads it or its disk is full."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        discard(sys.stdout)
        raise UsageError(f"standard output cannot be written: {error.strerror}") from None


def discard(file: TextIO) -> None:
    """Discard the buffer of a failed write and all later output: the flush at exit must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def say(text: str, out: TextIO | None) -> None:
    """Print at once, on the rank that has a stream.

    If nobody reads it any more, training goes on without a word.
    """
    if out is None:
        return
    try:
        print(text, file=out, flush=True)
    except OSError as error:
        discard(out)
        if not isinstance(error, BrokenPipeError):
            print(f"minipar: note: progress cannot be written: {error.strerror}", file=sys.stderr)


def open_to_append(path: str) -> TextIO:
    """Open a file to append to.

    OSError at once for a pipe that nobody reads, which a plain `open` would wait for.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    return open(file, "a", encoding="utf-8")
