"""Buckets of a size, as PyTorch fills them (sections 4.4, 4.7)."""

from minipar.comm import Communicator
from minipar.nn import Module, Parameter
from minipar.parallel.buckets import Group


def by_size(model: Module, comm: Communicator, nbytes: int, first: int) -> list[Group]:
    """Group a model's parameters into buckets of `nbytes` or more, filled from the last one on.

    The first bucket that is sent has `first` bytes or more, so that communication starts early (Li et al. 2020).
    """
    groups: list[list[Parameter]] = []
    held = 0
    for p in reversed(model.parameters()):
        if held == 0:
            groups.insert(0, [])
        groups[0].insert(0, p)
        held += p.size * p.dtype.itemsize
        enough = nbytes if len(groups) > 1 else first
        if held >= enough:
            held = 0
    return [(group, comm) for group in groups]
