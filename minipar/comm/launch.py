"""The beginning and the end of a program: the world communicator, and failures that end every rank."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from minipar.backend import prepare_process
from minipar.comm.clock import Clock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.start import start_mpi
from minipar.comm.threads import run_local, serial
from minipar.errors import UsageError, error_line

# Launchers, and the variables in which each process finds the number of processes and its own number.
LAUNCHERS = (
    ("mpirun", "PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("mpirun", "PMIX_SIZE", "PMIX_RANK"),
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
MEET_SECONDS = 3.0  # how long a rank with a usage error waits for the others to report the same


def launch(
    main: Callable[[Communicator], Any],
    threads: int | None = None,
    clock: str | Callable[[], Clock] | None = None,
    network: Network | None = None,
) -> Any:
    """Run `main(world)` once per rank: the entry point of a script.

    Under `mpirun -n N python script.py` each process is a rank, without mpirun this process is one, and the result of
    this rank is returned. With `threads=n`, n ranks run as threads (`run_local`), and the list of their results is
    returned. `clock` is "wall", "cpu", "model", or a function that makes a rank's clock.

    Errors end every rank. UsageError: one rank prints one line, after a few seconds if not every rank raises it, and
    all exit with code 2. Ctrl-C: one line, code 130. Any other exception: `rank r:` with the traceback, code 1. Threads
    raise their first exception here.
    """
    try:
        if threads is None:
            comm = world(clock() if callable(clock) else clock, network)
        elif (started := _started_ranks())[0] > 1:
            raise UsageError(
                f"launch(threads={threads}) runs its ranks in one process, but {started[1]} started {started[0]}; "
                f"leave out threads, or start without {started[1]}"
            )
    except UsageError as error:
        if _prints_error():
            _print_error(error)
        sys.exit(2)
    if threads is not None:
        return run_local(threads, main, clock=clock, network=network)
    try:
        return main(comm)
    except KeyboardInterrupt:
        # mpirun passes Ctrl-C on to every rank. The first one ends them all, without their tracebacks.
        if comm.rank == 0:
            print("minipar: interrupted", file=sys.stderr, flush=True)
        code, everyone = 130, comm.size == 1
    except UsageError as error:
        code, everyone = 2, _everyone_fails(comm)
        if comm.rank == 0 or not everyone:
            _print_error(error)
    except SystemExit as leaving:
        if leaving.code not in (0, None) and not _everyone_fails(comm):
            print(f"minipar: rank {comm.rank} exits with {leaving.code!r}, and not every rank does", file=sys.stderr)
            comm.abort(leaving.code if isinstance(leaving.code, int) else 1)
        raise
    if not everyone:
        comm.abort(code)
    sys.exit(code)  # also where another rank's abort came first: this one's then returns


def main(fn: Callable[[Communicator], object], clock: str | None = None) -> NoReturn:
    """Run a program with `launch`, then exit with code 0, or with the int that fn returns."""
    result = launch(fn, clock=clock)
    sys.exit(result if isinstance(result, int) else 0)


def world(clock: str | Clock | None = None, network: Network | None = None) -> Communicator:
    """Return the communicator of all ranks, those of mpirun or this process alone, and set the process up as a rank.

    From here on an uncaught exception on any rank prints `rank r:` and its traceback and ends the whole job. UsageError
    if a launcher started several ranks but MPI is not installed, has one rank, or is another MPI than mpirun's.
    """
    prepare_process()
    count, launcher, variable = _started_ranks()
    _check_mpi_library()
    try:
        start_mpi()
        from minipar.comm.mpi import LEFT, MPI, MPITransport, Signals
    except (ImportError, RuntimeError) as error:
        if count == 1:
            return serial(clock, network)
        raise UsageError(f"{launcher} started {count} ranks, but MPI cannot be loaded: {error}") from None
    size = MPI.COMM_WORLD.Get_size()
    if count not in (1, size):
        cause = "mpirun and mpi4py's library belong to different MPIs"
        if launcher != "mpirun":
            remedy = f"start with mpirun -n {count} python ..., or unset {variable} to run one process"
            cause = f"{launcher} does not start MPI ranks; {remedy}"
        raise UsageError(f"{launcher} started {count} ranks, but the MPI library sees {size}: {cause}")
    signals = Signals()
    comm = Communicator(MPITransport(MPI.COMM_WORLD, range(size), signals), clock=clock, network=network)
    if comm.size > 1:
        sys.excepthook = _abort_with_traceback
        atexit.register(signals.send, LEFT)
    atexit.register(comm.engine.close)
    return comm


def _started_ranks() -> tuple[int, str, str]:
    """Return the number of ranks that a launcher started, the launcher, and the variable. (1, "mpirun", "") for none.

    mpirun has the last word: a job of one rank inside an allocation of many is one rank.
    """
    rows = [row for row in LAUNCHERS if os.environ.get(row[1])]
    rows = [row for row in rows if row[0] == "mpirun"] or rows
    for _, variable, _ in rows:
        if not (value := os.environ[variable]).isdecimal():
            raise UsageError(f"{variable}={value}: expected a number of ranks; unset it to run one process")
    counts = [(int(os.environ[variable]), launcher, variable) for launcher, variable, _ in rows]
    return max(counts, default=(1, "mpirun", ""))


def _check_mpi_library() -> None:
    """Raise UsageError if mpirun and mpi4py's library belong to different MPIs.

    MPI itself would abort while it starts, with a message that names neither the cause nor the remedy.
    """
    descriptor = os.environ.get("PMI_FD")
    try:
        if descriptor is not None:
            os.fstat(int(descriptor))
    except (ValueError, OSError):
        raise UsageError(
            f"PMI_FD={descriptor}: mpirun's variables are set, but mpirun has not started this process; "
            "unset PMI_FD, PMI_RANK and PMI_SIZE"
        ) from None
    hydra, open_mpi = "PMI_SIZE" in os.environ, "OMPI_COMM_WORLD_SIZE" in os.environ
    library = _mpi_library()
    variable = "set the environment variable MPI4PY_MPIABI"
    if library == "mpich" and open_mpi and not hydra:
        remedy = f"{variable}=openmpi, or install Open MPI in an environment of its own"
        raise UsageError(f"mpirun is Open MPI's, but mpi4py loads MPICH: {remedy}")
    if library == "openmpi" and hydra and not open_mpi and "SLURM_STEP_ID" not in os.environ:
        remedy = f"{variable}=mpich, or start with Open MPI's mpirun"
        raise UsageError(f"mpirun is MPICH's, but mpi4py loads Open MPI: {remedy}")


def _mpi_library() -> str | None:
    """Return "mpich" or "openmpi", the library that `from mpi4py import MPI` would load. None if that is not known."""
    try:
        _mpiabi: Any = importlib.import_module("mpi4py._mpiabi")
        # mpi4py's wheels choose between libraries and register them here. A build for one library has no choice.
        return _mpiabi._get_mpiabi() if "mpi4py.MPI" in _mpiabi._registry else None
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None


def _prints_error() -> bool:
    """Return False on the ranks that leave the error to rank 0, before MPI has started."""
    for _, variable, rank in LAUNCHERS:
        size, number = os.environ.get(variable, ""), os.environ.get(rank, "")
        if size.isdecimal() and number.isdecimal():
            return not 0 < int(number) < int(size)
    return True


def _abort_with_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback and end the job. (The excepthook: plain Python would leave the other ranks waiting.)"""
    from minipar.comm.mpi import MPI, abort

    text = "".join(traceback.format_exception(kind, error, trace))
    if MPI.Is_finalized():  # an error while this rank ends: too late to end the others, which end by themselves
        sys.stderr.write(text)
        return
    sys.stderr.write(f"rank {MPI.COMM_WORLD.Get_rank()}:\n{text}")
    abort(1)


def _print_error(error: UsageError) -> None:
    sys.stdout.flush()
    print(error_line(error), file=sys.stderr, flush=True)


def _everyone_fails(comm: Communicator) -> bool:
    """Meet the other ranks that end with an error, in a barrier. Return False if some have not come in time."""
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
