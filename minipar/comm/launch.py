"""The beginning and the end of a program: the world communicator, `main` on every rank, and one line for a failure."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from minipar.backend import Value, this_rank
from minipar.comm.communicator import Communicator
from minipar.comm.threads import run_local, serial
from minipar.errors import UsageError, error_line, print_line
from minipar.process import prepare_process

# The variables in which MPICH, Open MPI, torchrun and srun give the number of processes that they have started.
STARTED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launch(main: Callable[[Communicator], Value], threads: int | None = None) -> Value | list[Value]:
    """Run `main(world)` once per rank: the entry point of a script.

    Under `mpirun -n N python script.py` each process is a rank, without mpirun this process is one,
    and the result of this rank is returned. With `threads=n`, n ranks run as threads (`run_local`),
    and all their results are returned.

    Errors end every rank. UsageError, and MemoryError: one line, after a few seconds if not every
    rank raises it, and code 2. Ctrl-C: one line, code 130. `sys.exit(code)` with another code than
    0 on some of the ranks: one line, that code. Any other exception: `rank r:` with the traceback, code 1.
    In a notebook, or at Python's prompt, an error is raised as it is.
    """
    comm = serial()  # until MPI has started, this process is alone
    try:
        if threads is not None:
            return run_local(threads, main)
        comm = world()
        return main(comm)
    except (UsageError, MemoryError) as error:
        if hasattr(sys, "ps1"):  # a person types the program
            raise
        end_every_rank(comm, 2, error_line(error))
    except KeyboardInterrupt:
        end_every_rank(comm, 130, "minipar: interrupted")
    except SystemExit as leaving:
        if leaving.code and fails_alone(comm):
            code = leaving.code if isinstance(leaving.code, int) else 1
            comm.transport.job.abort(code, f"minipar: rank {comm.rank} exits with {leaving.code!r}")
        raise


def world() -> Communicator:
    """Return the communicator of all ranks, those of mpirun or this process alone. All ranks call it.

    From here on an uncaught exception on any rank prints `rank r:` and its traceback and ends the
    whole job. UsageError if a launcher started several ranks, but MPI is not installed or does not
    see them.
    """
    prepare_process()
    if "PMI_SIZE" in os.environ:
        # Without it, UCX, MPICH's library for the network, takes another 4.3 MB of shared memory for each
        # rank, and 8 ranks do not start in the 64 MiB of a Docker container.
        os.environ.setdefault("UCX_TLS", "^posix")
    try:
        from minipar.comm.mpi import start

        comm = Communicator(start())
    except (ImportError, RuntimeError):  # MPI is not installed
        comm = serial()
    for variable in STARTED:
        count = os.environ.get(variable, "1")
        if comm.size == 1 and count != "1":
            remedy = f"start with the mpirun that belongs to mpi4py's MPI: mpirun -n {count} python ..."
            raise UsageError(
                f"{variable} = {count} processes were started, but MPI sees 1 rank: {remedy}"
            )
    this_rank.rank = comm.rank
    return comm


def end_every_rank(comm: Communicator, code: int, line: str) -> NoReturn:
    """End the program. If all ranks fail in the same seconds, rank 0 alone prints its line."""
    if fails_alone(comm):
        comm.transport.job.abort(code, line)
    if comm.rank == 0:
        print_line(line)
    sys.exit(code)


def fails_alone(comm: Communicator) -> bool:
    """Return True if other ranks go on while this one fails."""
    return comm.size > 1 and not comm.transport.job.every_rank_fails()
