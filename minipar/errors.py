"""The errors that end a job, and the checks that raise them in several packages."""

import sys


class UsageError(ValueError):
    """A mistake in the user's input.

    Every rank raises it, one rank prints one line, and the job exits with code 2.
    """


class CommunicationError(RuntimeError):
    """A failure of communication: a message of the wrong size, a dead peer, a wait that timed out, or a deadlock."""


def error_line(error: UsageError | MemoryError) -> str:
    """Format an error as one line."""
    return f"minipar: error: {' '.join(str(error).split()) or 'out of memory'}"


def print_line(line: str) -> None:
    """Print a line on standard error in one piece, so that no other rank's line begins inside it.

    print() writes the line's end by itself if PYTHONUNBUFFERED is set, as it is in many containers.
    """
    sys.stderr.write(f"{line}\n")


def check_divides(what: str, size: int, parts: int, why: str) -> None:
    """Raise UsageError, with the equation, if `size` cannot be cut into equal parts."""
    if size % parts:
        raise UsageError(f"{what} = {size}/{parts} is not a whole number: {why}")
