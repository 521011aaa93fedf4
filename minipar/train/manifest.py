"""A checkpoint as it lies on the disk: a safetensors file from each rank that wrote it, and a manifest that says what
they hold. Nothing here asks a rank: whoever sees the directory can read it.

    step-00000020/
        manifest.json                the step, what the run was told, and for each file its size, SHA-256 and pieces
        rank-00000.safetensors       tensors "parameter/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", each 1-D
        rank-00001.safetensors       ...

A piece is elements start:stop, in row-major order, of one tensor-parallel rank's part of a parameter (of the whole
parameter where it is not cut). NB: PyTorch's distributed checkpoints are the same thing: a `.metadata` file that says
which chunk of which tensor is in which rank's file.
"""

from __future__ import annotations

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
KINDS = ("parameter", "exp_avg", "exp_avg_sq")  # what is kept of each element
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})")
FILE = re.compile(r"rank-\d{5,}\.safetensors")
_DTYPES = {"float32": "F32", "float64": "F64"}  # safetensors' names

# What a manifest looks like: a dict has exactly these keys, a one-element list is a list of such; what is an `object`
# here is checked where it is used.
_PIECE = {"name": str, "start": int, "stop": int, "cut": object}
_CUT = {"dim": int, "groups": int, "rank": int, "ranks": int}
_SCHEMA: dict[str, Any] = {
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
    "files": [{"name": str, "bytes": int, "sha256": str, "pieces": [_PIECE]}],
    "checksum": str,
}


def checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 over everything else in the manifest, so that a flipped bit in it is noticed too."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_regular(path: Path) -> bytes:
    """The bytes of a file that is a file: a link could lead anywhere. UsageError names it."""
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
    """A checkpoint to read: `text` is its manifest, which lies in `directory`.

    UsageError if the manifest is not whole, not minipar's, or its pieces are not each element of each parameter once.
    The files themselves are `check_file`'s matter: call it for each before the first `array`.
    """

    def __init__(self, directory: str | Path, text: bytes) -> None:
        self.directory = Path(directory)
        self.path = self.directory / MANIFEST
        self.manifest = self._parse(text)
        self.step: int = self.manifest["step"]
        self.dtype = np.dtype(self.manifest["dtype"])
        self.files: list[dict[str, Any]] = self.manifest["files"]
        self.history: list[dict[str, Any]] = self.manifest["history"]
        self.shapes = {name: tuple(shape) for name, shape in self.manifest["parameters"].items()}
        self.pieces: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)  # by parameter: (file, piece)
        for file in self.files:
            for piece in file["pieces"]:
                self.pieces[piece["name"]].append((file["name"], piece))
        for name in self.pieces.keys() - self.shapes.keys():
            raise self._refuse(f"a piece of {name!r}, which is none of its parameters")
        for name in self.shapes:
            self._check_pieces(name)
        self._open: dict[str, Any] = {}

    def _refuse(self, what: str) -> UsageError:
        return UsageError(f"{self.path}: {what}")

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            manifest = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._refuse(f"not JSON: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise self._refuse(f'not a checkpoint of minipar: "format" is not "{FORMAT}"')
        if manifest.get("version") != VERSION:
            raise self._refuse(f"version {manifest.get('version')!r} of the format; this minipar reads {VERSION}")
        if manifest.get("checksum") != checksum(manifest):
            raise self._refuse("its checksum does not fit: the manifest was changed after it was written")
        problem = mismatch(manifest, _SCHEMA)
        if problem is None and not manifest["history"]:
            problem = "history is empty"
        if problem is None and manifest["dtype"] not in _DTYPES:
            problem = f"dtype is {manifest['dtype']!r}, expected one of {', '.join(_DTYPES)}"
        for name, shape in manifest["parameters"].items() if problem is None else ():
            problem = problem or mismatch(shape, [int], f"parameters.{name}")
        names = [file["name"] for file in manifest["files"]] if problem is None else []
        for name in names:
            if not FILE.fullmatch(name):  # no other name: so none that leads out of the directory
                problem = f"file name {name!r}: a checkpoint's files lie beside its manifest, as rank-NNNNN.safetensors"
            elif names.count(name) > 1:
                problem = f"file {name} is listed twice"
        if problem is not None:
            raise self._refuse(problem)
        return manifest

    def _check_pieces(self, name: str) -> None:
        """Refuse a parameter whose pieces are not each of its elements once."""
        shape, pieces = self.shapes[name], [piece for _, piece in self.pieces[name]]
        kinds = set()
        by_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for piece in pieces:
            cut = piece["cut"]
            problem = None if cut is None else mismatch(cut, _CUT, f"{name}: cut")
            if problem is not None:
                raise self._refuse(problem)
            kinds.add(None if cut is None else (cut["dim"], cut["groups"], cut["ranks"]))
            by_rank[0 if cut is None else cut["rank"]].append((piece["start"], piece["stop"]))
        if len(kinds) != 1:
            raise self._refuse(f"{name} is {'cut in several ways' if kinds else 'in no file'}")
        (kind,) = kinds
        ranks, size = 1, math.prod(shape)
        if kind is not None:
            dim, groups, ranks = kind
            if not (0 <= dim < len(shape) and groups >= 1 and ranks >= 1):
                raise self._refuse(f"{name} of shape {shape} cannot be cut along dim {dim} into {groups}*{ranks}")
            size = math.prod(Shard(0, ranks, dim, shape[dim], groups).local_shape(shape))
        if ranks > len(pieces) or sorted(by_rank) != list(range(ranks)):
            raise self._refuse(f"{name} is cut into {ranks} parts, but there are pieces of {sorted(by_rank)}")
        for rank, spans in by_rank.items():
            at = 0
            for start, stop in [*sorted(spans), (size, size)]:
                if start != at or stop < start:
                    what = "twice" if start < at else "in no file"
                    raise self._refuse(f"{name}: elements {min(at, start)}:{max(at, start)} of part {rank} are {what}")
                at = stop

    def check_listing(self) -> None:
        """UsageError if the directory holds a file that the manifest does not name, or lacks one that it does."""
        known = {MANIFEST, *(file["name"] for file in self.files)}
        try:
            found = set(os.listdir(self.directory))
        except OSError as error:
            raise UsageError(f"{self.directory} cannot be read: {error.strerror}") from None
        for name in sorted(found ^ known):
            what = "is not a file of this checkpoint" if name in found else "is missing"
            raise UsageError(f"{self.directory / name} {what}")

    def check_file(self, file: dict[str, Any]) -> None:
        """UsageError if one of `files` is missing, a link, of another length or content than when it was written, or
        does not hold the pieces that the manifest says."""
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
                found = {key: (each.get_dtype(), each.get_shape()) for key, each in slices.items()}
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
        kind = _DTYPES[self.manifest["dtype"]]
        wanted = {f"{k}/{p['name']}": (kind, [p["stop"] - p["start"]]) for p in file["pieces"] for k in KINDS}
        if found != wanted:
            different = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
            raise UsageError(f"{path} does not hold what {MANIFEST} says: {different[0]}")

    def array(self, kind: str, name: str) -> Array:
        """Return the serial model's array for one parameter: its values, or a moment of the optimizer (see KINDS)."""
        pieces = (
            (piece["cut"], piece["start"], piece["stop"], self._tensor(file, f"{kind}/{name}"))
            for file, piece in self.pieces[name]
        )
        return from_host(np.asarray(to_host(join(self.shapes[name], self.dtype, pieces))))

    def close(self) -> None:
        """Let go of the files: a network file system cannot remove what is open. A later `array` opens them again."""
        self._open.clear()

    def _tensor(self, file: str, key: str) -> np.ndarray:
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.directory / file, "np")
            return self._open[file].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self.directory / file} cannot be read: {error}") from None


