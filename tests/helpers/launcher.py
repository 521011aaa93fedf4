"""The one way tests start ranks: mpirun with a deadline, a process group of its own and no standard input.

Run as a program this file is also what each rank starts with: it arms a timer that writes the rank's Python stack to a
file just before the deadline, so that a hang shows where every rank stands, and then runs the real program.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DUMP_BEFORE_DEADLINE = 1.0  # seconds
# Open MPI starts no ranks for root, and no more of them than cores, without these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# What Open MPI's mpirun itself adds to the standard error of a job that failed.
OPEN_MPI_SAYS = re.compile(
    r"^-{60,}\n.*?^-{60,}\n|^\[\S+\] PMIX ERROR: [^\n]*\n|^\[warn\] Epoll [^\n]*\n", re.MULTILINE | re.DOTALL
)
TERMINATE_SECONDS = 3.0  # what mpirun gets to end its ranks before the whole group is killed


@dataclass(frozen=True)
class Result:
    """What a job left."""

    returncode: int
    stdout: str
    stderr: str


class MPITimeout(AssertionError):
    """The job did not end in time; the message has every rank's stack."""


@cache
def mpirun_is_open_mpi() -> bool:
    """Whether the mpirun next to the running interpreter is Open MPI's, and not MPICH's."""
    mpirun = Path(sys.executable).parent / "mpirun"
    return "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout


