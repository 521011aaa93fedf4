"""The beginning and the end of a program: the world communicator, and failures that end every rank."""

import atexit
import ctypes
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from minipar.backend import prepare_process
from minipar.comm.communicator import Communicator
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
SHARED = Path("/dev/shm")
WATCH_SECONDS = 1.0  # between two looks at the other ranks of this host, while MPI starts
BYTES_OF_HOST, BYTES_OF_RANK = 12_000_000, 5_000_000  # of shared memory, measured with MPICH 5
MEET_SECONDS = 3.0  # how long a rank with a usage error waits for the others to report the same


def launch(main: Callable[[Communicator], Any], threads: int | None = None) -> Any:
    """Run `main(world)` once per rank: the entry point of a script.

    Under `mpirun -n N python script.py` each process is a rank, without mpirun this process is one, and the result of
    this rank is returned. With `threads=n`, n ranks run as threads (`run_local`), and all their results are returned.

    Errors end every rank. UsageError, and MemoryError: one rank prints one line, after a few seconds if not every rank
    raises it, and all exit with code 2. Ctrl-C: one line, code 130. Any other exception: `rank r:` with the traceback,
    code 1. Threads raise their first exception here.
    """
    try:
        if threads is None:
            comm = world()
        elif (started := _started_ranks())[0] > 1:
            raise UsageError(
                f"launch(threads={threads}) runs its ranks in one process, but {started[1]} started {started[0]}; "
                f"leave out threads, or start without {started[1]}"
            )
    except UsageError as error:
        if _prints_error():
            _print_error(error)
        else:
            time.sleep(MEET_SECONDS)  # Open MPI ends all ranks with the first one: rank 0's line must come before
        sys.exit(2)
    if threads is not None:
        return run_local(threads, main)
    code: str | int | None
    try:
        return main(comm)
    except KeyboardInterrupt:
        # mpirun passes Ctrl-C on to every rank. The first one ends them all, without their tracebacks.
        if comm.rank == 0:
            print("minipar: interrupted", file=sys.stderr, flush=True)
        code, everyone = 130, comm.size == 1
    except (UsageError, MemoryError) as error:
        code, everyone = 2, _everyone_fails(comm)
        if comm.rank == 0 or not everyone:
            _print_error(error)
    except SystemExit as leaving:
        code = leaving.code
        everyone = code in (0, None) or _everyone_fails(comm)
        if not everyone:
            print(f"minipar: rank {comm.rank} exits with {code!r}, and not every rank does", file=sys.stderr)
    if not everyone:
        from minipar.comm.mpi import abort

        abort(code if isinstance(code, int) else 1)
    sys.exit(code)  # also where another rank's abort came first: this one's then returns


def main(fn: Callable[[Communicator], object]) -> NoReturn:
    """Run a program with `launch`, then exit with code 0, or with the int that fn returns."""
    result = launch(fn)
    sys.exit(result if isinstance(result, int) else 0)


def world() -> Communicator:
    """Return the communicator of all ranks, those of mpirun or this process alone. Collective; sets up this process.

    From here on an uncaught exception on any rank prints `rank r:` and its traceback and ends the whole job. UsageError
    if a launcher started several ranks but MPI is not installed, has one rank, or is another MPI than mpirun's.
    """
    prepare_process()
    count, launcher, variable = _started_ranks()
    _check_mpi_library()
    try:
        _start_mpi()
        from minipar.comm.mpi import MPI, MPITransport, Notices
    except (ImportError, RuntimeError) as error:
        if count == 1:
            return serial()
        raise UsageError(f"{launcher} started {count} ranks, but MPI cannot be loaded: {error}") from None
    size = MPI.COMM_WORLD.Get_size()
    if count not in (1, size):
        cause = "mpirun and mpi4py's library belong to different MPIs"
        if launcher != "mpirun":
            remedy = f"start with mpirun -n {count} python ..., or unset {variable} to run one process"
            cause = f"{launcher} does not start MPI ranks; {remedy}"
        raise UsageError(f"{launcher} started {count} ranks, but the MPI library sees {size}: {cause}")
    notices = Notices()
    comm = Communicator(MPITransport(MPI.COMM_WORLD, range(size), notices))
    if comm.size > 1:
        sys.excepthook = _abort_with_traceback
        atexit.register(notices.leave)
    atexit.register(comm.engine.close)
    return comm


