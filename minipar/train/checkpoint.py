"""Checkpoints: saved under any layout, resumed under any other.

    DIR/step-00000020/
        manifest.json                the step, the run's flags, and for each file its size, SHA-256 and pieces
        rank-00000.safetensors       tensors "parameter/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", each 1-D
        rank-00001.safetensors       ...

A piece is the elements start:stop, in row-major order, of one tensor-parallel rank's part of a
parameter, or of the whole parameter if it is not split. Each rank writes the elements that its
optimizer owns, in every ZeRO stage. Nothing is written twice, and no parameter is sent. A run that
resumes joins each parameter from its pieces and takes its own part, in whatever layout. Several
hosts must share DIR's file system. NB: PyTorch's distributed checkpoints have the same form: a
`.metadata` file lists which chunk of which tensor is in which rank's file.

The state is the parameters, AdamW's two means and its step count. No random state is needed:
samples and dropout masks are counter-based random values (Philox) keyed by (seed, step, sample,
name).

A run may be killed at any moment. Files are written into step-N.partial and synced, the manifest
last. Then the directory is renamed to step-N, which a file system does completely or not at all.
`Checkpoint` needs no communicator.

How a run resumes is in resume.py.
"""

import hashlib
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from minipar.backend import Array, from_host, to_host
from minipar.cli import writing
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.optim import AdamW
from minipar.nn.pretrained import check_header
from minipar.nn.transformer import TransformerConfig
from minipar.parallel.placement import elements_of, placement_of
from minipar.parallel.state import Piece, join, local_part, owned_pieces
from minipar.train.manifest import (
    FORMAT,
    KINDS,
    VERSION,
    check_files,
    check_run,
    checksum,
    model_shape,
    parse,
)  # fmt: skip
from minipar.train.settings import TrainConfig, flags

MANIFEST = "manifest.json"
KEPT = 2  # checkpoints in the directory; older ones are removed
STEP = re.compile(r"step-(\d{8,})")
PARTIAL = re.compile(STEP.pattern + r"\.partial")
FILE = re.compile(r"rank-\d{5,}\.safetensors")


@contextmanager
def agreeing(comm: Communicator, flag: str) -> Iterator[None]:
    """Turn a file error inside the block on any rank into a UsageError on every rank.

    All ranks call it.
    """
    message = None
    try:
        yield
    except UsageError as error:
        message = str(error)
    except (OSError, SafetensorError) as error:
        message = f"{flag}: rank {comm.rank}: {error}"
    comm.agree(message and message.encode(errors="backslashreplace").decode())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise UsageError for a file's error in the block, and for any but a regular file: a link could lead anywhere."""
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is {'a link' if stat.S_ISLNK(mode) else 'not a file'}; expected a file")
        yield
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


class Checkpoint:
    """A checkpoint to read: `directory`, and `text`, the bytes of its manifest.

    UsageError if the manifest is damaged, not minipar's, or not one that `save` writes (see
    manifest.py). Call `check_file` for each of `files` before the first `array`.
    """

    def __init__(self, directory: str | Path, text: bytes) -> None:
        self.directory = Path(directory)
        self.path = self.directory / MANIFEST
        try:
            self.manifest = parse(text)
            self.step: int = self.manifest["step"]
            self.files: list[dict[str, Any]] = self.manifest["files"]
            self.history: list[dict[str, Any]] = self.manifest["history"]
            self.shape: TransformerConfig = model_shape(self.manifest)
            dtype = np.dtype(self.manifest["dtype"])
            self.dtype = np.dtype("float32") if dtype.itemsize == 2 else dtype  # updates have it
            check_files(self.manifest, self.dtype.itemsize)
            defaults = run_flags(TrainConfig())
            self.flags = [defaults | period["flags"] for period in self.history]  # older ones lack some
            check_run(self.manifest, self.shape, self.flags)
        except ValueError as error:
            raise UsageError(f"{self.path}: {error}") from None
        self.shapes = {name: tuple(shape) for name, shape in self.manifest["parameters"].items()}
        self.pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)  # (file, piece) by parameter
        for file in self.files:
            for piece in map(Piece.from_json, file["pieces"]):
                self.pieces[piece.name].append((file["name"], piece))

    def check_file(self, file: dict[str, Any]) -> None:
        """Check one of `files` against its manifest entry: size and SHA-256. UsageError."""
        path = self.directory / file["name"]
        with reading(path), open(path, "rb") as stream:
            size = os.path.getsize(path)
            if size != file["bytes"]:
                raise UsageError(f"{path} has {size:,} bytes, but {file['bytes']:,} were written")
            if hashlib.file_digest(stream, "sha256").hexdigest() != file["sha256"]:
                raise UsageError(f"{path}: its SHA-256 is not that of what was written: the file is corrupted")

    def array(self, kind: str, name: str, dtype: DTypeLike | None = None) -> Array:
        """Join the serial model's array for one parameter: its values, or a mean of the optimizer (see KINDS)."""
        pieces = ((piece, self._tensor(file, f"{kind}/{name}", piece)) for file, piece in self.pieces[name])
        return from_host(np.asarray(to_host(join(self.shapes[name], self.dtype, pieces)), dtype=dtype))

    def _tensor(self, file: str, key: str, piece: Piece) -> np.ndarray:
        path = self.directory / file
        with reading(path):
            check_header(path)
            with safe_open(path, "np") as opened:
                tensor = np.asarray(opened.get_tensor(key))
        if tensor.shape != (piece.size,) or tensor.dtype != self.dtype:
            what = f"{key} is {tensor.dtype} of shape {tensor.shape}"
            raise UsageError(f"{path}: {what}, but the manifest says {piece.size} of {self.dtype}")
        return tensor


