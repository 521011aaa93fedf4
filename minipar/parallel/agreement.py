"""Ranks that must hold the same: a comparison of checksums, which is the same error on every rank."""

import json
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from minipar.backend import Array, to_host
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError


def check_alike(comm: Communicator, arrays: Iterable[tuple[str, Array]], what: str, remedy: str) -> None:
    """Raise UsageError, on every rank, if the ranks of `comm` hold different values in one of these named arrays.

    It names the first such array, and a rank that has other values than the first rank. Sends a
    checksum of each array, which is not counted.
    """
    if comm.size == 1:
        return
    own = [[name, checksum(array)] for name, array in arrays]
    everyone = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(own).encode())]
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            name = first_difference(theirs, everyone[0])
            ranks = f"{name} of rank {comm.ranks[rank]} is not that of rank {comm.ranks[0]}"
            raise UsageError(f"{what}: {ranks}; {remedy}")


def check_same_batch(comm: Communicator, **arrays: Array) -> None:
    """Raise UsageError, on every rank, if ranks that compute one model together have different batches."""
    what = f"the ranks of {comm.axis} compute one model together, but were given different batches"
    check_alike(comm, arrays.items(), what, "cut the global batch by mesh.dp.rank alone")


def checksum(array: Array) -> int:
    """Return the CRC-32 of an array's values and its shape."""
    values = np.ascontiguousarray(to_host(array))
    return zlib.crc32(values.reshape(-1).view(np.uint8).data, zlib.crc32(repr(values.shape).encode()))


def first_difference(own: Sequence[Sequence[object]], other: Sequence[Sequence[object]]) -> object:
    """Return the name of the first array that differs between two lists of names and checksums."""
    for one, another in zip(own, other, strict=False):
        if one != another:
            return one[0]
    return "the number of arrays"
