"""The end of a program after an error: every rank ends, and one of them says why."""

import sys
import traceback
from types import TracebackType
from typing import NoReturn

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.robust_start.one_line import MEET_SECONDS, print_error


def abort_with_traceback(
    comm: Communicator, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback and end the job. (The excepthook: plain Python would leave the other ranks waiting.)"""
    from mpi4py import MPI

    from minipar.comm.mpi import abort

    if MPI.Is_finalized():  # an error while this rank ends: too late to end the others, which end by themselves
        return sys.__excepthook__(kind, error, trace)
    text = "".join(traceback.format_exception(kind, error, trace))
    comm.engine.unwaited.clear()  # operations that nobody waits for after an error are no mistake of their own
    try:
        comm.transport.notices.print_once(text)
    except MPI.Exception:  # no message leaves any more
        sys.stderr.write(f"rank {comm.rank}:\n{text}")
    abort(1)


def everyone_fails(comm: Communicator) -> bool:
    """Tell the other ranks that this one ends with an error.

    Return False if some do not say so in time.
    """
    comm.engine.unwaited.clear()  # as above
    if comm.size == 1:
        return True
    from minipar.comm.mpi import FAILED

    return comm.transport.notices.send(FAILED, seconds=MEET_SECONDS)


def end_every_rank(comm: Communicator, error: KeyboardInterrupt | UsageError | MemoryError | SystemExit) -> NoReturn:
    """End the program after an error that is one line, and with it the ranks that do not end by themselves."""
    code: str | int | None
    if isinstance(error, KeyboardInterrupt):
        # mpirun passes Ctrl-C on to every rank. The first one ends them all, without their tracebacks.
        if comm.rank == 0:
            print("minipar: interrupted", file=sys.stderr)
        code = 130
        everyone = comm.size == 1
    elif isinstance(error, SystemExit):
        code = error.code
        everyone = code in (0, None) or everyone_fails(comm)
        if not everyone:
            print(f"minipar: rank {comm.rank} exits with {code!r}, and not every rank does", file=sys.stderr)
    else:
        code = 2
        everyone = everyone_fails(comm)
        if comm.rank == 0 or not everyone:
            print_error(error)
    if not everyone:
        from minipar.comm.mpi import abort

        abort(code if isinstance(code, int) else 1)
    sys.exit(code)  # also where another rank's abort came first: this one's then returns
