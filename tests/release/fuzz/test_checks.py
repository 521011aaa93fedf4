"""A fuzzed command that breaks a promise is noticed: an end in order, time, memory, nothing written elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fuzz.harness import Worker, problems
from fuzz.worker import Case

ALLOWED = Case(("x",), {"given": b""}, outputs=("out", "new/out"))


def fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def raises(argv: Sequence[str]) -> int:
    raise KeyError(argv)


def computes(argv: Sequence[str]) -> int:
    while True:
        pass


def waits_for_a_pipe(argv: Sequence[str]) -> int:
    os.mkfifo("out")
    return len(Path("out").read_bytes())


def allocates_bit_by_bit(argv: Sequence[str]) -> int:
    held = []
    while True:
        held.append(np.empty(512 << 20, np.uint8))


def writes(*paths: str) -> int:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("x")
    return 0


BROKEN = {
    "an exception": (raises, "KeyError"),
    "exit code 1": (lambda argv: 1, "exit code 1"),
    "two lines": (lambda argv: fail("minipar: error: a\nb"), "not one line"),
    "a loop": (computes, "still running after 1 s"),
    "a pipe": (waits_for_a_pipe, "still running after 1 s"),
    "512 MB again and again": (allocates_bit_by_bit, "MemoryError"),
    "a file beside the outputs": (lambda argv: writes("other"), "open"),
    "a changed input": (lambda argv: writes("given"), "open"),
    "a removed input": (lambda argv: os.remove("given"), "os.remove"),
    "a program": (lambda argv: subprocess.run(["true"]).returncode, "subprocess.Popen"),
}


def broken(argv: Sequence[str]) -> int:
    if argv[0] == "what is allowed":
        return writes("out", "new/out")
    return BROKEN[argv[0]][0](argv) or 0


@pytest.fixture(scope="module")
def worker():
    with Worker("fuzz.test_checks:broken", seconds=1) as worker:
        yield worker


@pytest.mark.parametrize("name", [*BROKEN, "what is allowed"])
def test_a_broken_promise_is_noticed_and_nothing_else(name, worker):
    case = Case((name, *ALLOWED.argv), ALLOWED.files, ALLOWED.outputs)
    found = problems(case, worker.outcome(case))
    if name in BROKEN:
        assert any(BROKEN[name][1] in each for each in found), found
    else:
        assert found == []
