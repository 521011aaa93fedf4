"""Claims about the barrier: no rank returns while any other has not called, whichever comes last."""

import threading

import numpy as np
import pytest
from transports import Done, Wrapped

from minipar.comm import Communicator, communicator, run_local

PATIENCE = 0.02  # seconds; a barrier of threads takes less than a millisecond


class Eager(Wrapped):
    """A transport whose sends are done at once, as MPI's small ones.

    Between threads a send waits for its receiver, so there a rank hears from both sides in each round.
    """

    def isend(self, array, dest, tag, owner):
        super().isend(array, dest, tag, owner)
        return Done()


def returns_early(p, late, patience=PATIENCE) -> bool:
    """Whether any rank returns, within `patience` seconds, from a barrier that rank `late` has not called yet."""
    early, called = threading.Event(), threading.Event()
    found = []

    def program(comm):
        comm = Communicator(Eager(comm.transport))
        if comm.rank == late:
            found.append(early.wait(patience))
            called.set()
        comm.barrier()
        if not called.is_set():
            early.set()

    run_local(p, program)
    return found[0]


@pytest.mark.parametrize("p", range(2, 9))
def test_nobody_returns_while_one_rank_has_not_called(p):
    assert not any(returns_early(p, late) for late in range(p))


def one_round_short(link):
    """The library's barrier without its last round."""
    nothing, distance = link.scratch(0, np.dtype(np.uint8)), 1
    while 2 * distance < link.size:
        right, left = (link.rank + distance) % link.size, (link.rank - distance) % link.size
        yield link.isend(nothing, right), link.irecv(nothing, left)
        distance *= 2


@pytest.mark.parametrize("p", range(2, 9))
def test_a_barrier_that_is_one_round_short_is_seen(p, monkeypatch):
    monkeypatch.setitem(communicator.GENERATORS, ("barrier", "dissemination"), one_round_short)
    assert returns_early(p, late=p - 1, patience=30)
