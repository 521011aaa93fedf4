"""run_local: values, the first exception, and deadlocks that raise an error instead of hanging."""

import contextvars
import time
import weakref

import numpy as np
import pytest

from minipar.comm import run_local, threads
from minipar.comm.threads import ThreadTransport, ThreadWorld
from minipar.errors import CommunicationError, UsageError


def test_run_local_returns_each_ranks_value():
    assert run_local(3, lambda comm, factor: comm.rank * factor, 10) == [0, 10, 20]


def test_the_first_exception_names_its_rank_and_ends_all():
    def program(comm):
        if comm.rank == 2:
            time.sleep(0.05)
            raise KeyError("broken")
        comm.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="broken") as caught:
        run_local(4, program)
    assert caught.value.__notes__ == ["on rank 2"]
    assert time.monotonic() - start < 2


def test_a_later_exception_does_not_hide_the_first():
    def program(comm):
        time.sleep(0.1 * comm.rank)
        raise KeyError(comm.rank)

    with pytest.raises(KeyError, match="0") as caught:
        run_local(3, program)
    assert caught.value.__notes__ == ["on rank 0"]


def test_a_deadlock_says_what_every_rank_waits_for():
    def program(comm):
        comm.irecv(np.zeros(1), (comm.rank + 1) % 2, tag=comm.rank).wait()

    with pytest.raises(CommunicationError) as caught:
        run_local(2, program)
    text = str(caught.value)
    assert "every rank waits and no message is on its way" in text
    assert "  rank 0, recv: receive from rank 1 (8 bytes, tag 0)" in text
    assert "  rank 1, recv: receive from rank 0 (8 bytes, tag 1)" in text


def test_waiting_for_a_rank_that_has_returned_is_a_deadlock():
    with pytest.raises(CommunicationError, match=r"rank 0 has returned: did it have fewer batches\?\n  rank 1, "):
        run_local(2, lambda comm: comm.rank and comm.irecv(np.zeros(1), 0).wait())


def test_a_send_nobody_receives_is_a_deadlock():
    with pytest.raises(CommunicationError, match="send to rank 1"):
        run_local(2, lambda comm: comm.rank or comm.isend(np.zeros(1), 1).wait())


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


class Asleep:
    """A condition that lets something happen in the middle of its wait."""

    def __init__(self, world, happens):
        self.world, self.happens = world, happens
        self.idle = None

    def wait(self, timeout):
        self.idle = dict(self.world.idle)
        self.world.lock.release()
        self.happens()
        self.world.lock.acquire()

    def notify(self):
        pass


@pytest.mark.parametrize("messages", [0, 1, 2, 3])
def test_a_rank_is_idle_until_the_first_of_its_messages(messages):
    """However many arrive before it wakes; or a deadlock would be seen where there is none, or never."""
    world, owner = ThreadWorld(2), Owner()
    receiver, sender = (ThreadTransport(world, range(2), rank) for rank in range(2))
    requests = [receiver.irecv(np.zeros(1), 1, tag, owner) for tag in range(3)]
    idle = []

    def send():
        for tag in range(messages):
            sender.isend(np.ones(1), 0, tag, owner)
            idle.append(dict(world.idle))

    world.wake[0] = Asleep(world, send)
    receiver.pause(0, requests[-1])
    assert world.wake[0].idle == {0: requests[-1]} and idle == [{}] * messages and world.idle == {}
    assert [request.test() for request in requests] == [tag < messages for tag in range(3)]
    assert world.news[0] is False
    # What arrives while it is awake is news too: it looks once more before it sleeps.
    sender.isend(np.ones(1), 0, 7, owner)
    receiver.irecv(np.zeros(1), 1, 7, owner)
    world.wake[0] = None
    receiver.pause(1, requests[-1])
    assert world.idle == {}


@pytest.fixture
def rarely_looks(monkeypatch):
    """A rank that waits sleeps for 20 s, unless it is woken."""
    monkeypatch.setattr(threads, "LOOK_SECONDS", 20.0)
    start = time.monotonic()
    yield
    assert time.monotonic() - start < threads.RELEASE_SECONDS - 1


def until_asleep(comm, rank):
    """Wait until this rank sleeps."""
    while rank not in comm.transport.world.idle:
        time.sleep(0.001)


def test_a_message_wakes_the_rank_that_waits_for_it(rarely_looks):
    def program(comm):
        received = np.zeros(1)
        if comm.rank == 0:
            until_asleep(comm, 1)
            comm.isend(np.ones(1), 1).wait()
        else:
            comm.irecv(received, 0).wait()
        return received[0]

    assert run_local(2, program) == [0, 1]


