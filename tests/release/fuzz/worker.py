"""The process in which fuzzed commands run: it has little memory, an alarm, and a list of what it may write.

It reads pickled cases from standard input and answers each with an `Outcome` on standard output. The parent starts one
for each target, and another one if it dies.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, process_time
from typing import Any

SECONDS = float(os.environ.get("MINIPAR_FUZZ_SECONDS", "25"))  # of one case
MEMORY = 2 << 30  # bytes of address space that a case may add to what its command's modules take
FILE_SIZE = 64 << 20  # bytes of a file that a case may write
NOWHERE = os.open(os.devnull, os.O_RDWR)


@dataclass(frozen=True, repr=False)
class Case:
    """A command line, the files around it, and what it may write. All paths are relative to an empty directory.

    files    {path: content}, or instead of a content "fifo", "directory", or "-> TARGET" for a symbolic link
    outputs  the files and directories that the command line names for writing
    """

    argv: tuple[str, ...]
    files: dict[str, bytes | str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    def __repr__(self) -> str:
        files = {path: content[:1000] for path, content in self.files.items()}
        return f"Case({self.argv!r:.2000}, {files}, {self.outputs!r:.500})"


@dataclass
class Outcome:
    """What a case did. `stray` are its actions outside of what it may do; `trace` is an exception's that escaped."""

    code: int | None = None
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    trace: str = ""
    stray: list[str] = field(default_factory=list)


class OutOfTime(BaseException):
    """The alarm. Code under test that catches Exception does not catch it."""


class Alarm:
    """An alarm after SECONDS. A process that computes on a busy machine has until it has computed for so long."""

    def start(self) -> None:
        self.begin = process_time()
        signal.signal(signal.SIGALRM, self.ring)
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS / 5)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def ring(self, *_: Any) -> None:
        computed = process_time() - self.begin
        if computed < SECONDS / 100 or computed > SECONDS:
            self.stop()
            raise OutOfTime


# ---- what a case may write -------------------------------------------------------------------------------------------

CREATES = {"os.mkdir": 0, "os.symlink": 1, "os.link": 1, "os.truncate": 0, "os.chmod": 0, "os.chown": 0, "os.utime": 0}
REMOVES = {"os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "shutil.rmtree": (0,), "shutil.move": (0, 1)}
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """The audit hook. While `outcome` is set, it notes what the running case does outside of `allowed`."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.allowed: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.outcome is None:
            return
        if event in STARTS:
            self.outcome.stray.append(f"{event} {args!r:.200}")
        elif event == "open":
            if isinstance(args[2], int) and args[2] & WRITES:
                self.check(event, args[0])
        elif event in CREATES:
            self.check(event, args[CREATES[event]])
        elif event in REMOVES:
            for place in REMOVES[event]:
                self.check(event, args[place])

    def check(self, event: str, path: Any) -> None:
        """Note a path that is neither an output, nor below one, nor (made, or removed if empty) a directory of one."""
        if isinstance(path, int):
            return  # opened before, and checked then
        name = os.path.abspath(os.fsdecode(path))
        for output in self.allowed:
            if name in (output, f"{output}.partial") or name.startswith(f"{output}/"):
                return
            if event in ("os.mkdir", "os.rmdir") and output.startswith(f"{name}/"):
                return
        assert self.outcome is not None
        self.outcome.stray.append(f"{event} {name!r}")


# ---- one case --------------------------------------------------------------------------------------------------------


def write_files(files: dict[str, bytes | str]) -> None:
    """Make a case's files in the current directory."""
    for path, content in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            Path(path).write_bytes(content)
        elif content == "fifo":
            os.mkfifo(path)
        elif content == "directory":
            Path(path).mkdir()
        else:
            os.symlink(content.removeprefix("-> "), path)


@contextlib.contextmanager
def standard_output() -> Iterator[io.TextIOWrapper]:
    """Replace standard output for a case, strict as a terminal's is."""
    saved = sys.stdout
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    try:
        yield sys.stdout
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.detach()
        sys.stdout = saved


def run(command: Callable[[Sequence[str]], Any], case: Case, watch: Watch) -> Outcome:
    """Run one case in a directory of its own, and return what it did."""
    outcome = Outcome()
    directory = tempfile.mkdtemp(prefix="fuzz-")
    saved = sys.stderr
    sys.stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    try:
        os.chdir(directory)
        write_files(case.files)
        with standard_output() as out:
            watch.allowed = [os.devnull, *(os.path.abspath(path) for path in case.outputs)]
            watch.outcome = outcome
            start = monotonic()
            alarm = Alarm()
            alarm.start()
            try:
                outcome.code = command(list(case.argv)) or 0
            except SystemExit as leaving:
                outcome.code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
            except OutOfTime:
                outcome.trace = f"still running after {SECONDS:g} s:\n{traceback.format_exc(limit=-6)}"
            except BaseException:
                outcome.trace = traceback.format_exc(limit=-6)
            finally:
                alarm.stop()
                watch.outcome = None
            outcome.seconds = monotonic() - start
            outcome.out = out.buffer.getvalue().decode(errors="replace")[:20_000]
        outcome.err = sys.stderr.buffer.getvalue().decode(errors="replace")[:20_000]
    finally:
        sys.stderr = saved
        os.chdir("/")
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


# ---- the process -----------------------------------------------------------------------------------------------------


def train(argv: Sequence[str]) -> Any:
    """Run `minipar.train` on one rank without starting MPI."""
    from minipar.comm import launch
    from minipar.comm.threads import serial
    from minipar.train.__main__ import run

    launch.world = serial
    sys.argv = ["minipar.train", *argv]
    return launch.launch(run)


def read(argv: Sequence[str]) -> Any:
    """Read a file as `visualize COMMAND FILE` does, without drawing it: argv is COMMAND, FILE."""
    from minipar.errors import UsageError
    from visualize import comparison, measurements, mesh, plan, style, timeline

    readers: dict[str, Callable[[str], Any]] = {
        "trace": timeline.read_trace,
        "mesh": lambda path: mesh.mesh_values(mesh.mesh_traffic(timeline.read_trace(path), path)),
        "loss": measurements.read_metrics,
        "memory": lambda path: measurements.read_ledger(path, rank=0),
        "traffic": measurements.read_bench,
        "plan": plan.read_plan,
        "layouts": plan.read_layouts,
        "compare": comparison.read_comparison,
    }
    try:
        readers[argv[0]](argv[1])
    except UsageError as error:
        print(f"visualize: error: {style.printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def compare(argv: Sequence[str]) -> int:
    """Compare two records; that they differ, which is exit code 1, is an end in order."""
    from minipar.compare.differences import main

    code = main(argv)
    return 0 if code == 1 else code


def minipar(argv: Sequence[str]) -> Any:
    """Run the command `minipar`. What its sub-commands do is fuzzed without it."""
    from minipar.__main__ import main

    sys.argv = ["minipar", *argv]
    return main()


def limit_memory() -> None:
    """Limit the address space to MEMORY more than what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve the command `MODULE:FUNCTION` that the command line names, until standard input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for descriptor in (0, 1):
        os.dup2(NOWHERE, descriptor)
    module, _, function = sys.argv[1].partition(":")
    command = getattr(importlib.import_module(module), function)
    watch = Watch()
    warm = pickle.load(requests)
    if warm is not None:  # imports and caches are made by a case that is known to succeed
        run(command, warm, watch)
    limit_memory()
    sys.addaudithook(watch)
    while True:
        try:
            case = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(run(command, case, watch), replies)
        replies.flush()
