"""The beginning and the end of a program: the world communicator, and failures that end every rank."""

import atexit
import ctypes
import importlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import psutil

from minipar.backend import prepare_process
from minipar.comm.communicator import Communicator
from minipar.comm.threads import run_local, serial
from minipar.comm.work import wait_timeout
from minipar.errors import UsageError, error_line

# Launchers, and the variables in which each process finds the number of processes and its own number.
LAUNCHERS = (
    ("mpirun", "PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("mpirun", "PMIX_SIZE", "PMIX_RANK"),
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
PROXY_NUMBER = r"--proxy-id (\d+)"  # that of a host, in the command that starts or reaches its ranks
SHARED = Path("/dev/shm")
WATCH_SECONDS = 1.0  # between two looks at the other ranks, while MPI starts
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
            but = f"{started[1]} started {started[0]}; leave out threads, or start without {started[1]}"
            raise UsageError(f"launch(threads={threads}) runs its ranks in one process, but {but}")
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

    If another rank has ended, MPI_Init waits for ever. So it runs without Python's lock, and a thread looks at the
    ranks meanwhile and ends this process.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    # MPICH's mpirun sets these: the number of ranks, and of those on this host.
    ranks, here = (int(os.environ.get(name, "1")) for name in ("PMI_SIZE", "MPI_LOCALNRANKS"))
    if here > 1 and SHARED.is_dir():
        system, needed = os.statvfs(SHARED), BYTES_OF_HOST + here * BYTES_OF_RANK
        if (free := system.f_bavail * system.f_frsize) < needed:
            but = f"MPI needs about {needed:,} for {here} ranks on a host; enlarge it (docker run --shm-size=1g)"
            raise UsageError(f"{SHARED} has {free:,} bytes left, but {but}")
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    started = threading.Event()
    threading.Thread(target=_watch, args=(_host_of_each_rank(ranks, here), started), daemon=True).start()
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


def _host_of_each_rank(ranks: int, here: int) -> list[int]:
    """Return the number of each rank's host. [] if there are several and this is not MPICH's mpirun.

    mpirun answers over the connection that MPI uses later, with blocks of (first host, hosts, ranks on each), or a host
    alone for one rank: `(vector,[(0,2,1)]x2,0)` deals 5 ranks to 2 hosts.
    """
    if ranks == here:
        return [0] * ranks
    if (proxy := _proxy()) is None or not (own := re.search(PROXY_NUMBER, " ".join(proxy.cmdline()))):
        return []
    with open(int(os.environ["PMI_FD"]), "r+b", buffering=0, closefd=False) as mpirun:
        mpirun.write(b"cmd=get kvsname=any key=PMI_process_mapping\n")
        answer = mpirun.read(1 << 16).decode().partition("(vector")[2]
    answer = re.sub(r"\[(.*?)\]x(\d+)", lambda repeated: f"{repeated[1]}," * int(repeated[2]), answer)
    hosts = []
    for first, count, each, alone in re.findall(r"\((\d+),(\d+),(\d+)\)|(\d+)", answer):
        block = range(int(first), int(first) + int(count)) if first else [int(alone)]
        hosts += [host for host in block for _ in range(int(each or 1))]
    return hosts[:ranks] if hosts[:ranks].count(int(own[1])) == here else []


def _watch(hosts: list[int], started: threading.Event) -> None:
    """End this process, and so the job, if a rank ended before MPI started. The lowest one of this host says so."""
    me, begin = int(os.environ.get("PMI_RANK", "0")), time.monotonic()
    timeout = max(wait_timeout(), 20.0)  # MPI takes seconds to start where many ranks share few cores
    while not started.wait(WATCH_SECONDS):
        alive = _ranks_alive(hosts)
        if alive and (ended := ", ".join(str(rank) for rank in range(len(hosts)) if rank not in alive)):
            first = me == min(rank for rank in alive if hosts[rank] == hosts[me])
            reason = f"rank {ended} has ended before MPI started"
            if started.wait(WATCH_SECONDS if first else 8 * WATCH_SECONDS):
                return
        elif time.monotonic() - begin > timeout:
            reason = f"MPI has not started within {timeout:g} s (MINIPAR_TIMEOUT): a rank has ended, or comes too late"
        else:
            continue
        print(f"minipar: {reason}", file=sys.stderr, flush=True)
        os._exit(1)


def _ranks_alive(hosts: list[int]) -> set[int]:
    """Return the ranks among the processes that mpirun has started here, and the ranks of the other hosts.

    On mpirun's own host each other host has a process (ssh), which ends when all ranks there have ended. Empty if the
    ranks here cannot be seen.
    """
    if (proxy := _proxy()) is None:
        return set()
    mpirun = proxy.parent()
    visible = mpirun is not None and mpirun.name().startswith("mpi")
    ranks, reached = set(), set() if visible else set(hosts)
    for child in proxy.children() + (mpirun.children() if visible else []):
        with suppress(psutil.Error):  # it has ended
            reached |= set(map(int, re.findall(PROXY_NUMBER, " ".join(child.cmdline()))))
            ranks.add(int(child.environ().get("PMI_RANK", -1)))
    ranks &= set(range(len(hosts)))
    reached -= {hosts[rank] for rank in ranks}
    return ranks and ranks | {rank for rank, host in enumerate(hosts) if host in reached}


def _proxy() -> psutil.Process | None:
    """Return the process with which MPICH's mpirun starts the ranks of this host."""
    return next((process for process in psutil.Process().parents() if process.name().startswith("hydra_pmi")), None)


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
        why = "mpirun's variables are set, but mpirun has not started this process"
        raise UsageError(f"PMI_FD={descriptor}: {why}; unset PMI_FD, PMI_RANK and PMI_SIZE") from None
    hydra, open_mpi = "PMI_SIZE" in os.environ, "OMPI_COMM_WORLD_SIZE" in os.environ
    try:
        # mpi4py's wheels choose between libraries and register them here. A build for one library has no choice.
        _mpiabi: Any = importlib.import_module("mpi4py._mpiabi")
        library = _mpiabi._get_mpiabi() if "mpi4py.MPI" in _mpiabi._registry else None
    except (ImportError, AttributeError, RuntimeError, OSError):
        return  # which library `from mpi4py import MPI` loads is not known
    variable = "set the environment variable MPI4PY_MPIABI"
    if library == "mpich" and open_mpi and not hydra:
        remedy = f"{variable}=openmpi, or install Open MPI in an environment of its own"
        raise UsageError(f"mpirun is Open MPI's, but mpi4py loads MPICH: {remedy}")
    if library == "openmpi" and hydra and not open_mpi and "SLURM_STEP_ID" not in os.environ:
        remedy = f"{variable}=mpich, or start with Open MPI's mpirun"
        raise UsageError(f"mpirun is MPICH's, but mpi4py loads Open MPI: {remedy}")


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

    if MPI.Is_finalized():  # an error while this rank ends: too late to end the others, which end by themselves
        return sys.__excepthook__(kind, error, trace)
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(f"rank {MPI.COMM_WORLD.Get_rank()}:\n{text}")
    abort(1)


def _print_error(error: UsageError | MemoryError) -> None:
    sys.stdout.flush()
    print(error_line(error), file=sys.stderr, flush=True)


def _everyone_fails(comm: Communicator) -> bool:
    """Tell the other ranks that this one ends with an error. Return False if some do not say so in time."""
    if comm.size == 1:
        return True
    from minipar.comm.mpi import FAILED

    return comm.transport.notices.send(FAILED, seconds=MEET_SECONDS)