def restore_optimizer(checkpoint: Checkpoint, optimizer: AdamW) -> None:
    """Fill AdamW's moments with this rank's elements; one whole array at a time is in memory. Sends nothing."""
    optimizer.steps = checkpoint.manifest["optimizer_steps"]
    for kind, moments in (("exp_avg", optimizer.exp_avg), ("exp_avg_sq", optimizer.exp_avg_sq)):
        for moment, p in zip(moments, optimizer.parameters, strict=True):
            placement = placement_of(p)
            whole = checkpoint.array(kind, placement.name)
            moment.reshape(-1)[...] = local_part(placement.tp, whole, elements_of(p))


def mismatch(value: Any, schema: Any, where: str = "") -> str | None:
    """Where and how a value from JSON differs from what it should look like, or None."""
    kind = schema if isinstance(schema, type) else type(schema)
    fitting: Any = (int, float) if kind is float else kind
    if not isinstance(value, fitting) or isinstance(value, bool):  # JSON's true is no 1
        return f"{where} is {value!r:.60}, expected {kind.__name__}"
    if kind is int and value < 0:
        return f"{where} is {value}, expected a count"
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(schema, dict):
        for key in sorted(schema.keys() ^ value.keys()):
            return f"{where} {'lacks' if key in schema else 'has an unknown key'} {key!r}".strip()
        inner = [(value[key], schema[key], f"{where}.{key}".lstrip(".")) for key in schema]
    elif isinstance(schema, list):
        inner = [(one, schema[0], f"{where}[{i}]") for i, one in enumerate(value)]
    return next(filter(None, (mismatch(*each) for each in inner)), None)
