"""The ranks that are alive while MPI starts, read from the processes of each host."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from minipar.robust_start import mpirun

PROXY_NUMBER = r"--proxy-id (\d+)"  # names a host in the command that starts or reaches its ranks
WATCH_SECONDS = 1.0  # between two looks at the other ranks
TURN_SECONDS = 8.0  # a rank has so long to end the job before the next one does
LEAST_TIMEOUT = 20.0  # seconds: MPI takes some to start where many ranks share few cores


def watch(hosts: list[int], timeout: float, started: threading.Event, clean_up: Callable[[], None]) -> None:
    """End the job, with code 1, if a rank ends before `started` is set, or after `timeout` seconds.

    One rank says why.

    `hosts` is what `host_of_each_rank` returns. `clean_up` is called before the end.
    """
    me, begin = int(os.environ.get("PMI_RANK", "0")), time.monotonic()
    timeout = max(timeout, LEAST_TIMEOUT)
    while not started.wait(WATCH_SECONDS):
        alive = ranks_alive(hosts)
        ended = [str(rank) for rank in range(len(hosts)) if rank not in alive]
        if alive and ended:
            first = min(rank for rank in alive if hosts[rank] == hosts[me])
            reason = f"rank {', '.join(ended)} has ended before MPI started"
        elif time.monotonic() - begin > timeout:
            first = 0
            reason = f"MPI has not started within {timeout:g} s (MINIPAR_TIMEOUT): a rank has ended, or comes too late"
        else:
            continue
        # MPI may have started all the same. The ranks take turns, and the first one that can say it
        # ends all.
        if started.wait(WATCH_SECONDS + TURN_SECONDS * (me - first)):
            return
        print(f"minipar: {reason}", file=sys.stderr)
        clean_up()
        mpirun.end_job(1)
        os._exit(1)


def host_of_each_rank() -> list[int]:
    """Return the number of each rank's host. [] if there are several and mpirun's answer cannot be read.

    mpirun answers with blocks of (first host, hosts, ranks on each), or a host alone for one rank:
    `(vector,[(0,2,1)]x2,0)` deals 5 ranks to 2 hosts.
    """
    ranks, here = ranks_and_those_here()
    if ranks == here:
        return [0] * ranks
    proxy = own_proxy()
    if not mpirun.connected() or proxy is None:
        return []
    own = re.search(PROXY_NUMBER, " ".join(proxy.cmdline()))
    if own is None:
        return []
    answer = mpirun.value_of("PMI_process_mapping").partition("(vector")[2]
    answer = re.sub(r"\[(.*?)\]x(\d+)", lambda repeated: f"{repeated[1]}," * int(repeated[2]), answer)
    hosts: list[int] = []
    for first, count, each, alone in re.findall(r"\((\d+),(\d+),(\d+)\)|(\d+)", answer):
        block = range(int(first), int(first) + int(count)) if first else [int(alone)]
        for host in block:
            hosts += [host] * int(each or 1)
    hosts = hosts[:ranks]
    return hosts if hosts.count(int(own[1])) == here else []


def ranks_and_those_here() -> tuple[int, int]:
    """Return the number of ranks, and of those on this host, which MPICH's mpirun has put into the environment."""
    return int(os.environ.get("PMI_SIZE", "1")), int(os.environ.get("MPI_LOCALNRANKS", "1"))


def ranks_alive(hosts: list[int]) -> set[int]:
    """Return the ranks among the processes that mpirun has started here, and the ranks of the other hosts.

    On mpirun's own host each other host has a process (ssh), which ends when all ranks there have
    ended. Empty if the ranks here cannot be seen.
    """
    proxy = own_proxy()
    if proxy is None:
        return set()
    parent = proxy.parent()
    visible = parent is not None and parent.name().startswith("mpi")
    ranks: set[int] = set()
    reached = set() if visible else set(hosts)
    for child in proxy.children() + (parent.children() if parent is not None and visible else []):
        with suppress(psutil.Error):  # it has ended
            reached |= set(map(int, re.findall(PROXY_NUMBER, " ".join(child.cmdline()))))
            ranks.add(int(child.environ().get("PMI_RANK", -1)))
    ranks &= set(range(len(hosts)))
    if not ranks:
        return set()
    reached -= {hosts[rank] for rank in ranks}
    return ranks | {rank for rank, host in enumerate(hosts) if host in reached}


def own_proxy() -> psutil.Process | None:
    """Return the process with which MPICH's mpirun started the ranks of this host."""
    return next((process for process in psutil.Process().parents() if process.name().startswith("hydra_pmi")), None)
