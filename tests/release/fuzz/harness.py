"""The one check of every fuzzed case, and the loop that makes cases.

A case ends in success, or with exit code 2 and one line. It takes neither 25 s nor unbounded memory, and it writes
nothing but the outputs that its command line names.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from fuzz.worker import SECONDS, Case, Outcome
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import SearchStrategy

ROOT = Path(__file__).parents[3]
CASES = int(os.environ.get("MINIPAR_FUZZ_CASES", "600"))  # over all targets
SEED = int(os.environ.get("MINIPAR_FUZZ_SEED", "1"))
FEWEST = 10  # cases of a target
set_hypothesis_home_dir(ROOT / "out" / "hypothesis")  # its tables of characters
ERROR = re.compile(r"(minipar|visualize): error: .+\n")


class Worker:
    """A child process that runs the cases of one command, given as MODULE:FUNCTION. Another is started if it dies.

    `warm` is a case that succeeds. It runs first, without limits, to import and cache what the command needs.
    """

    def __init__(self, command: str, warm: Case | None = None) -> None:
        self.command, self.warm = command, warm
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> subprocess.Popen[bytes]:
        """Return the running process, started if there is none."""
        if self.process is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
            environment |= {
                "PYTHONPATH": os.pathsep.join(
                    str(ROOT / path) for path in ("", "tests", "tests/helpers", "tests/release")
                ),
                "OPENBLAS_NUM_THREADS": "1",
            }
            command = [sys.executable, "-c", "from fuzz.worker import main; main()", self.command]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
            self._send(self.warm)
        return self.process

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def outcome(self, case: Case) -> Outcome:
        """Run a case. A process that dies, or that not even the alarm can end, is an outcome too."""
        process = self.start()
        assert process.stdout is not None
        try:
            self._send(case)
            slack = 120 + 4 * SECONDS  # a machine may be busy, and a new process imports its modules first
            if not select.select([process.stdout], [], [], slack)[0]:
                self.stop()
                return Outcome(trace=f"still running after {slack:g} s, and the alarm did not end it")
            return pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self.stop()
            return Outcome(trace=f"the process died with exit code {code}")

    def _send(self, value: Case | None) -> None:
        assert self.process is not None and self.process.stdin is not None
        pickle.dump(value, self.process.stdin)
        self.process.stdin.flush()


def problems(case: Case, outcome: Outcome) -> list[str]:
    """Return how an outcome breaks the four promises: an end in order, time, memory, and nothing written elsewhere."""
    wrong = [f"did what its command line does not name: {each}" for each in outcome.stray]
    if outcome.trace:
        return [*wrong, outcome.trace]
    err = outcome.err
    if re.search(r"--met\w*[= ]-( |$)", " ".join(case.argv)):  # --metrics -: progress goes there, before an error
        err = "" if outcome.code == 0 else "".join(err.splitlines(keepends=True)[-1:])
    if outcome.code == 0:
        if err:
            wrong.append(f"exit code 0, but on standard error: {err!r}")
    elif outcome.code != 2:
        wrong.append(f"exit code {outcome.code}: {outcome.err!r}")
    elif not ERROR.fullmatch(err):
        wrong.append(f"exit code 2, but not one line: {outcome.err!r}")
    return wrong


@dataclass
class Count:
    """The cases that a target ran, how many of them succeeded, and the seconds that this took."""

    cases: int = 0
    succeeded: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.cases / max(self.seconds, 1e-9)
        return f"{self.cases:6} cases, {self.succeeded:6} succeeded, {self.seconds:5.0f} s, {rate:5.0f} cases/s"


def fuzz(command: str, cases: SearchStrategy[Case], share: float, warm: Case | None = None) -> Count:
    """Check `share` of all CASES on a command. AssertionError shows the smallest case that breaks a promise."""
    count = Count()
    start = monotonic()
    with Worker(command, warm) as worker:

        @seed(SEED)
        @settings(
            max_examples=max(FEWEST, round(share * CASES)),
            deadline=None,  # the worker has an alarm
            database=None,  # writes nothing; a seed makes the same cases again
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(cases)
        def check(case: Case) -> None:
            outcome = worker.outcome(case)
            count.cases += 1
            count.succeeded += outcome.code == 0
            assert not (wrong := problems(case, outcome)), "\n".join([*wrong, f"again: make fuzz SEED={SEED}"])

        check()
    count.seconds = monotonic() - start
    return count