def test_a_failure_wakes_the_ranks_that_wait(rarely_looks):
    def program(comm):
        if comm.rank == 1:
            comm.irecv(np.zeros(1), 0).wait()
        until_asleep(comm, 1)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_local(2, program)


def test_a_wait_ends_after_the_timeout(monkeypatch):
    monkeypatch.setenv("MINIPAR_TIMEOUT", "0.2")

    def program(comm):
        if comm.rank == 0:
            time.sleep(3)  # alive, but silent: no deadlock, so only the clock can tell
        else:
            comm.irecv(np.zeros(1), 0).wait()

    with pytest.raises(CommunicationError, match=r"receive from rank 0 .*nothing for 0.2 s \(MINIPAR_TIMEOUT\)"):
        run_local(2, program)


def test_a_wait_ends_after_1800_seconds_by_default(monkeypatch):
    monkeypatch.delenv("MINIPAR_TIMEOUT", raising=False)
    assert run_local(2, lambda comm: comm.engine.timeout) == [1800.0, 1800.0]


@pytest.mark.parametrize("value", ["soon", "", "-1", "0", "nan", "inf", "1e400"])
def test_a_timeout_that_is_not_positive_is_rejected(monkeypatch, value):
    monkeypatch.setenv("MINIPAR_TIMEOUT", value)
    with pytest.raises(UsageError, match=f"^MINIPAR_TIMEOUT={value}: expected a positive, finite number of seconds"):
        run_local(1, lambda comm: None)


@pytest.mark.parametrize("ranks", [0, -1])
def test_run_local_needs_a_rank(ranks):
    with pytest.raises(UsageError, match=f"run_local needs at least 1 rank, not {ranks}"):
        run_local(ranks, lambda comm: None)


def test_agree_raises_the_lowest_ranks_error_everywhere():
    def program(comm):
        comm.agree()
        try:
            comm.agree(f"rank {comm.rank} has no file" if comm.rank in (1, 3) else None)
        except UsageError as error:
            return str(error)

    assert run_local(4, program) == ["rank 1 has no file"] * 4


def test_all_gather_bytes_and_gather_bytes():
    def program(comm):
        data = b"x" * (comm.rank * 3)
        return comm.all_gather_bytes(data), comm.gather_bytes(data, root=1)

    expected = [b"", b"xxx", b"xxxxxx"]
    assert run_local(3, program) == [(expected, None), (expected, expected), (expected, None)]


def test_ranks_inherit_the_callers_context():
    flag = contextvars.ContextVar("flag", default="default")
    flag.set("set by the caller")
    assert run_local(2, lambda comm: flag.get()) == ["set by the caller"] * 2


def test_the_mpi_algorithm_says_where_it_went():
    with pytest.raises(UsageError, match="MPI's own collectives are measured by python -m minipar.bench collectives"):
        run_local(2, lambda comm: comm.all_reduce(np.zeros(3), algorithm="mpi"))


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_message_needs_a_rank_that_exists(peer):
    def program(comm):
        for name, operation in (("send", comm.isend), ("recv", comm.irecv)):
            problem = rf"rank {comm.rank}, {name}: rank {peer} is not one of the 2 ranks"
            with pytest.raises(ValueError, match=problem):
                operation(np.zeros(3), peer)

    run_local(2, program)


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


def test_a_rank_remembers_its_last_eight_operations():
    def program(comm):
        pair = comm.row([comm.rank], "pair")
        for _ in range(3):
            comm.barrier()
            pair.barrier()
        seen = [comm.engine.operations]
        for _ in range(5):
            comm.barrier()
        return seen + [comm.engine.operations], [axis for axis, _ in comm.engine.recent]

    assert run_local(2, program) == [([6, 11], ["pair", "world", "pair"] + ["world"] * 5)] * 2


def test_a_message_has_a_tag_from_0_to_65535():
    def program(comm):
        for name, operation in (("send", comm.isend), ("recv", comm.irecv)):
            for tag in (-1, 65536):
                with pytest.raises(ValueError, match=rf"rank 0, {name}: tag {tag} is outside 0\.\.65535"):
                    operation(np.zeros(3), 0, tag)
        received = [comm.irecv(np.zeros(1), 0, tag) for tag in (65535, 0)]
        for tag in (0, 65535):
            comm.isend(np.array([float(tag)]), 0, tag)
        return [work.wait().item() for work in received]

    assert run_local(1, program) == [[65535.0, 0.0]]
