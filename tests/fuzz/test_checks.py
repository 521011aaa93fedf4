"""The checks of a fuzzed case can fail: commands that break each promise on purpose are noticed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fuzz.harness import Worker, fuzz, problems
from fuzz.worker import Case
from hypothesis import strategies as st

ALLOWED = Case(("x",), {"given": b""}, outputs=("out", "new/out"))


def fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def raises(argv: Sequence[str]) -> int:
    raise KeyError(argv)


def sleeps(argv: Sequence[str]) -> int:
    time.sleep(60)
    return 0


def computes(argv: Sequence[str]) -> int:
    while True:
        pass


def waits_for_a_pipe(argv: Sequence[str]) -> int:
    os.mkfifo("out")
    return len(Path("out").read_bytes())


def allocates(argv: Sequence[str]) -> int:
    return len(bytearray(3 << 30))


def allocates_bit_by_bit(argv: Sequence[str]) -> int:
    held = []
    while True:
        held.append(np.empty(512 << 20, np.uint8))


def dies(argv: Sequence[str]) -> int:
    return ctypes.string_at(0)[0]


def writes(*paths: str) -> int:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("x")
    return 0


BROKEN = {
    "an exception": (raises, "KeyError"),
    "exit code 1": (lambda argv: 1, "exit code 1"),
    "no line": (lambda argv: 2, "not one line"),
    "two lines": (lambda argv: fail("minipar: error: a\nb"), "not one line"),
    "a terminal escape": (lambda argv: fail("minipar: error: \x1b[31m"), "not one line"),
    "another line": (lambda argv: fail("usage: x"), "not one line"),
    "a warning": (lambda argv: fail("warning") - 2, "on standard error"),
    "a sleep": (sleeps, "still running after 1 s"),
    "a loop": (computes, "still running after 1 s"),
    "a pipe": (waits_for_a_pipe, "still running after 1 s"),
    "3 GB at once": (allocates, "MemoryError"),
    "512 MB again and again": (allocates_bit_by_bit, "MemoryError"),
    "a segmentation fault": (dies, "the process died"),
    "a file beside the outputs": (lambda argv: writes("other"), "open"),
    "a changed input": (lambda argv: writes("given"), "open"),
    "a file above": (lambda argv: writes("out/../../other"), "open"),
    "a file of a longer name": (lambda argv: writes("out.txt"), "open"),
    "a directory": (lambda argv: os.mkdir("other"), "os.mkdir"),
    "a removed input": (lambda argv: os.remove("given"), "os.remove"),
    "a renamed input": (lambda argv: os.rename("given", "out"), "os.rename"),
    "a link": (lambda argv: os.symlink("given", "other"), "os.symlink"),
    "a program": (lambda argv: subprocess.run(["true"]).returncode, "subprocess.Popen"),
}


def broken(argv: Sequence[str]) -> int:
    return BROKEN[argv[0]][0](argv) or 0


@pytest.fixture(scope="module")
def worker():
    with Worker("fuzz.test_checks:broken", seconds=1) as worker:
        yield worker


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_noticed(name, worker):
    case = Case((name, *ALLOWED.argv), ALLOWED.files, ALLOWED.outputs)
    found = problems(case, worker.outcome(case))
    assert any(BROKEN[name][1] in each for each in found), found


def kept(argv: Sequence[str]) -> int:
    """Do all that is allowed, and fail as one should if the word is "fail"."""
    if argv[0] == "fail":
        return fail("minipar: error: no such thing")
    print(argv[0])
    return writes("out", "new/out")


def test_what_is_allowed_is_no_problem():
    with Worker("fuzz.test_checks:kept", seconds=10) as worker:
        for word in ("fail", "write"):
            case = Case((word,), ALLOWED.files, ALLOWED.outputs)
            assert problems(case, worker.outcome(case)) == []
        for stdout in ("full", "closed"):
            case = Case(("write",), ALLOWED.files, ALLOWED.outputs, stdout)
            assert any("OSError" in each or "BrokenPipe" in each for each in problems(case, worker.outcome(case)))


def picky(argv: Sequence[str]) -> int:
    raise ValueError if len(argv[0]) > 3 else SystemExit(0)


def test_the_smallest_failing_case_is_shown_with_its_seed():
    words = st.text("ab", max_size=20).map(lambda word: Case((word,)))
    with pytest.raises(AssertionError, match="again: make fuzz SEED=") as caught:
        fuzz("fuzz.test_checks:picky", words, share=0.1)
    assert "aaaa" in "".join(caught.value.__notes__) and "aaaaa" not in "".join(caught.value.__notes__)
