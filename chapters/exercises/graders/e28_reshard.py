"""Grader of exercise 28, a checkpoint that is read by another layout."""

import numpy as np

from chapters.exercises.e28_reshard import Cut, Piece
from chapters.exercises.grading import Hint, NotWritten, call, random, require
from minipar.comm import chunk_bounds

PARAMETERS = {
    "a matrix cut by columns": ((6, 8), Cut(1)),
    "a matrix cut by rows": ((8, 6), Cut(0)),
    "a matrix of q, k and v, cut by columns": ((4, 24), Cut(1, 3)),
    "a bias of q, k and v": ((24,), Cut(0, 3)),
    "a LayerNorm's weights": ((7,), Cut(None)),
}
MOVES = (((2, 2), 4), ((2, 2), 2), ((1, 1), 4), ((3, 4), 2), ((2, 8), 1), ((2, 1), 8))  # d, t of the writer; t

ELEMENTS = "a piece has the elements start:stop of the writer's flattened *part*, not of the whole"
STRETCHES = "cut each of the `groups` stretches by itself, for the writer's part and for yours"
SOLVED = "A checkpoint goes to another layout, and each rank reads only the pieces that it needs (section 9.6)."


def part_of(whole, cut, r, t):
    """Return the part of rank r of t."""
    if cut.dim is None:
        return whole
    stretches = np.split(whole, cut.groups, axis=cut.dim)
    return np.concatenate([np.split(stretch, t, axis=cut.dim)[r] for stretch in stretches], axis=cut.dim)


def written(whole, cut, d, t):
    """Return what each rank of dp d x tp t has written, by its piece."""
    files, parts = {}, 1 if cut.dim is None else t
    for rank in range(d * parts):
        flat = part_of(whole, cut, rank % parts, parts).reshape(-1)
        start, stop = chunk_bounds(flat.size, d)[rank // parts]
        files[Piece(f"rank-{rank}", rank % parts, parts, start, stop)] = flat[start:stop]
    return files


class Checkpoint:
    """The pieces of one parameter; it counts what is read."""

    def __init__(self, whole, cut, d, t):
        self.files, self.reads = written(whole, cut, d, t), []

    def read(self, piece):
        require(piece in self.files, f"read({piece}): there is no such piece")
        self.reads.append(piece)
        return self.files[piece].copy()


def grade(solution):
    for (d, before), t in MOVES:
        for number, (name, (shape, cut)) in enumerate(PARAMETERS.items()):
            whole = random(28, number).normal(size=shape).astype(np.float32)
            places = written(np.arange(whole.size).reshape(shape), cut, d, before)
            for r in range(t):
                where = f"{name} {shape}, from dp {d} x tp {before} to rank {r} of tp {t}"
                checkpoint, right = Checkpoint(whole, cut, d, before), part_of(whole, cut, r, t)
                pieces = sorted(checkpoint.files, key=lambda piece: piece.file, reverse=True)
                found = loaded(solution, where, shape, cut, t, r, pieces, checkpoint.read)
                compare(found, right, where, whole, cut, r, t)
                wanted = part_of(np.arange(whole.size).reshape(shape), cut, r, t)
                needed = {piece for piece, own in places.items() if np.isin(own, wanted).any()}
                twice = [piece.file for piece in needed if checkpoint.reads.count(piece) > 1]
                require(not twice, f"{where}: {twice} is read more than once")
                extra = sorted({piece.file for piece in checkpoint.reads} - {piece.file for piece in needed})
                require(
                    not extra,
                    f"{where}: {extra} is read, and the rank needs none of its elements; which elements a piece has is "
                    "known before it is read",
                )
                lost = min(needed, key=lambda piece: piece.file)
                rest = [piece for piece in pieces if piece != lost]
                check_lost(solution, f"{where}, {lost.file} is lost", (shape, cut, t, r, rest, checkpoint.read))


def loaded(solution, where, shape, cut, *rest):
    """Return what load returns. Hint, which says what the case is, if it raises an exception."""
    try:
        return call(solution, solution.load, shape, cut, *rest, where=f"{where}: ")
    except NotWritten:
        raise
    except Hint as error:
        advice = f"Every element is in a piece here: {ELEMENTS}"
        if cut.dim is None:
            advice = "Here dim is None: the writer and you have the whole parameter"
        elif cut.groups > 1:
            advice = f"Every element is in a piece here: {STRETCHES}"
        raise Hint(f"{error}\n{advice}") from None


def compare(found, right, where, whole, cut, r, t):
    """Raise a Hint unless the part is right, bit for bit."""
    require(isinstance(found, np.ndarray), f"{where}: return an array, not {type(found).__name__}")
    require(found.shape == right.shape, f"{where}: the part has the shape {found.shape}, expected {right.shape}")
    require(found.dtype == right.dtype, f"{where}: the elements are {found.dtype}, what was saved is {right.dtype}")
    if np.array_equal(found, right):
        return
    hint = f"wrong elements; {STRETCHES if cut.groups > 1 else ELEMENTS}"
    if cut.groups > 1 and np.array_equal(found, part_of(whole, Cut(cut.dim), r, t)):
        hint = f"this is the {r}-th piece of the whole; take that of each of the {cut.groups} groups"
    elif np.array_equal(np.sort(found, axis=None), np.sort(right, axis=None)):
        hint = "these are the right elements in another order"
    raise Hint(f"{where}: {hint}")


def check_lost(solution, where, arguments):
    """Raise a Hint unless the missing piece is noticed."""
    try:
        solution.load(*arguments)
    except ValueError:
        return
    except Exception as error:
        raise Hint(f"{where}: {type(error).__name__}: {error}; raise a ValueError") from None
    raise Hint(f"{where}: load returned an array; an element of this part is in no piece: raise a ValueError")
