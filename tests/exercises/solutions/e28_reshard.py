import numpy as np


def part_of(whole, cut, r, t):
    if cut.dim is None:
        return whole
    stretches = np.split(whole, cut.groups, axis=cut.dim)
    return np.concatenate([np.split(stretch, t, axis=cut.dim)[r] for stretch in stretches], axis=cut.dim)


def load(shape, cut, t, r, pieces, read):
    places = np.arange(np.prod(shape)).reshape(shape)
    wanted = part_of(places, cut, r, t)
    flat, found = wanted.reshape(-1), {}
    for piece in pieces:
        own = part_of(places, cut, piece.part, piece.parts).reshape(-1)[piece.start : piece.stop]
        if np.isin(own, flat).any():
            found.update(zip(own.tolist(), read(piece), strict=True))
    missing = [place for place in flat.tolist() if place not in found]
    if missing:
        raise ValueError(f"element {missing[0]} is in no piece")
    return np.array([found[place] for place in flat.tolist()]).reshape(wanted.shape)
