"""Start MPI: the ranks meet, the shared memory of each host is checked once, and nothing is left behind.

MPI_Init waits for ever for a rank that has ended, and what it has made by then stays: shared memory
and a file. So the ranks of a host meet before, over mpirun's connection, and a program that fails
in its imports fails while MPI has nothing yet. Ranks of several hosts do not meet. There the ranks
that are left remove what they have made.
"""

import atexit
import ctypes
import os
import sys
import threading
from pathlib import Path

from minipar.errors import UsageError, error_line
from minipar.robust_start import mpirun
from minipar.robust_start.watch import host_of_each_rank, ranks_and_those_here, watch

SHARED = Path("/dev/shm")
MEMORY = "mpich_shm_"  # how the names of MPICH's files in it begin
TOPOLOGY = "/tmp/hydra_hwloc_xmlfile_"  # how the name of the file begins in which mpirun describes the processors
BYTES_OF_RANK = 1_065_000  # a rank takes at most so much shared memory, measured with MPICH 5 on 1 to 32 ranks


def start_mpi(timeout: float) -> None:
    """Initialize MPI, if the program has not.

    After `timeout` seconds, or if a rank ends before, the job ends.

    With MPICH's mpirun, too little shared memory on a host is one line, and code 2.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    hydra = mpirun.connected()
    if hydra:
        # Between the ranks of a host MPICH sends through memory of its own. UCX, its library for
        # the network, takes another 4.3 MB for each rank from the same place: 8 ranks would not
        # start in the 64 MiB of a Docker container.
        os.environ.setdefault("UCX_TLS", "^posix")
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    started = threading.Event()
    watching = (host_of_each_rank(), timeout, started, remove_shared_memory)
    threading.Thread(target=watch, args=watching, daemon=True).start()
    if hydra:
        if os.environ.get("MPI_LOCALRANKID") == "0":
            prepare_host()
        ranks, here = ranks_and_those_here()
        if ranks == here:  # between hosts, mpirun would lose addresses that MPI stores after the first meeting
            mpirun.meet()
    # Through ctypes, and not mpi4py, it runs without Python's lock, which the thread needs.
    ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    started.set()
    atexit.register(MPI.Finalize)
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    MPI.COMM_WORLD.Barrier()
    remove_shared_memory()  # every rank has mapped it: without a name, it is not left behind when a rank dies


def prepare_host() -> None:
    """Do what one rank of each host has to do before MPI starts on any.

    Ends the job if there is too little memory.
    """
    # mpirun makes this file when it is first asked for its name, and leaves it if the job is
    # aborted. Without the file each rank looks at the processors itself.
    topology = mpirun.value_of("PMI_hwloc_xmlfile")
    if topology.startswith(TOPOLOGY):
        Path(topology).unlink(missing_ok=True)
    try:
        check_shared_memory()
    except UsageError as error:
        print(error_line(error), file=sys.stderr)
        mpirun.end_job(2)
        os._exit(2)


def check_shared_memory() -> None:
    """Raise UsageError if this host has too little shared memory for its ranks.

    None of them may have taken theirs.
    """
    if not SHARED.is_dir():
        return
    if not os.access(SHARED, os.W_OK):
        raise UsageError(f"{SHARED} cannot be written, where MPI shares memory between the ranks of a host")
    _, here = ranks_and_those_here()
    system = os.statvfs(SHARED)
    needed, free = here * BYTES_OF_RANK, system.f_bavail * system.f_frsize
    if free >= needed:
        return
    kept = sum(file.stat().st_size for file in SHARED.glob(f"{MEMORY}*"))
    remedy = "enlarge it (docker run --shm-size=1g), or start fewer ranks"
    if kept > 0:
        remedy = f"{SHARED}/{MEMORY}* of jobs that were killed hold {kept:,}: remove them when no job runs"
    raise UsageError(f"{SHARED} has {free:,} bytes left, but MPI needs about {needed:,} for {here} ranks; {remedy}")


def remove_shared_memory() -> None:
    """Remove the names of MPICH's shared memory that this process has mapped.

    The memory goes with its last process.
    """
    if not SHARED.is_dir():
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{SHARED}/{MEMORY}" in line and not line.endswith("(deleted)"):
            Path(line.split()[-1]).unlink(missing_ok=True)