def restore_optimizer(checkpoint: Checkpoint, optimizer: AdamW) -> None:
    """Fill AdamW's masters and means with this rank's elements. Sends nothing."""
    optimizer.steps = checkpoint.manifest["optimizer_steps"]
    for kind, arrays in zip(KINDS, (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq), strict=True):
        for array, p in zip(arrays, optimizer.parameters, strict=True):
            if array is not None:  # without a master, the parameter itself has been read
                placement = placement_of(p)
                whole = checkpoint.array(kind, placement.name)
                array.reshape(-1)[...] = local_part(placement.tp, whole, elements_of(p))


def save(comm: Communicator, directory: str | Path, step: int, optimizer: AdamW, header: dict[str, Any]) -> None:
    """Write a checkpoint like `_write`.

    If that fails, as on a full disk, no half-written one is left.
    """
    try:
        _write(comm, directory, step, optimizer, header)
    except UsageError:  # on every rank, when none writes any more
        if comm.rank == 0:
            with suppress(OSError):
                _remove_leftovers(Path(directory))
        raise


def _write(comm: Communicator, directory: str | Path, step: int, optimizer: AdamW, header: dict[str, Any]) -> None:
    """Write DIR/step-N after `step` optimizer steps.

    All ranks call it. UsageError on every rank if one of them cannot. `comm` is all ranks of the mesh,
    `header` the manifest's entries about the run. Only lists of pieces are sent.
    """
    root = Path(directory)
    flag = f"--save {directory}"
    complete = root / f"step-{step:08d}"
    partial = root / f"step-{step:08d}.partial"
    with agreeing(comm, flag):
        if comm.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            if partial.exists():
                raise UsageError(f"{flag}: {partial} holds files that are not a checkpoint's; move them away")
            partial.mkdir()
    path = partial / f"rank-{comm.rank:05d}.safetensors"
    with agreeing(comm, flag):
        owned = owned_pieces(optimizer.parameters)
        state = optimizer.values(), optimizer.exp_avg, optimizer.exp_avg_sq
        tensors = {
            f"{kind}/{piece.name}": to_host(arrays[i].reshape(-1)[elements])
            for i, piece, elements in owned
            for kind, arrays in zip(KINDS, state, strict=True)
        }
        # `save_file` would write under a temporary name first, which nothing removes after a kill.
        data = serialize(tensors)
        path.write_bytes(data)
        _sync(path)
        file: dict[str, Any] = {"name": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        file["pieces"] = [piece.to_json() for _, piece, _ in owned]
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


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk, so that a rename is not on it earlier than the files it names."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """List (step, directory) of the checkpoints in `root`, oldest first.

    UsageError if one is a link or a file.
    """
    complete = [entry for entry in os.scandir(root) if STEP.fullmatch(entry.name)]
    for entry in complete:
        if not entry.is_dir(follow_symlinks=False):
            raise UsageError(f"{entry.path} is a {'link' if entry.is_symlink() else 'file'}; expected a directory")
    return sorted((int(entry.name.removeprefix("step-")), Path(entry.path)) for entry in complete)


def _remove_leftovers(root: Path) -> None:
    """Remove the partial directories of killed runs and of old checkpoints; one with any other file stays."""
    for path in [path for path in root.iterdir() if PARTIAL.fullmatch(path.name) and not path.is_symlink()]:
        with suppress(OSError):  # a training need not end for it
            names = os.listdir(path)
            if all(name == MANIFEST or FILE.fullmatch(name) for name in names):
                for name in names:
                    (path / name).unlink()
                path.rmdir()


def refuse_inside_checkpoint(directory: str) -> None:
    """Raise UsageError if `--save DIR` is a checkpoint or inside one, which would then hold files not its own."""
    root = Path(directory).resolve()
    for folder in (root, *root.parents):
        if STEP.fullmatch(folder.name) or (folder / "rank-00000.safetensors").exists():
            raise UsageError(f"--save {directory}: {folder} is a checkpoint; save to the directory that holds it")


def prepare_directory(directory: str, first_step: int) -> None:
    """Clean up in `--save DIR`, on rank 0.

    UsageError if it cannot be written or has a checkpoint of a later step. The job has DIR's lock
    (see lock.py), so that what is half written there is of a job that has ended.
    """
    root = Path(directory)
    with writing(f"--save {directory}"):
        root.mkdir(parents=True, exist_ok=True)
        newest = max((step for step, _ in checkpoints(root)), default=0)
        if newest > first_step:
            but = f"but this run starts at step {first_step}: --resume that one, or save to another directory"
            raise UsageError(f"--save {directory} holds a checkpoint of step {newest}, {but}")
        _remove_leftovers(root)
        probe = root / "step-00000000.partial"  # if a kill leaves it, the next save removes it
        probe.mkdir()
        probe.rmdir()


def run_flags(config: TrainConfig) -> dict[str, Any]:
    """Return the flags that decide the values of a run, as JSON gives them back."""
    chosen = "--dtype --seed --reduction --device --gradients --reduce-dtype --skip-nonfinite".split()
    values = {flag: value for section, _, flag, value in flags(config) if section != "run" or flag in chosen}
    return dict(json.loads(json.dumps(values)))
