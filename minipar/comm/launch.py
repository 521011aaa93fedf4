"""How a program begins and how it ends: the world communicator, and failures that end every rank."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from minipar.comm.clock import Clock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.local import serial
from minipar.errors import UsageError, UsageParser, error_line

# What the launchers tell each process about the number of ranks: MPICH and Intel MPI, Open MPI, Slurm's PMI.
RANK_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE")
MEET_SECONDS = 3.0  # how long a rank with a usage error waits for the others to report the same


def world(clock: str | Clock | None = None, network: Network | None = None) -> Communicator:
    """The communicator of all ranks: those of mpirun, or this process alone.

    From here on an uncaught exception on any rank prints `rank r:` and its traceback and ends the whole job.
    UsageError when mpirun started several ranks but MPI is not installed, or is not the one that mpirun belongs to.
    """
    started = max((int(os.environ[name]) for name in RANK_COUNTS if os.environ.get(name, "").isdigit()), default=1)
    try:
        from minipar.comm.mpi import MPI, MPITransport
    except (ImportError, RuntimeError) as error:
        if started == 1:
            return serial(clock, network)
        raise UsageError(f"mpirun started {started} ranks, but MPI cannot be loaded: {error}") from None
    if MPI.COMM_WORLD.Get_size() != started and started > 1:
        raise UsageError(
            f"mpirun started {started} ranks, but the MPI library sees {MPI.COMM_WORLD.Get_size()}: "
            "mpirun and mpi4py's library belong to different MPIs"
        )
    comm = Communicator(MPITransport(MPI.COMM_WORLD), clock=clock, network=network)
    if comm.size > 1:
        sys.excepthook = _abort_with_traceback
    return comm


def _abort_with_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The excepthook: plain Python would leave the other ranks waiting for this one."""
    from minipar.comm.mpi import MPI, abort

    text = "".join(traceback.format_exception(kind, error, trace))
    if MPI.Is_finalized():  # an error while this rank ends: too late to end the others, which end by themselves
        sys.stderr.write(text)
        return
    sys.stderr.write(f"rank {MPI.COMM_WORLD.Get_rank()}:\n{text}")
    abort(1)


def main(fn: Callable[[Communicator], object], clock: str | Clock | None = None) -> NoReturn:
    """Run a program: `fn(comm)` on every rank, then exit with code 0 (or with the int that fn returns).

    UsageError on every rank: rank 0 prints one line and all exit with code 2. UsageError on some ranks only: after a
    few seconds one of them prints its line and ends the job with code 2. Ctrl-C: one line, code 130. Anything else:
    that rank's traceback, code 1.
    """
    try:
        comm = world(clock)
    except UsageError as error:
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
            _print_error(error)
        sys.exit(2)
    try:
        result = fn(comm)
    except KeyboardInterrupt:
        # mpirun passes Ctrl-C on to every rank; whoever is first ends them all, without their tracebacks.
        if comm.rank == 0:
            print("minipar: interrupted", file=sys.stderr, flush=True)
        comm.abort(130)
        sys.exit(130)  # where another rank's abort came first, this one's returns
    except UsageError as error:
        if _everyone_fails(comm):
            if comm.rank == 0:
                _print_error(error)
            sys.exit(2)
        _print_error(error)
        comm.abort(2)
    except SystemExit as leaving:
        if leaving.code not in (0, None) and comm.size > 1 and not _everyone_fails(comm):
            comm.abort(leaving.code if isinstance(leaving.code, int) else 1)
        raise
    sys.exit(result if isinstance(result, int) else 0)


def _print_error(error: UsageError) -> None:
    sys.stdout.flush()
    print(error_line(error), file=sys.stderr, flush=True)


def _everyone_fails(comm: Communicator) -> bool:
    """Meet the other ranks that end with an error, on a path of their own; False if some have not come in time."""
    if comm.size == 1:
        return True
    from minipar.comm.mpi import MPI

    meeting = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + MEET_SECONDS
    while not meeting.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class Parser(UsageParser):
    """For many ranks: only the one that talks prints the help."""

    def __init__(self, *args: Any, talks: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.talks = talks

    def _print_message(self, message: str, file: Any = None) -> None:
        if self.talks:
            super()._print_message(message, file)
