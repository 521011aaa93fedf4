"""The judgement of one mutant: the tests of its package run in a copy of the tree that has the mistake."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mutants.first_failure import FILE
from mutants.mutant import Mutant
from mutation import copied_tree, environment, mutated_tree

DEADLINES = 300.0, 1500.0  # seconds, for the first tests and for the others of the package
PATIENCE = 20.0  # seconds in which an interrupted run ends the jobs that it has started
PYTEST = [sys.executable, *"-m pytest -q -x --tb=no -p no:cacheprovider -p mutants.first_failure".split()]
CAUGHT, SURVIVED, TIMED_OUT, BROKEN = "caught", "SURVIVED", "TIMED OUT", "BROKEN"
PASSED = "all tests of its package have passed"
WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the tests need none; to load them takes seconds
RUNNING: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Judgement:
    """The outcome for one mutant: `test` is the name of the first test that failed, or what else happened."""

    package: str
    mutant: Mutant
    outcome: str
    test: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome:<9} {self.seconds:6.1f} s  {self.package:<9} {self.mutant.name}  [{self.test}]"


def judge(package: str, mutant: Mutant, tests: Sequence[str], folder: Path) -> Judgement:
    """Make the copy in `folder`, a directory that is not there yet, and run the tests until one fails."""
    start = time.monotonic()
    tree = mutated_tree(mutant, folder)
    first = [f"tests/{path}" for path in mutant.first]
    every = [f"tests/{path}" for path in tests]
    rest = [*every, *(f"--ignore={path}" for path in first)]
    outcome, test = SURVIVED, PASSED
    for arguments, deadline in zip((first, rest), DEADLINES, strict=True):
        if arguments is rest and set(first) >= set(every):
            continue  # no other test is left
        outcome, test = run_tests(tree, arguments, deadline)
        if outcome != SURVIVED:
            break
    shutil.rmtree(tree, ignore_errors=True)
    return Judgement(package, mutant, outcome, test, time.monotonic() - start)


def run_tests(
    tree: Path, arguments: Sequence[str], deadline: float, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str]:
    """Run pytest in a tree until a test fails; return the outcome, and which test it was or what happened instead.

    `variables` are added to the environment.
    """
    note, log = tree / "first_failure", tree / "log"
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*PYTEST, *arguments],
            cwd=tree,
            env=environment(tree) | WITHOUT_PLUGINS | {FILE: str(note)} | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process)
        try:
            process.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"no test has failed in {deadline:g} s"
        finally:
            end(process)
            RUNNING.discard(process)
    if note.exists():
        return CAUGHT, note.read_text(encoding="utf-8")
    if process.returncode == 0:
        return SURVIVED, PASSED
    if process.returncode < 0:
        return CAUGHT, f"the tests ended with {signal.Signals(-process.returncode).name}"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
    return BROKEN, f"pytest's exit code {process.returncode}: {' / '.join(last)}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run of tests and all that it has started; ranks under mpirun have sessions of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # pytest ends; the launcher of the tests then ends mpirun
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    kill = [(os.kill, pid) for pid in started_by(process.pid)] if process.poll() is None else []
    for function, number in [*kill, (os.killpg, process.pid)]:
        with suppress(ProcessLookupError):
            function(number, signal.SIGKILL)
    process.wait()


def end_all() -> None:
    """End every run of tests that is under way."""
    for process in tuple(RUNNING):
        end(process)


def started_by(pid: int) -> list[int]:
    """Return the processes below a process, as Linux tells them; none elsewhere."""
    below: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            below += map(int, file.read_text().split())
    return below + [each for child in below for each in started_by(child)]


def without_mistakes(tests: Sequence[str], folder: Path) -> list[str]:
    """Run these tests in a copy of the tree as it is; return those that fail there too."""
    tree, left, failed = copied_tree(folder), list(dict.fromkeys(tests)), []
    while left:
        outcome, test = run_tests(tree, left, DEADLINES[1])
        (tree / "first_failure").unlink(missing_ok=True)
        if outcome == SURVIVED:
            break
        failed.append(test)
        if test not in left:  # nothing is known about the others then
            break
        left.remove(test)
    return failed
