"""Checkpoints: saved under any layout, resumed under any other.

Each rank writes the elements that it owns, chunk `rank` of every bucket, in every ZeRO stage (in stage 0 the others
have them too), so nothing is written twice and no number travels. Who resumes puts each parameter together again and
takes its own part, in whatever layout (resume.py). On several hosts DIR must be on a file system that they share.

The state is: parameters, AdamW's two means and its step count, and the number of steps done. Nothing else: samples and
dropout masks are counter-based random numbers (Philox) keyed by (seed, step, sample, name), so the seed, which must
agree, and the step are the position in every stream, of every rank, in any layout.

When a run may be killed at any moment: files are written into step-N.partial, synced, the manifest last, and then the
directory is renamed to step-N, which a file system does wholly or not at all. Only then are all but the last two
checkpoints removed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save as serialize

from minipar.backend import to_host
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.optim import AdamW
from minipar.parallel.state import owned_pieces
from minipar.train.config import TrainConfig, flags
from minipar.train.manifest import FILE, FORMAT, KINDS, MANIFEST, STEP, VERSION, checksum

KEPT = 2  # checkpoints in the directory; older ones are removed
PARTIAL = re.compile(STEP.pattern + r"\.partial")


@contextmanager
def agreeing(comm: Communicator, what: str) -> Iterator[None]:
    """Collective: what goes wrong with files inside the block on any rank is every rank's UsageError."""
    error = None
    try:
        yield
    except UsageError as problem:
        error = str(problem)
    except (OSError, SafetensorError) as problem:
        error = f"{what}: rank {comm.rank}: {problem}"
    comm.agree(error and error.encode(errors="backslashreplace").decode())


# ---- saving ----------------------------------------------------------------------------------------------------------


def save(comm: Communicator, directory: str | Path, step: int, optimizer: AdamW, header: dict[str, Any]) -> None:
    """Collective: write DIR/step-N after `step` optimizer steps; UsageError on every rank if one of them cannot.

    `comm` is all ranks of the mesh, `optimizer` this rank's, `header` what the manifest says of the run. Each rank's
    list of pieces is sent to rank 0 as control data; no parameter is sent.
    """
    root = Path(directory)
    partial, place, what = root / f"step-{step:08d}.partial", root / f"step-{step:08d}", f"--save {directory}"
    with agreeing(comm, what):
        if comm.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            if partial.exists():
                raise UsageError(f"{what}: {partial} holds files that are not a checkpoint's; move them away")
            partial.mkdir()
    path = partial / f"rank-{comm.rank:05d}.safetensors"
    file: dict[str, Any] = {}
    with agreeing(comm, what):
        pieces, tensors = _own(optimizer)
        # Not `save_file`: it writes under a name of its own first, which a kill would leave here and nobody would know.
        data = serialize(tensors)
        path.write_bytes(data)
        _sync(path)
        digest = hashlib.sha256(data).hexdigest()
        file = {"name": path.name, "bytes": len(data), "sha256": digest, "pieces": pieces}
    files = comm.gather_bytes(json.dumps(file).encode())
    with agreeing(comm, what):
        if files is not None:
            manifest = {"format": FORMAT, "version": VERSION, "step": step, "optimizer_steps": optimizer.steps}
            manifest |= {**header, "files": [json.loads(each) for each in files]}
            manifest |= {"checksum": checksum(manifest)}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            _sync(partial / MANIFEST)
            _sync(partial)
            os.rename(partial, place)
            _sync(root)
            for _, old in checkpoints(root)[:-KEPT]:
                leftover = old.with_name(f"{old.name}.partial")  # from here on nobody takes it for a checkpoint
                os.rename(old, leftover)
            _remove_leftovers(root)


def _own(optimizer: AdamW) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return what this rank writes: (pieces, tensors by "kind/name"), of the elements that it owns."""
    pieces, tensors = [], {}
    for i, piece, elements in owned_pieces(optimizer.parameters):
        pieces.append(dataclasses.asdict(piece))
        values = (optimizer.parameters[i].data, optimizer.exp_avg[i], optimizer.exp_avg_sq[i])
        for kind, array in zip(KINDS, values, strict=True):
            tensors[f"{kind}/{piece.name}"] = to_host(array.reshape(-1)[elements])
    return pieces, tensors


def told(config: TrainConfig) -> dict[str, Any]:
    """What decides the numbers of a run, by flag, as JSON gives it back."""
    chosen = {"--dtype", "--seed", "--reduction", "--device"}
    values = {flag: value for section, _, flag, value in flags(config) if section != "run" or flag in chosen}
    read: dict[str, Any] = json.loads(json.dumps(values))
    return read


def _sync(path: Path) -> None:
    """To the disk, so that a rename is not there before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- the directory ---------------------------------------------------------------------------------------------------


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of each checkpoint in `root`, oldest first. UsageError for one that is a link or a file."""
    found = []
    for entry in os.scandir(root):
        match = STEP.fullmatch(entry.name)
        if match is not None:
            if not entry.is_dir(follow_symlinks=False):
                raise UsageError(
                    f"{entry.path} is {'a link' if entry.is_symlink() else 'a file'}; expected a directory"
                )
            found.append((int(match[1]), Path(entry.path)))
    return sorted(found)


def _remove_leftovers(root: Path) -> None:
    """What a killed run left, and checkpoints that were renamed to go. Nothing but a checkpoint's own files is removed:
    a directory with anything else in it stays, and so does one that cannot go now: no reason to end a training.
    """
    for entry in list(os.scandir(root)):
        if PARTIAL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            inside = os.listdir(entry.path)
            if all(name == MANIFEST or FILE.fullmatch(name) for name in inside):
                with suppress(OSError):
                    for name in inside:
                        os.unlink(os.path.join(entry.path, name))
                    os.rmdir(entry.path)


def prepare_directory(directory: str, first_step: int) -> None:
    """Make `--save DIR`, for the rank that writes: UsageError if it cannot be written, or holds what a run that starts
    at `first_step` would mix with its own."""
    root = Path(directory)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        probe = root / "step-00000000.partial"  # what a kill leaves of it, the next save removes
        probe.mkdir()
        probe.rmdir()
        newest = max((step for step, _ in checkpoints(root)), default=0)
    except OSError as error:
        raise UsageError(f"--save {directory} cannot be written: {error.strerror}") from None
    if newest > first_step:
        raise UsageError(
            f"--save {directory} holds a checkpoint of step {newest}, but this run starts at step {first_step}: "
            "--resume that one, or save to another directory"
        )
