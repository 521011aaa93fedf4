"""The start of MPI under mpirun, and what MPI does not say: a rank that has ended, and too little shared memory."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from pathlib import Path

from minipar.errors import UsageError

SHARED = Path("/dev/shm")
LOOK_SECONDS = 1.0  # between two looks at the other ranks of this host, while MPI starts
BYTES_OF_HOST, BYTES_OF_RANK = 12_000_000, 5_000_000  # of shared memory, measured with MPICH 5


def start_mpi() -> None:
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
    """End this process if one of this host's ranks has ended before MPI has started; the lowest one left says so."""
    me, place = (int(os.environ.get(name, "0")) for name in ("PMI_RANK", "MPI_LOCALRANKID"))
    everyone = set(range(me - place, me - place + ranks))
    while ranks > 1 and not started.wait(LOOK_SECONDS):
        alive = _ranks_alive()
        if alive and (ended := everyone - alive) and not started.wait(LOOK_SECONDS):
            if me == min(alive):
                who = f"rank {', '.join(map(str, sorted(ended)))}"
                print(f"minipar: {who} has ended before MPI started", file=sys.stderr, flush=True)
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
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks |= {int(value.partition(b"=")[2]) for value in variables if value.startswith(b"PMI_RANK=")}
    return ranks
