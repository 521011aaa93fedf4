"""Checkpoints: arrays and run.json that are cut, damaged, missing, or no files, and runs under other names."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fuzz.harness import ROOT
from fuzz.strategies import damaged
from fuzz.test_train import BIN, SHORT, SIZES, TRAIN
from fuzz.worker import Case
from hypothesis import strategies as st

STEP = "s/step-00000001"
RUN, ARRAY = f"{STEP}/run.json", f"{STEP}/exp_avg/wpe.weight.npy"
HEADER = 128  # bytes of an array's file; what they say is Python, which NumPy reads
RESUME = Case(("--resume", "s", "--steps", "2", "--data", "d.bin"))


@cache
def saved() -> dict[str, bytes]:
    """Return the files of a checkpoint: {path: content}."""
    with TemporaryDirectory() as directory:
        Path(directory, "d.bin").write_bytes(BIN)
        flags = [*SIZES, *SHORT, "--data", "d.bin", "--save", "s"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-m", "minipar.train", *flags],
            cwd=directory,
            env=environment,
            check=True,
            capture_output=True,
        )
        paths = [path for path in Path(directory, STEP).rglob("*") if path.is_file()]
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@st.composite
def checkpoints(draw: st.DrawFn) -> Case:
    files: dict[str, bytes | str] = dict(saved())
    kind = draw(st.sampled_from(("array", "array", "array", "run", "listing")))
    if kind == "array":
        path = draw(st.sampled_from(sorted(set(files) - {RUN})))
        files[path] = saved()[path][:HEADER] + draw(damaged(saved()[path][HEADER:]))
        if draw(st.booleans()):
            files[path] = saved()[path][: draw(st.integers(0, len(saved()[path])))]
    elif kind == "run":  # a value of another kind is not looked for: whoever writes one has made it on purpose
        files[RUN] = saved()[RUN][: draw(st.integers(0, len(saved()[RUN])))]
    else:
        path = draw(st.sampled_from((RUN, ARRAY, f"{STEP}/other", f"{STEP}.partial/run.json", "s/step-00000009")))
        files.pop(path, None)
        content = draw(st.sampled_from(("directory", "-> /dev/zero", "-> run.json", b"", None)))
        files |= {} if content is None else {path: content}
    argv = draw(st.sampled_from((RESUME.argv, ("--resume", STEP, *RESUME.argv[2:]), ("--resume", "s", "--steps", "2"))))
    return Case(argv, files | {"d.bin": BIN})


def test_a_checkpoint_is_resumed_or_refused(fuzzed):
    warm = Case(RESUME.argv, saved() | {"d.bin": BIN})
    count = fuzzed(TRAIN, checkpoints(), share=0.15, warm=warm)
    assert 0 < count.succeeded < count.cases
