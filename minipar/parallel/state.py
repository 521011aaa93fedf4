"""The serial model's state, put together from what the ranks own: loops over placements.

Each element of each parameter is owned by exactly one rank: the data-parallel rank that has its
chunk, the tensor-parallel rank that holds it (the first one where several hold it), the pipeline
rank of its stage.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minipar.backend import Array, to_host, xp
from minipar.comm.communicator import Communicator
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter
from minipar.parallel.placement import (
    Shard,
    TensorPlacement,
    attach_placements,
    elements_of,
    placement_of,
)


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a tensor-parallel rank holds: a Shard without its size."""

    dim: int
    groups: int
    rank: int
    ranks: int

    def shard(self, shape: Sequence[int]) -> Shard:
        """Return the Shard of a parameter of this shape."""
        return Shard(self.rank, self.ranks, self.dim, shape[self.dim], self.groups)


@dataclass(frozen=True)
class Piece:
    """Elements start:stop, in row-major order, of a parameter or of the part that `cut` says."""

    name: str
    start: int
    stop: int
    cut: Cut | None  # None: the whole parameter

    @property
    def size(self) -> int:
        return self.stop - self.start

    def to_json(self) -> dict[str, Any]:
        """Return the piece as a checkpoint's manifest lists it."""
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> "Piece":
        """Return the piece of an entry that `to_json` has made."""
        cut = entry["cut"]
        if cut is not None:
            cut = Cut(**cut)
        return Piece(entry["name"], entry["start"], entry["stop"], cut)


def owned_elements(parameter: Parameter) -> range:
    """Return which elements of a local parameter this rank owns, and no other."""
    placement = placement_of(parameter)
    if not isinstance(placement.tp, Shard) and placement.tp.rank > 0:
        return range(0)  # another tensor-parallel rank holds them too
    if placement.dp is None:
        return range(parameter.size)
    if placement.dp.replica > 0:
        return range(0)  # all replicas hold them
    return placement.dp.own


def owned_pieces(parameters: Sequence[Parameter]) -> list[tuple[int, Piece, slice]]:
    """Return what this rank owns: (index in `parameters`, piece, its elements in that parameter).

    `parameters` are what this rank's optimizer holds.
    """
    pieces = []
    for i, p in enumerate(parameters):
        own, held = owned_elements(p), elements_of(p)
        if not own:
            continue
        tp = placement_of(p).tp
        cut = Cut(tp.dim, tp.groups, tp.rank, tp.ranks) if isinstance(tp, Shard) else None
        piece = Piece(placement_of(p).name, own.start, own.stop, cut)
        pieces.append((i, piece, slice(own.start - held.start, own.stop - held.start)))
    return pieces


def local_part(placement: TensorPlacement, whole: Array, elements: range) -> Array:
    """Return these elements, as a 1-D array, of this rank's part of a serial array."""
    part = placement.part(whole) if isinstance(placement, Shard) else whole
    return part.reshape(-1)[elements.start : elements.stop]


def join(shape: tuple[int, ...], pieces: Iterable[tuple[Piece, Array]]) -> Array:
    """Put a serial array of `shape` together from all its pieces and the elements of each."""
    parts: dict[int, np.ndarray] = {}  # by tensor-parallel rank
    shard: Shard | None = None
    for piece, elements in pieces:
        rank, local_shape = 0, shape
        if piece.cut is not None:
            shard = piece.cut.shard(shape)
            rank, local_shape = shard.rank, shard.local_shape(shape)
        if rank not in parts:
            parts[rank] = np.empty(local_shape, elements.dtype)
        parts[rank].reshape(-1)[piece.start : piece.stop] = elements
    if shard is None:
        return parts[0]
    return shard.join([xp.asarray(parts[rank]) for rank in range(shard.ranks)])


def gather_state(
    model: Module,
    parameters: Sequence[Parameter],
    comm: Communicator,
    values: Sequence[Any] | None = None,
) -> dict[str, np.ndarray]:
    """Collect the serial model's parameters by name, as host arrays, on rank 0; others get {}.

    `comm` is the group of ranks that hold the whole model together: the world of a mesh.
    `parameters` are what this rank's optimizer holds. `values` are arrays of the same shapes to
    collect instead, such as complete gradients. All ranks call it. Each element is sent to rank 0 once,
    in one message per rank; the pieces go ahead as control data.
    """
    attach_placements(model)  # a model on one device has none
    own = owned_pieces(parameters)
    if values is None:
        values = [p.data for p in parameters]
    arrays = [to_host(values[i].reshape(-1)[elements]) for i, _, elements in own]
    dtype = str(arrays[0].dtype) if arrays else ""
    header = {
        "dtype": dtype,
        "pieces": [[piece.to_json(), placement_of(parameters[i]).shape] for i, piece, _ in own],
    }
    headers = comm.all_gather_bytes(json.dumps(header).encode())
    if comm.rank > 0:
        if arrays:
            comm.isend(np.concatenate(arrays), 0).wait()
        return {}
    pieces: dict[str, list[tuple[Piece, Array]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, text in enumerate(headers):
        listed = json.loads(text)
        theirs = [Piece.from_json(entry) for entry, _ in listed["pieces"]]
        if rank > 0:
            arrays = receive(comm, rank, theirs, listed["dtype"])
        for piece, array in zip(theirs, arrays, strict=True):
            pieces[piece.name].append((piece, array))
        for entry, shape in listed["pieces"]:
            shapes[entry["name"]] = tuple(shape)
    # The serial model's order; names that this rank's model does not have come last.
    own_names = [placement_of(p).name for p in model.parameters() if p.placement is not None]
    names = dict.fromkeys(name for name in [*own_names, *pieces] if name in pieces)
    return {name: as_host(join(shapes[name], pieces[name])) for name in names}


def receive(comm: Communicator, rank: int, pieces: Sequence[Piece], dtype: str) -> list[np.ndarray]:
    """Receive the elements of these pieces, which `rank` sends in one message."""
    if not pieces:
        return []
    sizes = [piece.size for piece in pieces]
    flat = np.empty(sum(sizes), dtype)
    comm.irecv(flat, rank).wait()
    return np.split(flat, np.cumsum(sizes)[:-1])


def as_host(array: Array) -> np.ndarray:
    """Return a contiguous copy of an array on the host."""
    return np.array(to_host(array), order="C")
