"""Exercise 12 (chapter 9): the gradient norm over three axes.

The norm of the gradient is the square root of the sum of the squares of all elements of the *model*, each counted
once. On a mesh pp x dp x tp a rank has the summed gradients of its own stage. Replicas along dp have the same. Along
tp a parameter is either divided (each rank has its own elements) or replicated (all have the same). The token
embedding is tied to the output head: its gradient, summed already, is on the first and on the last stage.

You need `mesh.pp`, `mesh.dp` and `mesh.tp`, the communicators of this rank's rows, with `rank` and `size`.
`communicator.all_reduce(array)` replaces the values of a NumPy array by their sums over the row, in place.

Graded on meshes of 1 to 8 ranks: the same value on every rank, that of one device; no gradient travels, a few values
do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minipar.comm import DeviceMesh


@dataclass
class Gradient:
    """A parameter's gradient on this rank."""

    array: np.ndarray
    divided: bool  # along tp; replicated otherwise
    tied: bool  # the token embedding, which the first and the last stage have


def gradient_norm(mesh: DeviceMesh, gradients: Sequence[Gradient]) -> float:
    """Return the norm of the whole model's gradient, on every rank."""
    raise NotImplementedError("your code")
