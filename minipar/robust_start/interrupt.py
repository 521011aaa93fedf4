"""Ctrl-C while a program starts: one line and exit code 130, where Python would show where each rank's imports were.

`python -m minipar.train` and `python -m minipar.bench` install the handler with their first import,
other programs in `launch`. When MPI runs, Ctrl-C raises KeyboardInterrupt again. Only small modules
are imported here, because until the handler is installed Ctrl-C shows a traceback.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType

from minipar.robust_start import mpirun

CODE = 128 + signal.SIGINT
FIRST_SECONDS = 1.0  # how long the other ranks leave to rank 0, which prints the line


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End this process, and with MPICH's mpirun the job. (The handler of SIGINT.)"""
    if os.environ.get("PMI_RANK", "0") == "0":
        print("minipar: interrupted", file=sys.stderr)
    else:
        time.sleep(FIRST_SECONDS)
    mpirun.end_job(CODE)
    os._exit(CODE)


def install() -> None:
    """Make Ctrl-C end this process at once, unless the program has a handler of its own, or ignores Ctrl-C."""
    main_thread = threading.current_thread() is threading.main_thread()  # no other may set handlers
    if main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def restore() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