def run_mpi(
    n: int,
    argv_or_script: Sequence[str] | str,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    before: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Result:
    """Run a Python program on n ranks: `["-m", "module", ...]`, `["script.py", ...]`, or the text of a script.

    The job's working directory is `cwd`. Uses the mpirun next to the running interpreter, with these `options`, and
    with `before` in front of its name. Raises MPITimeout after `timeout` seconds. The standard error of the result is
    that of the ranks, without Open MPI's own words.
    """
    with tempfile.TemporaryDirectory(prefix="minipar-mpi-") as folder:
        if isinstance(argv_or_script, str):
            script = Path(folder) / "script.py"
            script.write_text(argv_or_script, encoding="utf-8")
            argv = [str(script)]
        else:
            argv = list(argv_or_script)
        process = _start(n, argv, folder, timeout, env, cwd, before, options)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            stdout, stderr = _end(process)
            stacks = "".join(
                f"--- rank {file.stem.removeprefix('rank')}\n{file.read_text()}"
                for file in sorted(Path(folder).glob("rank*.stack"))
            )
            raise MPITimeout(
                f"{n} ranks of {' '.join(argv)} did not end within {timeout:g} s\n{stacks}"
                f"--- stdout\n{stdout}\n--- stderr\n{stderr}"
            ) from None
        except BaseException:
            _end(process)
            raise
        return Result(process.returncode, stdout, OPEN_MPI_SAYS.sub("", stderr))


# A command is the whole program, from its arguments to its exit. The commands share MPI and what they import, but not
# what they make NumPy ignore, nor which warnings Python has shown.
RUN_EACH = """
import contextlib, io, json, os, runpy, sys, warnings
import numpy as np
from minipar.comm import world

def outcome(argv):
    program, *sys.argv[1:] = argv
    if program.endswith(".py"):
        sys.path.insert(0, os.path.dirname(program))  # as Python does for a script
    out, err, code = io.StringIO(), io.StringIO(), 0
    to_out, to_err = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with np.errstate(), warnings.catch_warnings(), to_out, to_err:
        try:
            (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
        except SystemExit as leaving:
            code = leaving.code or 0
    return code, out.getvalue(), err.getvalue()

comm = world()
for argv in COMMANDS:
    everyone = comm.all_gather_bytes(json.dumps(outcome(argv)).encode())
    if comm.rank == 0:
        print(json.dumps([json.loads(one) for one in everyone]), flush=True)
"""


def run_each(n: int, commands: Sequence[Sequence[str]], timeout: float = 60.0) -> list[Result]:
    """Run each of these modules or scripts, with its arguments, in one job of n ranks: to start a rank takes longest.

    A result has what all ranks wrote. AssertionError if a command ends the job or not all ranks exit with its code.
    """
    script = f"COMMANDS = {[list(words) for words in commands]!r}\n{RUN_EACH}"
    job = run_mpi(n, script, timeout=timeout)
    results = []
    for line in job.stdout.splitlines():
        codes, outs, errors = zip(*json.loads(line), strict=True)
        assert len(set(codes)) == 1, f"{commands[len(results)]}: the ranks' exit codes are {codes}"
        results.append(Result(codes[0], "".join(outs), "".join(errors)))
    assert len(results) == len(commands), f"{commands[len(results)]} ended the job: {job}"
    return results


def kill_mpi(n: int, argv: Sequence[str], moment: Callable[[], bool], timeout: float = 60.0) -> Result | None:
    """Start a program on n ranks and kill all of them, and mpirun, with SIGKILL as soon as `moment()` is true.

    Returns what the job left if it ended by itself before. Raises MPITimeout if neither happens in `timeout` seconds.
    """
    with _started(n, argv, moment, timeout) as (process, folder):
        if process.poll() is not None:
            return Result(process.returncode, *process.communicate())
        # Each rank is a session of its own, so mpirun's process group is not all of the job.
        for file in folder.glob("rank*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return None


def interrupt_mpi(
    n: int,
    argv: Sequence[str],
    moment: Callable[[], bool],
    timeout: float = 60.0,
    number: int = signal.SIGINT,
    rank: int | None = None,
    times: int = 1,
) -> Result:
    """Start a program on n ranks, press Ctrl-C as soon as `moment()` is true, and return what the job left.

    `number` is another signal, `rank` the one that gets it instead of mpirun, `times` how often, 0.2 s apart.
    """
    with _started(n, argv, moment, timeout) as (process, folder):
        receiver = process.pid if rank is None else int((folder / f"rank{rank}.pid").read_text())
        for i in range(times):
            if i > 0:
                time.sleep(0.2)
            os.kill(receiver, number)
        stdout, stderr = process.communicate(timeout=timeout)
        return Result(process.returncode, stdout, stderr)


@contextlib.contextmanager
def _started(
    n: int, argv: Sequence[str], moment: Callable[[], bool], timeout: float
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A job at its moment, or at its end if that comes first; and the folder with its ranks' process ids."""
    with tempfile.TemporaryDirectory(prefix="minipar-mpi-") as folder:
        process = _start(n, argv, folder, timeout)
        deadline = time.monotonic() + timeout
        try:
            while not moment() and process.poll() is None:
                if time.monotonic() > deadline:
                    raise MPITimeout(f"{n} ranks of {' '.join(argv)}: the moment did not come")
                time.sleep(0.0005)
            yield process, Path(folder)
        finally:
            _end(process)


def _start(
    n: int,
    argv: Sequence[str],
    folder: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    before: Sequence[str] = (),
    options: Sequence[str] = (),
) -> subprocess.Popen[str]:
    python = sys.executable
    dump_at = str(time.monotonic() + timeout - DUMP_BEFORE_DEADLINE)  # a rank may start seconds after mpirun
    mpirun = [*before, str(Path(python).parent / "mpirun"), *options, "-n", str(n)]
    command = [*mpirun, python, __file__, folder, dump_at, *argv]
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | OPEN_MPI | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | (env or {})
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the job's own process group: politely first, so that mpirun cleans up after itself."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            return process.communicate(timeout=TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return process.communicate()


def _run_rank() -> None:
    folder, dump_at, *argv = sys.argv[1:]
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    (Path(folder) / f"rank{rank}.pid").write_text(str(os.getpid()))
    # Kept open for as long as the process lives: the timer writes to its descriptor.
    file = open(Path(folder) / f"rank{rank}.stack", "w", encoding="utf-8")
    faulthandler.dump_traceback_later(max(0.1, float(dump_at) - time.monotonic()), exit=False, file=file)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    _run_rank()
