"""Ranks as threads: what each of them is, which messages meet, and how they end when the program is interrupted."""

import threading
import time

import numpy as np
import pytest

from minipar.comm import run_local


def test_a_rank_is_a_thread_that_keeps_no_process_alive():
    def program(comm):
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert run_local(2, program) == [("rank 0", True), ("rank 1", True)]


@pytest.mark.parametrize("tag", [0, 1, 2, 65535])
def test_a_users_message_never_meets_a_collective(tag):
    """They stay apart, whichever comes first and whatever the message's tag is."""

    def program(comm):
        total, received = np.ones(2), np.zeros(2)
        if comm.rank == 0:
            message = comm.isend(np.full(2, 7.0), 1, tag)
            comm.all_reduce(total)
            message.wait()
        else:
            comm.all_reduce(total)
            comm.irecv(received, 0, tag).wait()
        return total.tolist(), received.tolist()

    assert run_local(2, program) == [([2, 2], [0, 0]), ([2, 2], [7, 7])]


def test_after_a_failure_no_rank_sends_on():
    went_on = []

    def program(comm):
        if comm.rank == 0:
            raise ValueError("broken")
        while comm.transport.world.failure is None:
            time.sleep(0.001)
        comm.isend(np.zeros(1), 0)
        went_on.append(comm.rank)

    with pytest.raises(ValueError, match="broken"):
        run_local(2, program)
    assert went_on == []


def test_an_interruption_releases_the_ranks_and_is_raised(monkeypatch):
    """Ctrl-C arrives in the thread that has started the ranks."""
    released = []
    join = threading.Thread.join
    interruptions = [KeyboardInterrupt()]

    def interrupted(thread, timeout=None):
        if interruptions:
            raise interruptions.pop()
        join(thread, timeout)

    def program(comm):
        try:
            if comm.rank == 0:
                comm.irecv(np.zeros(1), 1).wait()
            time.sleep(0.2)
        finally:
            released.append(comm.rank)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_local(2, program)
    assert sorted(released) == [0, 1]
