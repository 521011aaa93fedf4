"""Ranks that must hold the same: a comparison of checksums, which is the same error on every rank."""

import json
import zlib
from collections.abc import Iterable
from itertools import zip_longest

import numpy as np

from minipar.backend import Array, to_host
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.parameter import Parameter
from minipar.parallel.placement import placement_of


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
        for first, other in zip_longest(everyone[0], theirs):
            if first != other:
                name = (first or other)[0]
                raise UsageError(
                    f"{what}: {name} of rank {comm.ranks[rank]} is not that of rank {comm.ranks[0]}; {remedy}"
                )


def check_parameters_alike(
    comm: Communicator, parameters: Iterable[Parameter], what: str, remedy: str
) -> None:
    """Raise UsageError, on every rank, if the ranks of `comm` hold different values in one of these parameters."""
    check_alike(comm, [(placement_of(p).name, p.data) for p in parameters], what, remedy)


def checksum(array: Array) -> int:
    """Return the CRC-32 of an array's shape and values, which are not copied."""
    values = np.ascontiguousarray(to_host(array))
    return zlib.crc32(values.reshape(-1).view(np.uint8).data, zlib.crc32(repr(values.shape).encode()))
