"""A rank that calls `os._exit(0)` in the middle of a job.

MPICH's mpirun then ends the other ranks wherever they are, and exits with this rank's code: a job
that has computed nothing would have succeeded.
"""

import os
import sys
from functools import partial
from typing import NoReturn

from minipar.robust_start import mpirun

_exit = os._exit


def refuse_exit_0(rank: int) -> None:
    """Let `os._exit(0)` in this process end the job with code 1 and a line that names this rank."""
    os._exit = partial(end_process, rank, os.getpid())


def end_process(rank: int, process: int, status: int) -> NoReturn:
    """End this process as os._exit does, and the job if it is the rank's own process and ends with 0.

    A process that the rank has forked may end with 0.
    """
    if os.getpid() != process or status % 256 != 0:
        _exit(status)
    remedy = "return, or call sys.exit(0), which lets the other ranks finish"
    print(f"minipar: rank {rank} has called os._exit(0), which ends the job: {remedy}", file=sys.stderr)
    mpirun.end_job(1)
    _exit(1)
