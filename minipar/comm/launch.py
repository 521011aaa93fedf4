"""The beginning and the end of a program: the world communicator, `main` on every rank, and one line for a failure."""

import atexit
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import NoReturn

from minipar.backend import Value, prepare_process
from minipar.comm.communicator import Communicator
from minipar.comm.threads import run_local, serial
from minipar.errors import UsageError, error_line, print_line

START_SECONDS = 60  # MPI takes some to start where many ranks share few cores
# Launchers, and the variables in which they give the number of processes. In an allocation of srun, mpirun starts them.
LAUNCHERS = {
    "PMI_SIZE": "mpirun",  # MPICH
    "OMPI_COMM_WORLD_SIZE": "mpirun",  # Open MPI
    "WORLD_SIZE": "torchrun",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def launch(main: Callable[[Communicator], Value], threads: int | None = None) -> Value | list[Value]:
    """Run `main(world)` once per rank: the entry point of a script.

    Under `mpirun -n N python script.py` each process is a rank, without mpirun this process is one,
    and the result of this rank is returned. With `threads=n`, n ranks run as threads (`run_local`),
    and all their results are returned.

    Errors end every rank. UsageError, and MemoryError: one line, after a few seconds if not every
    rank raises it, and code 2. Ctrl-C: one line, code 130. `sys.exit(code)` with another code than
    0: that code. Any other exception: `rank r:` with the traceback, code 1.
    """
    try:
        if threads is not None:
            return run_local(threads, main, launcher=f"mp.launch(main, threads={threads})")
        comm = world()
    except (UsageError, MemoryError) as error:
        print_line(error_line(error))
        sys.exit(2)
    try:
        return main(comm)
    except (UsageError, MemoryError) as error:
        line = error_line(error)
        end_every_rank(comm, 2, line, line)
    except KeyboardInterrupt:
        end_every_rank(comm, 130, "minipar: interrupted", "minipar: interrupted")
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        code = leaving.code if isinstance(leaving.code, int) else 1
        alone = f"minipar: rank {comm.rank} exits with {leaving.code!r}, and not every rank does"
        end_every_rank(comm, code, alone, "")


def main(fn: Callable[[Communicator], object]) -> NoReturn:
    """Run a program with `launch`, then exit with code 0, or with the int that fn returns."""
    result = launch(fn)
    sys.exit(result if isinstance(result, int) else 0)


def world() -> Communicator:
    """Return the communicator of all ranks, those of mpirun or this process alone. All ranks call it.

    From here on an uncaught exception on any rank prints `rank r:` and its traceback and ends the
    whole job. UsageError if a launcher started several ranks, but MPI is not installed or does not
    see them.
    """
    prepare_process()
    count, launcher = started_ranks()
    if "PMI_SIZE" in os.environ:
        # Without it, UCX, MPICH's library for the network, takes another 4.3 MB of shared memory for each
        # rank, and 8 ranks do not start in the 64 MiB of a Docker container.
        os.environ.setdefault("UCX_TLS", "^posix")
    try:
        start_mpi()
        from mpi4py import MPI

        from minipar.comm.mpi import MPITransport, Notices
    except (ImportError, RuntimeError) as error:
        if count == 1:
            return serial()
        raise UsageError(f"{launcher} started {count} ranks, but MPI cannot be loaded: {error}") from None
    size = MPI.COMM_WORLD.Get_size()
    if count not in (1, size):
        remedy = f"start with the mpirun that belongs to mpi4py's library: mpirun -n {count} python ..."
        raise UsageError(f"{launcher} started {count} ranks, but MPI sees {size}: {remedy}")
    for mpi_comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
    notices = Notices()
    comm = Communicator(MPITransport(MPI.COMM_WORLD, range(size), notices))
    if size > 1:
        sys.excepthook = partial(abort_with_traceback, comm)
        atexit.register(notices.leave)
    atexit.register(comm.engine.close)
    return comm


def started_ranks() -> tuple[int, str]:
    """Return how many ranks a launcher has started, and its name; (1, "mpirun") for none."""
    for variable, launcher in LAUNCHERS.items():
        if os.environ.get(variable):
            return int(os.environ[variable]), launcher
    return 1, "mpirun"


def start_mpi() -> None:
    """Initialize MPI, unless the program has. It would wait for ever for a rank that has ended before."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    if MPI.Is_initialized():
        return
    timer = threading.Timer(START_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    # Through ctypes, and not mpi4py, it runs without Python's lock, which the timer needs.
    ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    timer.cancel()
    atexit.register(MPI.Finalize)


def give_up() -> NoReturn:
    """End this rank, as the others do, because MPI does not start."""
    print_line(
        f"minipar: MPI has not started within {START_SECONDS} s: a rank has ended before, or comes too late"
    )
    os._exit(1)


def end_every_rank(comm: Communicator, code: int, alone: str, together: str) -> NoReturn:
    """End the program. Every rank that fails alone prints a line; if all fail in these seconds, rank 0 prints one."""
    sys.stdout.flush()  # what the program has printed comes before the line
    comm.engine.unwaited.clear()  # operations that nobody waits for after an error are no mistake of their own
    if comm.size > 1 and not comm.transport.notices.everyone_fails():
        from minipar.comm.mpi import abort

        print_line(alone)
        abort(code)
    if comm.rank == 0 and together:
        print_line(together)
    sys.exit(code)


def abort_with_traceback(
    comm: Communicator, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback and end the job. (The excepthook: plain Python would leave the other ranks waiting.)"""
    from minipar.comm.mpi import abort

    comm.engine.unwaited.clear()  # as above
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(f"rank {comm.rank}:\n{text}")
    abort(1)
