"""Ranks that are threads: their values, the first exception, the exits, and deadlocks, which are errors at once."""

import contextvars
import sys
import time
import weakref

import numpy as np
import pytest

import minipar as mp
from minipar.comm import run_local, work
from minipar.comm.threads import ThreadTransport, ThreadWorld
from minipar.errors import CommunicationError, UsageError


def test_run_local_returns_each_ranks_value():
    assert run_local(3, lambda comm, factor: comm.rank * factor, 10) == [0, 10, 20]


def test_ranks_inherit_the_callers_context():
    flag = contextvars.ContextVar("flag", default="default")
    flag.set("set by the caller")
    assert run_local(2, lambda comm: flag.get()) == ["set by the caller"] * 2


# ---- exceptions ------------------------------------------------------------------------------------------------------


def leave_by_exception():
    raise KeyError("broken")


@pytest.mark.parametrize(
    ("leave", "error", "words"),
    [
        (leave_by_exception, KeyError, "broken"),
        (lambda: sys.exit(0), CommunicationError, "rank 2 has returned"),
        (lambda: sys.exit(3), SystemExit, "3"),
        (lambda: None, CommunicationError, "rank 2 has returned"),
    ],
)
def test_a_rank_that_leaves_ends_all_and_is_named(leave, error, words, capsys):
    def program(comm):
        comm.barrier()
        if comm.rank == 2:
            time.sleep(0.05)
            return leave()
        comm.all_reduce(np.ones(1000))
        comm.barrier()

    start = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        run_local(8, program)
    assert time.monotonic() - start < 5
    if error is not CommunicationError:
        assert caught.value.__notes__ == ["on rank 2"]
    assert ("rank 2 exits with 3" in capsys.readouterr().err) == (error is SystemExit)


def test_a_later_exception_does_not_hide_the_first():
    def program(comm):
        time.sleep(0.1 * comm.rank)
        raise KeyError(comm.rank)

    with pytest.raises(KeyError, match="0") as caught:
        run_local(3, program)
    assert caught.value.__notes__ == ["on rank 0"]


def test_a_failed_run_waits_for_ranks_that_still_compute():
    """Nothing that they do happens after the error was raised."""
    finished = []

    def program(comm):
        if comm.rank == 0:
            raise ValueError("at once")
        time.sleep(0.2)
        finished.append(comm.rank)

    with pytest.raises(ValueError, match="at once"):
        run_local(3, program)
    assert sorted(finished) == [1, 2]


# ---- exits -----------------------------------------------------------------------------------------------------------


def test_ranks_that_nobody_waits_for_may_exit():
    def program(comm):
        if comm.rank == 1:
            comm.isend(np.full(1, 7.0), 0).wait()
        if comm.rank > 0:
            sys.exit()
        return comm.irecv(np.zeros(1), 1).wait().item()

    assert run_local(3, program) == [7.0, None, None]


@pytest.mark.parametrize("code", [0, None])
def test_an_exit_of_every_rank_is_their_return(code):
    assert run_local(3, lambda comm: sys.exit(code)) == [None] * 3


def test_another_ranks_exception_is_not_hidden_by_an_exit():
    def program(comm):
        if comm.rank == 0:
            raise KeyError("broken")
        time.sleep(0.1)
        sys.exit(3)

    with pytest.raises(KeyError, match="broken"):
        run_local(2, program)


# ---- waits that never end --------------------------------------------------------------------------------------------


def test_a_deadlock_says_what_every_rank_waits_for():
    def program(comm):
        comm.irecv(np.zeros(1), (comm.rank + 1) % 2, tag=comm.rank).wait()

    with pytest.raises(CommunicationError) as caught:
        run_local(2, program)
    for rank in (0, 1):
        assert f"rank {rank}, recv: receive from rank {1 - rank} (8 bytes, tag {rank})" in str(caught.value)


@pytest.mark.parametrize("way", ["isend", "irecv"])
def test_waiting_for_a_rank_that_has_returned_is_a_deadlock(way):
    with pytest.raises(CommunicationError, match=r"rank 0 has returned(.|\n)*  rank 1, "):
        run_local(2, lambda comm: comm.rank and getattr(comm, way)(np.zeros(1), 0).wait())


