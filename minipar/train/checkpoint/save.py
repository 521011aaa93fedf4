"""Saving a checkpoint: the directory, and each rank's file. The format is described in the package's docstring."""

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
from minipar.train.checkpoint.load import FILE, FORMAT, KINDS, MANIFEST, STEP, VERSION, checksum
from minipar.train.config import TrainConfig, flags

KEPT = 2  # checkpoints in the directory; older ones are removed
PARTIAL = re.compile(STEP.pattern + r"\.partial")


@contextmanager
def agreeing(comm: Communicator, flag: str) -> Iterator[None]:
    """Turn a file error inside the block on any rank into a UsageError on every rank. Collective."""
    message = None
    try:
        yield
    except UsageError as error:
        message = str(error)
    except (OSError, SafetensorError) as error:
        message = f"{flag}: rank {comm.rank}: {error}"
    comm.agree(message and message.encode(errors="backslashreplace").decode())


@contextmanager
def writing(what: str, *files: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a UsageError: the flag and its path, and the cause.

    A block that fails leaves none of `files`. Devices and pipes stay.
    """
    try:
        yield
    except (OSError, UsageError) as error:
        for file in files:
            with suppress(OSError):
                if file.is_file():
                    file.unlink()
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{what} cannot be written: {error.strerror or error}") from None


def save(comm: Communicator, directory: str | Path, step: int, optimizer: AdamW, header: dict[str, Any]) -> None:
    """Write DIR/step-N after `step` optimizer steps. Collective; UsageError on every rank if one of them cannot.

    `comm` is all ranks of the mesh, `optimizer` this rank's, and `header` the manifest's entries about the run. Each
    rank's list of pieces is sent to rank 0 as control data; no parameter is sent.
    """
    root, flag = Path(directory), f"--save {directory}"
    complete, partial = root / f"step-{step:08d}", root / f"step-{step:08d}.partial"
    with agreeing(comm, flag):
        if comm.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            if partial.exists():
                raise UsageError(f"{flag}: {partial} holds files that are not a checkpoint's; move them away")
            partial.mkdir()
    path = partial / f"rank-{comm.rank:05d}.safetensors"
    with agreeing(comm, flag):
        pieces, tensors = _owned_tensors(optimizer)
        # `save_file` would write under a temporary name first, which nothing removes after a kill.
        data = serialize(tensors)
        path.write_bytes(data)
        _sync(path)
        digest = hashlib.sha256(data).hexdigest()
        file = {"name": path.name, "bytes": len(data), "sha256": digest, "pieces": pieces}
    files = comm.gather_bytes(json.dumps(file).encode())
    with agreeing(comm, flag):
        if files is not None:
            manifest = {"format": FORMAT, "version": VERSION, "step": step, "optimizer_steps": optimizer.steps}
            manifest |= {**header, "files": [json.loads(text) for text in files]}
            manifest |= {"checksum": checksum(manifest)}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            _sync(partial / MANIFEST)
            _sync(partial)
            os.rename(partial, complete)
            _sync(root)
            for _, old in checkpoints(root)[:-KEPT]:
                os.rename(old, old.with_name(f"{old.name}.partial"))  # from here on it does not count as a checkpoint
            _remove_leftovers(root)


def _owned_tensors(optimizer: AdamW) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the content of this rank's file, of the elements that it owns: (pieces, tensors by "kind/name")."""
    pieces, tensors = [], {}
    for i, piece, elements in owned_pieces(optimizer.parameters):
        pieces.append(dataclasses.asdict(piece))
        values = (optimizer.parameters[i].data, optimizer.exp_avg[i], optimizer.exp_avg_sq[i])
        for kind, array in zip(KINDS, values, strict=True):
            tensors[f"{kind}/{piece.name}"] = to_host(array.reshape(-1)[elements])
    return pieces, tensors


def run_flags(config: TrainConfig) -> dict[str, Any]:
    """Return the flags that decide the values of a run, as JSON gives them back."""
    chosen = {"--dtype", "--seed", "--reduction", "--device"}
    values = {flag: value for section, _, flag, value in flags(config) if section != "run" or flag in chosen}
    return dict(json.loads(json.dumps(values)))


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk, so that a rename is not on it earlier than the files it names."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---- the directory ---------------------------------------------------------------------------------------------------


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """List (step, directory) of the checkpoints in `root`, oldest first. UsageError if one is a link or a file."""
    complete = []
    for entry in os.scandir(root):
        if match := STEP.fullmatch(entry.name):
            if not entry.is_dir(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "a file"
                raise UsageError(f"{entry.path} is {kind}; expected a directory")
            complete.append((int(match[1]), Path(entry.path)))
    return sorted(complete)


def _remove_leftovers(root: Path) -> None:
    """Remove the partial directories of killed runs and of old checkpoints.

    A directory with any other file stays. So does one that cannot be removed, because a training need not end for it.
    """
    for entry in list(os.scandir(root)):
        if not (PARTIAL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)):
            continue
        names = os.listdir(entry.path)
        if all(name == MANIFEST or FILE.fullmatch(name) for name in names):
            with suppress(OSError):
                for name in names:
                    os.unlink(os.path.join(entry.path, name))
                os.rmdir(entry.path)


def prepare_directory(directory: str, first_step: int) -> None:
    """Make `--save DIR`, on rank 0. UsageError if it cannot be written, is a checkpoint or has one of a later step."""
    root = Path(directory)
    for place in (root.resolve(), *root.resolve().parents):
        if STEP.fullmatch(place.name) or (place / "rank-00000.safetensors").exists():
            raise UsageError(f"--save {directory}: {place} is a checkpoint; save to the directory that holds it")
    with writing(f"--save {directory}"):
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        probe = root / "step-00000000.partial"  # if a kill leaves it, the next save removes it
        probe.mkdir()
        probe.rmdir()
        newest = max((step for step, _ in checkpoints(root)), default=0)
    if newest > first_step:
        raise UsageError(
            f"--save {directory} holds a checkpoint of step {newest}, but this run starts at step {first_step}: "
            "--resume that one, or save to another directory"
        )
