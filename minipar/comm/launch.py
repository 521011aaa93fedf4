"""The beginning of a program: the world communicator, and `main` on every rank."""

import atexit
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from minipar.backend import Value, prepare_process
from minipar.comm.communicator import Communicator
from minipar.comm.ending import abort_with_traceback, end_every_rank
from minipar.comm.threads import run_local, serial
from minipar.comm.work import wait_timeout
from minipar.errors import UsageError, print_line
from minipar.lone_steps import smallest_step, steps_so_far
from minipar.robust_start.exits import refuse_exit_0
from minipar.robust_start.launchers import check_count, check_mpi_library, started_ranks
from minipar.robust_start.one_line import one_line_errors, print_error
from minipar.robust_start.start import start_mpi


def launch(main: Callable[[Communicator], Value], threads: int | None = None) -> Value | list[Value]:
    """Run `main(world)` once per rank: the entry point of a script.

    Under `mpirun -n N python script.py` each process is a rank, without mpirun this process is one,
    and the result of this rank is returned. With `threads=n`, n ranks run as threads (`run_local`),
    and all their results are returned.

    Errors end every rank. UsageError, and MemoryError: one rank prints one line, after a few
    seconds if not every rank raises it, and all exit with code 2. Ctrl-C: one line, code 130. Any
    other exception: `rank r:` with the traceback, once if several ranks have the same, code 1.
    Threads raise the first such exception here; one that calls `sys.exit(0)` has returned, as a
    process has.

    Rank 0 prints a note if it has trained a model of its own and sent less than one gradient: a
    wrapper was forgotten.
    """
    before = steps_so_far()
    if threads is not None:
        return _launch_threads(partial(_run, main, before), threads)
    with one_line_errors():
        comm = world()
    try:
        return _run(main, before, comm)
    except (KeyboardInterrupt, UsageError, MemoryError, SystemExit) as error:
        end_every_rank(comm, error)


def _run(main: Callable[[Communicator], Value], before: int, comm: Communicator) -> Value:
    """Run a rank, and note a forgotten wrapper.

    The process had taken `before` steps without a strategy.
    """
    result = main(comm)
    # A gradient has more than one byte per element.
    trained_alone = comm.traffic.bytes() < smallest_step(before)
    if trained_alone and comm.rank == 0 and comm.size > 1:
        why = f"each of the {comm.size} ranks trained a model of its own, and no gradients were summed"
        remedy = "train with ddp = mp.DistributedDataParallel(model, world), ddp.loss(x, y) and ddp.parameters()"
        print_line(f"minipar: note: {why}; {remedy}")
    return result


def _launch_threads(main: Callable[[Communicator], Value], threads: int) -> list[Value]:
    """Run the ranks as threads.

    The first rank's usage error is one line and exit code 2, as under mpirun.
    """
    with one_line_errors():
        ranks, launcher, _ = started_ranks()
        if ranks > 1:
            but = f"{launcher} started {ranks}; leave out threads, or start without {launcher}"
            raise UsageError(f"launch(threads={threads}) runs its ranks in one process, but {but}")
    try:
        return run_local(threads, main, launcher=f"mp.launch(main, threads={threads})")
    except (UsageError, MemoryError) as error:
        print_error(error)
        sys.exit(2)


def main(fn: Callable[[Communicator], object]) -> NoReturn:
    """Run a program with `launch`, then exit with code 0, or with the int that fn returns."""
    result = launch(fn)
    sys.exit(result if isinstance(result, int) else 0)


def world() -> Communicator:
    """Return the communicator of all ranks, those of mpirun or this process alone.

    All ranks call it. It sets up this process.

    From here on an uncaught exception on any rank prints `rank r:` and its traceback and ends the
    whole job. UsageError if a launcher started several ranks but MPI is not installed, has one
    rank, or is another MPI than mpirun's.
    """
    prepare_process()
    count, launcher, _ = started_ranks()
    check_mpi_library()
    try:
        start_mpi(wait_timeout())
        from mpi4py import MPI

        from minipar.comm.mpi import MPITransport, Notices
    except (ImportError, RuntimeError) as error:
        if count == 1:
            return serial()
        raise UsageError(f"{launcher} started {count} ranks, but MPI cannot be loaded: {error}") from None
    size = MPI.COMM_WORLD.Get_size()
    check_count(size)
    notices = Notices()
    comm = Communicator(MPITransport(MPI.COMM_WORLD, range(size), notices))
    if comm.size > 1:
        sys.excepthook = partial(abort_with_traceback, comm)
        refuse_exit_0(comm.rank)
        atexit.register(notices.leave)
    atexit.register(comm.engine.close)
    return comm
