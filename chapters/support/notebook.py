"""The ranks of a notebook: engines of ipyparallel, which the first cell starts and which end with the kernel.

A kernel that is killed stops nobody. So `python -m chapters.support.notebook PID MODULE` runs a module of ipyparallel
until the process PID has ended: the controller until the kernel has, and each rank until the controller has.
"""

import contextlib
import logging
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
from ipyparallel import Cluster
from ipyparallel.engine.app import IPEngine
from ipyparallel.error import EngineError
from IPython import get_ipython
from IPython.core.error import UsageError
from traitlets.config import Application

START_SECONDS = 300  # a rank needs about five, and more where many share few cores
POLL_SECONDS = 1.0
GRACE_SECONDS = 2.0  # for processes that are being stopped in order
SHARED = "/dev/shm"

_clusters: list[Cluster] = []  # this kernel's, while it runs


def start(n: int) -> Cluster | None:
    """Start n MPI ranks in place of this notebook's older ones; each later cell runs on all of them, until %autopx.

    On a rank this starts nothing and returns None. A first cell that is run again runs on the ranks, too, and each of
    them would start n more.
    """
    if _is_rank():
        return None
    _put_environment_on_path()
    shell = get_ipython()
    if shell is None:
        raise UsageError(f"start is for notebooks; the ranks of a script come from mpirun -n {n} python SCRIPT")
    _stop_ranks()
    print(f"Starting {n} MPI ranks, which takes about ten seconds. Each later cell runs on all of them.", flush=True)
    cluster = Cluster(engines="mpi", log_level=logging.CRITICAL)  # an error below says what mpiexec printed
    _clusters.append(cluster)
    try:
        cluster.start_controller_sync(controller_cmd=_command(os.getpid(), "ipyparallel.controller"))
        cluster.start_engines_sync(n, engine_cmd=_command(cluster.controller.pid, "ipyparallel.engine"))
        client = cluster.connect_client_sync()
        client.wait_for_engines(n, timeout=START_SECONDS, interactive=False)
    except (EngineError, TimeoutError) as error:
        printed = "\n".join(ranks.get_output() for ranks in cluster.engines.values())
        _stop_ranks()
        raise UsageError(f"mpiexec did not start {n} ranks: {error}\n{printed}".rstrip()) from None
    except BaseException:
        _stop_ranks()
        raise
    view = client[:]
    view.block = True
    view.activate()
    shell.run_line_magic("pxconfig", "--progress-after 600")
    shell.run_line_magic("autopx", "")
    return cluster


def _is_rank() -> bool:
    """Tell whether this process is a rank. Rank 0 says what to do."""
    if not Application.initialized():
        return False
    application = Application.instance()
    if not isinstance(application, IPEngine):
        return False
    if application.id == 0:
        print("The ranks run already; this cell starts no others. For new ones, restart the kernel.")
    return True


def _stop_ranks() -> None:
    """Stop the ranks that this kernel has started."""
    while _clusters:
        _clusters.pop().stop_cluster_sync()


def _put_environment_on_path() -> None:
    """Put the directory of this Python on PATH, as `activate` does: mpiexec is there."""
    directory = str(Path(sys.executable).parent)
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if directory not in directories:
        os.environ["PATH"] = os.pathsep.join([directory, *directories])
    if shutil.which("mpiexec") is None:
        raise UsageError(f"no mpiexec in {directory}, nor elsewhere on PATH: pip install mpich")


def _command(pid: int, module: str) -> list[str]:
    """Return the command that runs a module until a process has ended."""
    return [sys.executable, "-m", "chapters.support.notebook", str(pid), module]


def end_with(pid: int) -> None:
    """Wait until a process has ended, then kill what is left of its process group, and this one's."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE and process.is_running():
            time.sleep(POLL_SECONDS)
    time.sleep(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # a controller that is killed leaves its schedulers
    remove_shared_memory()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def remove_shared_memory() -> None:
    """Remove the names of the memory that MPICH shares among ranks: those of killed ranks would stay."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for line in maps.read_text().splitlines():
        if f"{SHARED}/mpich_shm" in line and not line.endswith("(deleted)"):
            Path(line.split()[-1]).unlink(missing_ok=True)


if __name__ == "__main__":
    pid, module = sys.argv[1:3]
    del sys.argv[1:3]
    threading.Thread(target=end_with, args=(int(pid),), daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
