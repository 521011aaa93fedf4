"""Checkpoints: manifests and rank files, changed at random, also with a checksum and digests that fit again."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz.harness import ROOT
from fuzz.strategies import changed, damaged, or_no_file, to_json
from fuzz.test_train import BIN, SHORT, SIZES, TRAIN, tensors
from fuzz.worker import Case
from hypothesis import strategies as st

from minipar.train.manifest import checksum

STEP = "s/step-00000001"
# Always with --steps: a manifest that says 10,000 makes a long training, which is no defect.
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
        return {f"{STEP}/{path.name}": path.read_bytes() for path in Path(directory, STEP).iterdir()}


MANIFEST, RANK = f"{STEP}/manifest.json", f"{STEP}/rank-00000.safetensors"


def signed(manifest: Any) -> bytes:
    """Write a manifest with a checksum that fits, where it can have one."""
    text = to_json(manifest)
    try:
        read = json.loads(text)
        text = to_json(read | {"checksum": checksum(read)})
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass  # not JSON, or not an object
    return text.encode("utf-8", "surrogatepass")


@st.composite
def checkpoints(draw: st.DrawFn) -> Case:
    files: dict[str, bytes | str] = dict(saved())
    kind = draw(st.sampled_from(("signed", "signed", "signed", "forged", "manifest", "tensors", "bytes", "listing")))
    if kind == "signed":
        files[MANIFEST] = signed(draw(changed(json.loads(saved()[MANIFEST]), most=2)))
    elif kind == "forged":
        data = draw(tensors(saved()[RANK]))
        manifest = json.loads(saved()[MANIFEST])
        manifest["files"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        files |= {RANK: data, MANIFEST: signed(manifest)}
    elif kind == "manifest":
        manifest = changed(json.loads(saved()[MANIFEST]))
        values = manifest.map(lambda value: to_json(value).encode("utf-8", "surrogatepass"))
        files[MANIFEST] = draw(or_no_file(values.flatmap(damaged)))
    elif kind == "tensors":
        files[RANK] = draw(tensors(saved()[RANK]))
    elif kind == "bytes":
        path = draw(st.sampled_from((MANIFEST, RANK)))
        files[path] = draw(damaged(saved()[path]))
    else:
        path = draw(
            st.sampled_from((MANIFEST, RANK, f"{STEP}/other", f"{STEP}.partial/manifest.json", "s/step-00000009"))
        )
        files.pop(path, None)
        content = draw(st.sampled_from(("directory", "fifo", "-> /dev/zero", "-> manifest.json", b"", None)))
        files |= {} if content is None else {path: content}
    argv = draw(st.sampled_from((RESUME.argv, ("--resume", STEP, *RESUME.argv[2:]), ("--resume", "s", "--steps", "2"))))
    return Case(argv, files | {"d.bin": BIN})


def test_a_checkpoint_is_resumed_or_refused(fuzzed):
    warm = Case(RESUME.argv, saved() | {"d.bin": BIN})
    count = fuzzed(TRAIN, checkpoints(), share=0.15, warm=warm)
    assert 0 < count.succeeded < count.cases
