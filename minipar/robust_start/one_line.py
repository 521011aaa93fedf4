"""Errors while the ranks start: a usage error or Ctrl-C ends every rank with one line."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from minipar.errors import UsageError, error_line
from minipar.robust_start import interrupt
from minipar.robust_start.launchers import prints_error

MEET_SECONDS = 3.0  # how long a rank with a usage error waits for the others to report the same


def print_error(error: UsageError | MemoryError) -> None:
    """Print the line of an error, after what the program has printed."""
    sys.stdout.flush()
    print(error_line(error), file=sys.stderr)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with code 2 after a UsageError in the block, and with code 130 after Ctrl-C."""
    interrupt.install()
    try:
        yield
    except UsageError as error:
        if prints_error():
            print_error(error)
        else:
            time.sleep(MEET_SECONDS)  # Open MPI ends all ranks with the first one: rank 0's line must come before
        sys.exit(2)
    finally:
        interrupt.restore()
