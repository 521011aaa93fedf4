"""Claims about what a pipeline rank has sent: it is freed once it is delivered, and a step ends when all of it is."""

import gc
import weakref

import pytest
from pipeline_cases import execute_rank
from training import Proxy

from minipar.comm import run_local
from minipar.parallel.pipeline.schedules import make

MICROBATCHES = 16


class Message:
    """A message that keeps its array as long as somebody keeps the message, as MPI's do."""

    def __init__(self, work, array) -> None:
        self.work = work
        self.array = array

    def test(self):
        return self.work.test()

    def wait(self):
        return self.work.wait()


class Watched(Proxy):
    """A communicator that notes, at each send, how many of the arrays sent before are still alive."""

    def __init__(self, comm) -> None:
        super().__init__(comm)
        self.sent, self.alive = [], []

    def isend(self, array, dest, tag=0):
        self.alive.append(sum(reference() is not None for reference in self.sent))
        self.sent.append(weakref.ref(array))
        return Message(self.comm.isend(array, dest, tag), array)


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


class Kept(Proxy):
    """A communicator that keeps what it sends."""

    def __init__(self, comm) -> None:
        super().__init__(comm)
        self.messages = []

    def isend(self, array, dest, tag=0):
        self.messages.append(self.comm.isend(array, dest, tag))
        return self.messages[-1]


@pytest.mark.parametrize("p", [2, 3])
def test_a_step_ends_when_all_that_it_sent_is_delivered(p):
    """An array that is freed before would be sent as what its memory holds then."""

    def rank(comm):
        kept = Kept(comm)
        execute_rank(kept, make("1f1b", p, 4), 3)
        return {message.done for message in kept.messages}

    assert run_local(p, rank) == [{True}] * p