def _start_mpi() -> None:
    """Initialize MPI, if the program has not. UsageError if this host has too little shared memory for its ranks.

    If another rank of the host has ended, MPI_Init waits for ever. So it runs without Python's lock, and a thread looks
    at the ranks meanwhile and ends this process.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    ranks = int(os.environ.get("MPI_LOCALNRANKS", "1"))  # MPICH's mpirun sets it: the ranks on this host
    if ranks > 1 and SHARED.is_dir():
        system, needed = os.statvfs(SHARED), BYTES_OF_HOST + ranks * BYTES_OF_RANK
        if (free := system.f_bavail * system.f_frsize) < needed:
            raise UsageError(
                f"{SHARED} has {free:,} bytes left, but MPI needs about {needed:,} for {ranks} ranks on a host; "
                "enlarge it (docker run --shm-size=1g)"
            )
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    started = threading.Event()
    threading.Thread(target=_watch, args=(ranks, started), daemon=True).start()
    ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    started.set()
    atexit.register(MPI.Finalize)
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    MPI.COMM_WORLD.Barrier()
    if SHARED.is_dir():  # every rank has mapped the memory: without a name, it is not left behind when a rank dies
        for line in Path("/proc/self/maps").read_text().splitlines():
            if f"{SHARED}/mpich_shm" in line and not line.endswith("(deleted)"):
                Path(line.split()[-1]).unlink(missing_ok=True)


def _watch(ranks: int, started: threading.Event) -> None:
    """End this process, and so the job, if a rank of this host ended before MPI started. The lowest one says so."""
    me, place = (int(os.environ.get(name, "0")) for name in ("PMI_RANK", "MPI_LOCALRANKID"))
    everyone = set(range(me - place, me - place + ranks))
    while ranks > 1 and not started.wait(WATCH_SECONDS):
        alive = _ranks_alive()
        ended = ", ".join(map(str, sorted(everyone - alive))) if alive else ""
        if ended and not started.wait(WATCH_SECONDS if me == min(alive) else 8 * WATCH_SECONDS):
            print(f"minipar: rank {ended} has ended before MPI started", file=sys.stderr, flush=True)
            os._exit(1)


def _ranks_alive() -> set[int]:
    """Return the ranks among the processes that this host's launcher has started. Empty if they cannot be seen."""
    ranks: set[int] = set()
    try:
        launcher = os.getppid()
        while not Path(f"/proc/{launcher}/comm").read_text().startswith("hydra_pmi"):
            launcher = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except (OSError, ValueError):
        return ranks
    for child in children:
        with suppress(OSError):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            ranks |= {int(value.partition(b"=")[2]) for value in variables if value.startswith(b"PMI_RANK=")}
    return ranks


def _started_ranks() -> tuple[int, str, str]:
    """Return the number of ranks that a launcher started, the launcher and the variable; (1, "mpirun", "") for none."""
    rows = [row for row in LAUNCHERS if os.environ.get(row[1])]
    rows = [row for row in rows if row[0] == "mpirun"] or rows  # a job of one rank inside an allocation of many is one
    for _, variable, _ in rows:
        if not (value := os.environ[variable]).isdecimal():
            raise UsageError(f"{variable}={value}: expected a number of ranks; unset it to run one process")
    counts = [(int(os.environ[variable]), launcher, variable) for launcher, variable, _ in rows]
    return max(counts, default=(1, "mpirun", ""))


def _check_mpi_library() -> None:
    """Raise UsageError if mpirun and mpi4py's library differ. MPI itself would abort, and name no cause or remedy."""
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


def _print_error(error: UsageError | MemoryError) -> None:
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
