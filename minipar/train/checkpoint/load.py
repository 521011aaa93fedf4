"""Loading a checkpoint: its files are checked, then the serial model's arrays are joined from their pieces."""

import hashlib
import json
import math
import os
import re
import stat
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from minipar.backend import Array, from_host, to_host
from minipar.errors import UsageError
from minipar.nn.optim import AdamW
from minipar.parallel.placement import Shard, elements_of, placement_of
from minipar.parallel.state import join, local_part

FORMAT, VERSION = "minipar checkpoint", 1
KINDS = ("parameter", "exp_avg", "exp_avg_sq")  # the arrays of each parameter
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})")
FILE = re.compile(r"rank-\d{5,}\.safetensors")
_DTYPES = {"float32": "F32", "float64": "F64"}  # safetensors' names

# The content of a manifest: a dict has exactly these keys, and every item of a list looks like the one item here. A
# piece's `cut` is None or the _CUT of a tensor-parallel rank's part. `parameters` are shapes by name.
_CUT = {"dim": int, "groups": int, "rank": int, "ranks": int}
_PIECE = {"name": str, "start": int, "stop": int, "cut": object}
_ENTRY = {"name": str, "bytes": int, "sha256": str, "pieces": [_PIECE]}
_CONTENT: dict[str, Any] = {
    "format": str,
    "version": int,
    "step": int,
    "optimizer_steps": int,
    "dtype": str,
    "data": str,
    "model": {
        **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), int),
        **dict.fromkeys(("layer_norm_epsilon", "initializer_range"), float),
    },
    "parameters": dict,
    "history": [{"step": int, "flags": dict}],
    "files": [_ENTRY],
    "checksum": str,
}


def checksum(manifest: dict[str, Any]) -> str:
    """Compute the SHA-256 of all other entries of a manifest."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def check_content(value: Any, expected: Any, where: str = "") -> None:
    """Check a value from JSON against `expected`: a type, {key: expected} or [expected of each item]. ValueError."""
    if isinstance(expected, dict):
        check_content(value, dict, where)
        for key in sorted(expected.keys() ^ value.keys()):
            problem = "lacks" if key in expected else "has an unknown key"
            raise ValueError(f"{where} {problem} {key!r}".strip())
        for key in expected:
            check_content(value[key], expected[key], f"{where}.{key}".lstrip("."))
    elif isinstance(expected, list):
        check_content(value, list, where)
        for i, item in enumerate(value):
            check_content(item, expected[0], f"{where}[{i}]")
    elif not isinstance(value, (int, float) if expected is float else expected) or isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.60}, expected {expected.__name__}")  # JSON's true is not 1
    elif expected is int and value < 0:
        raise ValueError(f"{where} is {value}, expected a count")


def read_regular(path: Path) -> bytes:
    """Read a regular file. UsageError, which names it, for anything else: a link could lead anywhere."""
    _check_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _check_regular(path: Path) -> os.stat_result:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is {'a link' if stat.S_ISLNK(status.st_mode) else 'not a file'}; expected a file")
    return status


class Checkpoint:
    """A checkpoint to read: `directory`, and `text`, the bytes of its manifest.

    UsageError if the manifest is damaged, not minipar's, or its pieces are not each element of each parameter once.
    Call `check_file` for each of `files` before the first `array`.
    """

    def __init__(self, directory: str | Path, text: bytes) -> None:
        self.directory = Path(directory)
        self.path = self.directory / MANIFEST
        try:
            self.manifest = _parse(text)
            self.step: int = self.manifest["step"]
            self.dtype = np.dtype(self.manifest["dtype"])
            self.files: list[dict[str, Any]] = self.manifest["files"]
            self.history: list[dict[str, Any]] = self.manifest["history"]
            self.shapes = {name: tuple(shape) for name, shape in self.manifest["parameters"].items()}
            self.pieces: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)  # (file, piece) by parameter
            for file in self.files:
                for piece in file["pieces"]:
                    self.pieces[piece["name"]].append((file["name"], piece))
            for name in self.pieces.keys() - self.shapes.keys():
                raise ValueError(f"a piece of {name!r}, which is none of its parameters")
            for name, shape in self.shapes.items():
                _check_pieces(name, shape, [piece for _, piece in self.pieces[name]])
        except ValueError as error:
            raise UsageError(f"{self.path}: {error}") from None

    def check_listing(self) -> None:
        """Raise UsageError if the directory holds a file that the manifest does not name, or lacks one that it does."""
        expected = {MANIFEST, *(file["name"] for file in self.files)}
        try:
            names = set(os.listdir(self.directory))
        except OSError as error:
            raise UsageError(f"{self.directory} cannot be read: {error.strerror}") from None
        for name in sorted(names ^ expected):
            problem = "is not a file of this checkpoint" if name in names else "is missing"
            raise UsageError(f"{self.directory / name} {problem}")

    def check_file(self, file: dict[str, Any]) -> None:
        """Check one of `files` against its manifest entry: size, SHA-256 and pieces. UsageError."""
        path = self.directory / file["name"]
        status = _check_regular(path)
        if status.st_size != file["bytes"]:
            raise UsageError(f"{path} has {status.st_size:,} bytes, but {file['bytes']:,} were written")
        try:
            with open(path, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != file["sha256"]:
                raise UsageError(f"{path}: its SHA-256 is not that of what was written: the file is corrupted")
            with safe_open(path, "np") as opened:
                slices = {key: opened.get_slice(key) for key in opened.keys()}
                tensors = {key: (each.get_dtype(), each.get_shape()) for key, each in slices.items()}
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
        dtype = _DTYPES[self.manifest["dtype"]]
        expected = {f"{k}/{p['name']}": (dtype, [p["stop"] - p["start"]]) for p in file["pieces"] for k in KINDS}
        for key in sorted(tensors.keys() | expected.keys()):
            if tensors.get(key) != expected.get(key):
                raise UsageError(f"{path} does not hold what {MANIFEST} says: {key}")

    def array(self, kind: str, name: str) -> Array:
        """Join the serial model's array for one parameter: its values, or a mean of the optimizer (see KINDS)."""
        pieces = (
            (piece["cut"], piece["start"], piece["stop"], self._tensor(file, f"{kind}/{name}"))
            for file, piece in self.pieces[name]
        )
        return from_host(np.asarray(to_host(join(self.shapes[name], self.dtype, pieces))))

    def _tensor(self, file: str, key: str) -> np.ndarray:
        try:
            with safe_open(self.directory / file, "np") as opened:
                return np.asarray(opened.get_tensor(key))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self.directory / file} cannot be read: {error}") from None


