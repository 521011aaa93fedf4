"""Exercise 28 (chapter 9): a checkpoint is read by another layout.

A run on dp 2 x tp 2 has saved its parameters, and goes on with tp 4. Each of its ranks has written the elements that it
owns: of the part that tp gave it, the chunk that ZeRO gave it. A `Piece` says which elements these are. Now every new
rank builds its own part from the pieces, and from no more of them than it must: the files lie on a slow disk.

tp cuts a parameter along `dim`, in `groups` equal stretches: each stretch is split into as many equal pieces as there
are ranks of tp, and rank r has the r-th piece of each stretch, joined along `dim`. (The matrix of queries, keys and
values has 3 groups.) The writer cut along the same dim, in the same groups, over another number of ranks. dim None: tp
cuts nothing, and every rank has the whole parameter.

Graded for moves among dp 1 to 3 and tp 1 to 8: the parts, bit for bit; that a piece is read once at most, and only if
the rank needs an element of it; a ValueError if an element of the rank's part is in no piece, before or after the
others are read. (Chapter 6 cuts a part out of a whole parameter.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cut:
    """How tp cuts a parameter."""

    dim: int | None
    groups: int = 1


@dataclass(frozen=True)
class Piece:
    """What one rank wrote: the elements start:stop of its part, flattened row by row."""

    file: str
    part: int  # the writer had part number `part` of `parts`; 0 of 1 if tp cut nothing
    parts: int
    start: int
    stop: int


def load(
    shape: tuple[int, ...], cut: Cut, t: int, r: int, pieces: Sequence[Piece], read: Callable[[Piece], np.ndarray]
) -> np.ndarray:
    """Return the part of a parameter that rank r of t has.

    shape: of the whole parameter; pieces: of this parameter, in any order, and no two have an element in common;
    read(piece) returns a piece's elements, 1-D.
    """
    raise NotImplementedError("your code")
