"""Claims about what a pipeline rank has sent: it is freed once it is delivered, not at the end of the step."""

import gc
import weakref

import pytest
from pipeline_cases import execute_rank
from training import Proxy

from minipar.comm import run_local
from minipar.parallel.pipeline import make

MICROBATCHES = 16


class Watched(Proxy):
    """A communicator that notes, at each send, how many of the arrays sent before are still alive."""

    def __init__(self, comm) -> None:
        super().__init__(comm)
        self.sent, self.alive = [], []

    def isend(self, array, dest, tag=0):
        self.alive.append(sum(reference() is not None for reference in self.sent))
        self.sent.append(weakref.ref(array))
        return self.comm.isend(array, dest, tag)


@pytest.mark.parametrize("p", [2, 3])
def test_a_rank_frees_what_it_sent_once_it_is_delivered(p):
    """In 1F1B a rank sends no further before what it sent p microbatches ago has been used; the graph holds as many."""

    def rank(comm):
        watched = Watched(comm)
        execute_rank(watched, make("1f1b", p, MICROBATCHES), 3)
        return max(watched.alive)

    gc.disable()
    try:
        assert max(run_local(p, rank)) <= 2 * p
    finally:
        gc.enable()