def _parse(text: bytes) -> dict[str, Any]:
    """Parse and check a manifest's text. ValueError."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f'not a checkpoint of minipar: "format" is not "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise ValueError(f"version {manifest.get('version')!r} of the format; this minipar reads {VERSION}")
    if manifest.get("checksum") != checksum(manifest):
        raise ValueError("its checksum does not fit: the manifest was changed after it was written")
    check_content(manifest, _CONTENT)
    for name, shape in manifest["parameters"].items():
        check_content(shape, [int], f"parameters.{name}")
    if not manifest["history"]:
        raise ValueError("history is empty")
    if manifest["dtype"] not in _DTYPES:
        raise ValueError(f"dtype is {manifest['dtype']!r}, expected one of {', '.join(_DTYPES)}")
    names = [file["name"] for file in manifest["files"]]
    for name in names:
        if not FILE.fullmatch(name):  # any other name could lead out of the directory
            raise ValueError(
                f"file name {name!r}: a checkpoint's files lie beside its manifest, as rank-NNNNN.safetensors"
            )
        if names.count(name) > 1:
            raise ValueError(f"file {name} is listed twice")
    return manifest


def _check_pieces(name: str, shape: tuple[int, ...], pieces: list[dict[str, Any]]) -> None:
    """Check that the pieces of a parameter are each of its elements once. ValueError."""
    by_part: dict[int, list[dict[str, Any]]] = defaultdict(list)
    cuts = set()
    for piece in pieces:
        cut = piece["cut"]
        if cut is not None:
            check_content(cut, _CUT, f"{name}: cut")
        cuts.add(None if cut is None else (cut["dim"], cut["groups"], cut["ranks"]))
        by_part[0 if cut is None else cut["rank"]].append(piece)
    if len(cuts) != 1:
        raise ValueError(f"{name} is {'cut in several ways' if cuts else 'in no file'}")
    (cut,) = cuts
    parts, size = 1, math.prod(shape)
    if cut is not None:
        dim, groups, parts = cut
        if dim >= len(shape) or 0 in (groups, parts):
            raise ValueError(f"{name} of shape {shape} cannot be cut along dim {dim} into {groups}*{parts}")
        size = math.prod(Shard(0, parts, dim, shape[dim], groups).local_shape(shape))
    if len(by_part) != parts or max(by_part) >= parts:
        raise ValueError(f"{name} is cut into {parts} parts, but there are pieces of {sorted(by_part)}")
    for part, listed in by_part.items():
        end = 0
        for start, stop in [*sorted((piece["start"], piece["stop"]) for piece in listed), (size, size)]:
            if start != end or stop < start:
                problem = "twice" if start < end else "in no file"
                raise ValueError(f"{name}: elements {min(end, start)}:{max(end, start)} of part {part} are {problem}")
            end = stop


def restore_optimizer(checkpoint: Checkpoint, optimizer: AdamW) -> None:
    """Fill AdamW's means with this rank's elements, one whole array in memory at a time. Sends nothing."""
    optimizer.steps = checkpoint.manifest["optimizer_steps"]
    for kind, means in (("exp_avg", optimizer.exp_avg), ("exp_avg_sq", optimizer.exp_avg_sq)):
        for mean, p in zip(means, optimizer.parameters, strict=True):
            placement = placement_of(p)
            whole = checkpoint.array(kind, placement.name)
            mean.reshape(-1)[...] = local_part(placement.tp, whole, elements_of(p))
