"""The serial model's state, put together from what the ranks own: loops over placements.

Each element of each parameter is owned by exactly one rank: the data-parallel rank that has its
chunk, the tensor-parallel rank that holds it (the first one where several hold it), the pipeline
rank of its stage.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
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
class Piece:
    """Elements start:stop, in row-major order, of a parameter or of a tensor-parallel rank's part of it."""

    name: str  # name and shape are those of the serial model
    shape: tuple[int, ...]
    start: int
    stop: int
    shard: Shard | None  # None: the whole parameter

    @property
    def size(self) -> int:
        return self.stop - self.start

    @staticmethod
    def from_json(entry: dict[str, Any]) -> "Piece":
        """Return the piece whose `asdict` has been written as JSON."""
        shard = entry["shard"]
        if shard is not None:
            shard = Shard(**shard)
        return Piece(entry["name"], tuple(entry["shape"]), entry["start"], entry["stop"], shard)


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
        placement = placement_of(p)
        shard = placement.tp if isinstance(placement.tp, Shard) else None
        piece = Piece(placement.name, placement.shape, own.start, own.stop, shard)
        pieces.append((i, piece, slice(own.start - held.start, own.stop - held.start)))
    return pieces


def local_part(placement: TensorPlacement, whole: Array, elements: range) -> Array:
    """Return these elements, as a 1-D array, of this rank's part of a serial array."""
    part = placement.part(whole) if isinstance(placement, Shard) else whole
    return part.reshape(-1)[elements.start : elements.stop]


def join(pieces: Sequence[tuple[Piece, np.ndarray]]) -> np.ndarray:
    """Put a serial array together from all its pieces and the elements of each, as a contiguous host array."""
    first, _ = pieces[0]
    shard = first.shard
    shape = first.shape if shard is None else shard.local_shape(first.shape)
    parts: dict[int, np.ndarray] = {}  # by tensor-parallel rank
    for piece, elements in pieces:
        rank = 0 if piece.shard is None else piece.shard.rank
        if rank not in parts:
            parts[rank] = np.empty(shape, elements.dtype)
        parts[rank].reshape(-1)[piece.start : piece.stop] = elements
    if shard is None:
        return parts[0]
    whole = shard.join([xp.asarray(parts[rank]) for rank in range(shard.ranks)])
    return np.array(to_host(whole), order="C")


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
    header = {"dtype": dtype, "pieces": [asdict(piece) for _, piece, _ in own]}
    headers = comm.all_gather_bytes(json.dumps(header).encode())
    if comm.rank > 0:
        if arrays:
            comm.isend(np.concatenate(arrays), 0).wait()
        return {}
    pieces: dict[str, list[tuple[Piece, np.ndarray]]] = defaultdict(list)
    for rank, text in enumerate(headers):
        listed = json.loads(text)
        theirs = [Piece.from_json(entry) for entry in listed["pieces"]]
        if rank > 0:
            arrays = receive(comm, rank, theirs, listed["dtype"])
        for piece, array in zip(theirs, arrays, strict=True):
            pieces[piece.name].append((piece, array))
    # The serial model's order; names that this rank's model does not have come last.
    own_names = [placement_of(p).name for p in model.parameters()]
    names = dict.fromkeys(name for name in [*own_names, *pieces] if name in pieces)
    return {name: join(pieces[name]) for name in names}


def receive(comm: Communicator, rank: int, pieces: Sequence[Piece], dtype: str) -> list[np.ndarray]:
    """Receive the elements of these pieces, which `rank` sends in one message."""
    if not pieces:
        return []
    sizes = [piece.size for piece in pieces]
    flat = np.empty(sum(sizes), dtype)
    comm.irecv(flat, rank).wait()
    return np.split(flat, np.cumsum(sizes)[:-1])
