"""The errors that end a job, and what commands share: a parser and output that raise them."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn, TextIO


class UsageError(ValueError):
    """A mistake in the user's input. Every rank raises it, one rank prints one line, and the job exits with code 2."""


class CommunicationError(RuntimeError):
    """A failure of communication: a message of the wrong size, a dead peer, a wait that timed out, or a deadlock."""


def error_line(error: UsageError | MemoryError) -> str:
    """Format an error as one line. Control characters, such as terminal escapes in a path, are shown escaped."""
    return f"minipar: error: {printable(' '.join(str(error).split())) or 'out of memory'}"


def report(error: UsageError | MemoryError) -> int:
    """Print an error's line, unless nobody reads the output any more, and return the exit code, 2."""
    if not isinstance(error.__context__, BrokenPipeError):
        print(error_line(error), file=sys.stderr)
    return 2


def printable(text: str) -> str:
    """Escape line breaks and other control characters, so that a path cannot change what a terminal shows."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is spelled most like `name`, or "". Case and punctuation do not count."""
    spelled = {re.sub(r"[\W_]", "", choice).lower(): choice for choice in choices}
    close = difflib.get_close_matches(re.sub(r"[\W_]", "", name).lower(), spelled, n=1, cutoff=0.7)
    return spelled[close[0]] if close else ""


def check_divides(what: str, size: int, parts: int, why: str) -> None:
    """Raise UsageError, with the equation, if `size` cannot be cut into equal parts."""
    if size % parts:
        raise UsageError(f"{what} = {size}/{parts} is not a whole number: {why}")


def check_memory(needed: float | Decimal, what: str) -> None:
    """Raise UsageError, which says what needs these bytes, if they are more than this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UsageError(f"{what} = {needed:.6g} bytes, but this machine has {memory:.6g}")


class UsageParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError for a mistake, with similar flags, and prints `--help` on one rank."""

    def __init__(self, *args: Any, prints: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prints = prints  # whether this rank prints

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():
            if word.startswith("--") and word.endswith("=--"):  # before Python 3.13 the value would be an empty list
                raise UsageError(f"argument {word[:-3]}: expected one argument")
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            close = dict.fromkeys(suggest(flag, self._option_string_actions) for flag in flags)
            similar = ", ".join(filter(None, close))
            question = f"; did you mean {similar}?" if similar else ""
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{question}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if self.prints:
            write_out(message)  # argparse would ignore a full disk or show a traceback, depending on its version


@contextmanager
def writing(what: str, *files: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a UsageError about `what`. A block that fails leaves none of `files`."""
    try:
        yield
    except (OSError, UsageError) as error:
        for file in files:
            with suppress(OSError):
                if file.is_file():  # devices and pipes stay
                    file.unlink()
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{what} cannot be written: {error.strerror or error}") from None


def write_json(path: str, value: Any) -> None:
    """Write the value of --json; "-" is standard output, which then gets nothing else. UsageError if not possible."""
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