def test_a_wait_ends_after_the_timeout(monkeypatch):
    """Rank 1 is alive, but silent: this is no deadlock, so only the clock can tell."""
    monkeypatch.setenv("MINIPAR_TIMEOUT", "0.3")

    def program(comm):
        if comm.rank == 0:
            comm.irecv(np.zeros(1), 1).wait()
        time.sleep(1)

    with pytest.raises(CommunicationError, match=r"receive from rank 1 .*0.3 s \(MINIPAR_TIMEOUT\)"):
        run_local(2, program)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_wait_is_reported_once_after_30_seconds(silent, monkeypatch, capfd):
    """Here after 0.2: rank 0 says whom it waits for, or whoever waits for rank 0."""
    assert work.LATE_SECONDS == 30
    monkeypatch.setattr(work, "LATE_SECONDS", 0.2)

    def program(comm):
        if comm.rank == silent:
            time.sleep(0.8)
        comm.broadcast(np.ones(3), root=silent)

    run_local(3, program)
    lines = capfd.readouterr().err.splitlines()
    waiting = {0} if silent else {1, 2}
    expected = [f"minipar: rank {rank}, broadcast binomial: receive from rank {silent} (24 bytes" for rank in waiting]
    assert sorted(line[: len(expected[0])] for line in lines) == expected


def test_a_wait_ends_after_1800_seconds_by_default(monkeypatch):
    monkeypatch.delenv("MINIPAR_TIMEOUT", raising=False)
    assert run_local(2, lambda comm: comm.engine.timeout) == [1800.0, 1800.0]


# ---- messages --------------------------------------------------------------------------------------------------------


class Owner:
    """What messages name in errors."""

    def title(self):
        return "a test"


def test_a_message_that_is_done_lets_go_of_its_array():
    """Or the thread that has delivered it keeps the array alive after the array's rank has freed it."""
    world, owner = ThreadWorld(2), Owner()
    receiver, sender = (ThreadTransport(world, range(2), rank) for rank in range(2))
    received, sent = np.zeros(3), np.ones(3)
    requests = [receiver.irecv(received, 1, 0, owner), sender.isend(sent, 0, 0, owner)]
    references = [weakref.ref(received), weakref.ref(sent)]
    assert received.tolist() == [1, 1, 1]
    del received, sent
    assert [request.test() for request in requests] == [True, True]
    assert [reference() for reference in references] == [None, None]


def test_all_gather_bytes_of_any_lengths():
    def program(comm):
        return comm.all_gather_bytes(b"x" * (comm.rank * 3)), comm.all_gather_bytes(b"")

    assert run_local(3, program) == [([b"", b"xxx", b"xxxxxx"], [b""] * 3)] * 3


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_message_needs_a_rank_that_exists(peer):
    def program(comm):
        for operation in (comm.isend, comm.irecv):
            with pytest.raises(ValueError, match=f"rank {comm.rank}, .*rank {peer} .* 2 ranks"):
                operation(np.zeros(3), peer)

    run_local(2, program)


def test_messages_are_received_by_their_tags():
    def program(comm):
        received = [comm.irecv(np.zeros(1), 0, tag) for tag in (65535, 0)]
        for tag in (0, 65535):
            comm.isend(np.array([float(tag)]), 0, tag)
        return [work.wait().item() for work in received]

    assert run_local(1, program) == [[65535.0, 0.0]]


def test_in_a_notebook_an_error_has_the_users_line(monkeypatch):
    """It is raised as it is, with its traceback; a script prints one line and ends with code 2."""

    def main(world):
        mp.shard(mp.Linear(2, 2, name="fc"), mp.HybridComm(world, 3), 1)

    with pytest.raises(SystemExit):
        mp.launch(main, threads=2)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with pytest.raises(UsageError) as caught:
        mp.launch(main, threads=2)
    assert any(frame.name == "main" and __file__ in str(frame.path) for frame in caught.traceback)
