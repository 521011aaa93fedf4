"""Refusals of what a program gives to communicators and meshes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from minipar.errors import UsageError


def check_array(label: str, op: str, x: Any) -> None:
    """Raise UsageError unless x is an array of values, which a collective can send and change in place."""
    if hasattr(x, "grad"):
        raise UsageError(f"{label}, {op} of a {type(x).__name__}: give its array, x.data")
    if not hasattr(x, "strides") or isinstance(x, np.generic):
        remedy = "give an array of the same shape and dtype on every rank, such as np.array([value], dtype=float)"
        raise UsageError(f"{label}, {op} of a {type(x).__name__}: {remedy}")
    if getattr(x.dtype, "kind", "") in ("O", "S", "U"):
        raise UsageError(f"{label}, {op} of an array of {x.dtype}: expected values that can be added")


def check_mesh(comm: Any, sizes: Mapping[str, Any]) -> None:
    """Raise UsageError unless a mesh is made of a communicator and whole sizes of axes."""
    if not hasattr(comm, "ranks"):
        raise UsageError(f"DeviceMesh of a {type(comm).__name__}: give world, as main(world) gets it")
    for axis, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            form = "DeviceMesh(world, dp=2, tp=2)"
            raise UsageError(f"{axis} = {size!r}: expected an integer for each axis, as in {form}")
