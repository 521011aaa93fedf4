"""The serial model's state, put together from what the ranks own: loops over placements.

Each element of each parameter is owned by exactly one rank: the data-parallel rank that has its chunk, the
tensor-parallel rank that holds it (rank 0 where all hold it), the pipeline rank of its stage.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import numpy as np

from minipar.backend import Array, to_host, xp
from minipar.comm.communicator import Communicator
from minipar.nn.module import Module, Parameter
from minipar.parallel.placement import Shard, elements_of, placement_of


class Piece(TypedDict):
    """Elements start:stop, in row-major order, of tensor-parallel rank `cut["rank"]`'s part of a parameter.

    A checkpoint's manifest lists these dicts, as JSON.
    """

    name: str
    start: int
    stop: int
    cut: dict[str, int] | None  # dim, groups, rank, ranks; None: the whole parameter


def owned_pieces(parameters: Sequence[Parameter]) -> list[tuple[int, Piece, slice]]:
    """Return what this rank owns: (index in `parameters`, piece, the piece's elements within that parameter).

    `parameters` are what this rank's optimizer holds.
    """
    pieces = []
    for i, p in enumerate(parameters):
        placement, held = placement_of(p), elements_of(p)
        own = range(p.size) if placement.dp is None else placement.dp.own
        copied = not isinstance(placement.tp, Shard) and placement.tp.rank > 0
        if not own or copied or (placement.dp is not None and placement.dp.replica > 0):
            continue
        cut = None
        if isinstance(placement.tp, Shard):
            cut = {key: getattr(placement.tp, key) for key in ("dim", "groups", "rank", "ranks")}
        piece: Piece = {"name": placement.name, "start": own.start, "stop": own.stop, "cut": cut}
        pieces.append((i, piece, slice(own.start - held.start, own.stop - held.start)))
    return pieces


def local_part(placement_tp: Any, whole: Array, elements: range) -> Array:
    """Return these elements, as a 1-D array, of this rank's part of a serial array."""
    part = placement_tp.part(whole) if isinstance(placement_tp, Shard) else whole
    return part.reshape(-1)[elements.start : elements.stop]


def join(shape: tuple[int, ...], dtype: Any, pieces: Iterable[tuple[Piece, Array]]) -> Array:
    """Put a serial array of `shape` together from all its pieces and the elements of each."""
    parts: dict[int, np.ndarray] = {}
    shard: Shard | None = None
    for piece, elements in pieces:
        cut = piece["cut"]
        shard = None if cut is None else Shard(**cut, size=shape[cut["dim"]])
        rank = 0 if shard is None else shard.rank
        if rank not in parts:
            parts[rank] = np.empty(shape if shard is None else shard.local_shape(shape), dtype)
        parts[rank].reshape(-1)[piece["start"] : piece["stop"]] = elements
    if shard is None:
        return parts[0]
    return shard.join([xp.asarray(parts[rank]) for rank in range(shard.ranks)])


def gather_state(
    model: Module, parameters: Sequence[Parameter], comm: Communicator, values: Sequence[Any] | None = None
) -> dict[str, np.ndarray]:
    """Collect the serial model's parameters by name, as host arrays, on rank 0 of `comm`; the other ranks get {}.

    `comm` is the group of ranks that hold the whole model together: the world of a mesh. `parameters` are what this
    rank's optimizer holds. `values` are arrays of the same shapes to collect instead, such as complete gradients.
    Collective. Each element is sent to rank 0 once, in one message per rank; the pieces go ahead as control data.
    """
    own = owned_pieces(parameters)
    values = [p.data for p in parameters] if values is None else values
    arrays = [to_host(values[i].reshape(-1)[elements]) for i, _, elements in own]
    dtype = np.dtype(values[0].dtype if values else np.float32)
    header = [[piece, placement_of(parameters[i]).shape] for i, piece, _ in own]
    headers = comm.gather_bytes(json.dumps(header).encode())
    if headers is None:
        if arrays:
            comm.isend(np.concatenate(arrays), 0).wait()
        return {}
    pieces: dict[str, list[tuple[Piece, Array]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, text in enumerate(headers):
        listed = json.loads(text)
        counts = [piece["stop"] - piece["start"] for piece, _ in listed]
        if rank > 0 and listed:
            flat = np.empty(sum(counts), dtype)
            comm.irecv(flat, rank).wait()
            arrays = np.split(flat, np.cumsum(counts)[:-1])
        for (piece, shape), array in zip(listed, arrays if listed else [], strict=True):
            pieces.setdefault(piece["name"], []).append((piece, array))
            shapes[piece["name"]] = tuple(shape)
    # The serial model's order; names that this rank's model does not have come last.
    own_names = [placement_of(p).name for p in model.parameters() if p.placement is not None]
    names = dict.fromkeys(name for name in [*own_names, *pieces] if name in pieces)
    return {name: np.array(to_host(join(shapes[name], dtype, pieces[name])), order="C") for name in names}
