"""Refusals of what a program gives to communicators and meshes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minipar.errors import CommunicationError, UsageError


def check_array(label: str, op: str, x: object) -> None:
    """Raise UsageError unless x is an array of values, which a collective can send and change in place."""
    if not isinstance(x, np.ndarray):
        if hasattr(x, "grad"):
            raise UsageError(f"{label}, {op} of a {type(x).__name__}: give its array, x.data")
        if not hasattr(x, "strides") or isinstance(x, np.generic):
            remedy = "give an array of the same shape and dtype on every rank, such as np.array([value], dtype=float)"
            raise UsageError(f"{label}, {op} of a {type(x).__name__}: {remedy}")
    elif x.dtype.kind in "OSU":
        raise UsageError(f"{label}, {op} of an array of {x.dtype}: expected values that can be added")


def check_counts(
    label: str, rank: int, ranks: int, counts: tuple[Sequence[int], Sequence[int]], elements: int
) -> None:
    """Raise CommunicationError unless an all-to-all's counts have an entry for each rank and add up."""
    sends, receives = (list(map(int, each)) for each in counts)
    is_complete = len(sends) == len(receives) == ranks and sends[rank] == receives[rank]
    if not is_complete or min(sends + receives) < 0 or sum(sends) != elements:
        given = f"counts {sends}, {receives} of {elements} elements"
        rule = f"one for each rank, for rank {rank} the same; what is sent adds up to the elements"
        raise CommunicationError(f"{label}, all_to_all: {given}: expected {rule}")


def check_mesh(comm: Any, sizes: Mapping[str, Any]) -> None:
    """Raise UsageError unless a mesh is made of a communicator and whole sizes of axes."""
    if not hasattr(comm, "ranks"):
        raise UsageError(f"DeviceMesh of a {type(comm).__name__}: give world, as main(world) gets it")
    for axis, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            form = "DeviceMesh(world, dp=2, tp=2)"
            raise UsageError(f"{axis} = {size!r}: expected an integer for each axis, as in {form}")
