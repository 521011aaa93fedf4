"""A rank that waits, over a transport and a clock that a test moves: how often it looks, what it says, and what is
shared by the operations under way.
"""

import numpy as np
import pytest

from minipar.comm import run_local, serial, work
from minipar.comm.communicator import Communicator
from minipar.comm.transport import Message
from minipar.errors import CommunicationError
from minipar.memory import MemoryLedger

PAUSE = 1.875  # seconds, of which 16 are exactly 30


class Arriving(Message):
    """A message that has arrived after so many pauses of its transport."""

    def test(self):
        return len(self.owner.transport.attempts) >= self.owner.transport.pauses


class Moved:
    """A transport whose messages all arrive after `pauses` pauses, each of which takes PAUSE seconds."""

    size = 2
    ranks = (0, 1)
    name = "world"
    launcher = "a test"

    def __init__(self, rank, pauses, notices=None):
        self.rank = rank
        self.pauses = pauses
        self.notices = notices
        self.attempts = []
        self.posted = []
        self.error = None

    def isend(self, array, dest, tag, owner):
        self.posted.append(("send", dest, array.size))
        return Arriving(owner, "send to", dest, array.nbytes, tag)

    def irecv(self, array, source, tag, owner):
        self.posted.append(("receive", source, array.size))
        return Arriving(owner, "receive from", source, array.nbytes, tag)

    def pause(self, attempt, waiting_for):
        self.attempts.append(attempt)

    def monotonic(self):
        return 7.0 + PAUSE * len(self.attempts)


class Notices:
    """What a rank asks of its notices while it waits."""

    def __init__(self):
        self.seconds = []

    def look(self, request, seconds, engine):
        self.seconds.append(seconds)

    def report(self, request, engine):
        return "; a report"


@pytest.fixture
def waited(monkeypatch):
    """Return a function that waits for a message of so many pauses, and returns the transport."""

    def wait(rank, pauses, notices=None, timeout="1e6"):
        monkeypatch.setenv("MINIPAR_TIMEOUT", timeout)
        transport = Moved(rank, pauses, notices)
        monkeypatch.setattr(work, "time", transport)
        message = Communicator(transport).irecv(np.zeros(2), 1 - rank, 5)
        try:
            message.wait()
        except CommunicationError as error:
            transport.error = str(error)
        return transport

    return wait


@pytest.mark.parametrize("pauses", [1, 2, 20])
def test_each_pause_is_told_how_many_came_before(waited, pauses):
    transport = waited(0, pauses)
    assert transport.attempts == list(range(pauses)) and transport.error is None


def test_rank_0_reports_a_wait_of_30_60_120_and_240_seconds(waited, capfd):
    """It speaks after more than 30, 60, 120 and 240 s, each time at its next look; here it looks every 30 s."""
    waited(0, 150)
    says = "minipar: rank 0, recv: receive from rank 1 (16 bytes, tag 5): waiting for {} s\n"
    assert capfd.readouterr().err == "".join(says.format(seconds) for seconds in (60, 90, 150, 270))
    waited(1, 150)
    assert capfd.readouterr().err == ""


TIMED_OUT = "rank 1, recv: receive from rank 0 (16 bytes, tag 5): nothing for 30 s (MINIPAR_TIMEOUT)"


def test_a_wait_ends_after_the_timeout_not_at_it(waited):
    transport = waited(1, 150, timeout="30")
    assert transport.error == TIMED_OUT
    assert len(transport.attempts) == 32


def test_a_wait_that_ends_has_looked_for_notices_and_reports(waited):
    notices = Notices()
    transport = waited(1, 150, notices, timeout="30")
    assert transport.error == f"{TIMED_OUT}; a report"
    assert len(transport.attempts) == 32
    assert notices.seconds == [30.0, 60.0]


# ---- operations under way --------------------------------------------------------------------------------------------


def test_an_asynchronous_call_posts_its_messages_and_returns():
    transport = Moved(0, pauses=1)
    comm = Communicator(transport)
    pending = comm.all_reduce(np.zeros(6), algorithm="ring", async_op=True)
    assert transport.posted == [("send", 1, 3), ("receive", 1, 3)] and transport.attempts == []
    assert not pending.done and list(comm.engine.streams) == [comm]
    pending.wait()
    assert transport.posted == [("send", 1, 3), ("receive", 1, 3)] * 2 and transport.attempts == [0]
    assert pending.done and comm.engine.streams == {}


def test_what_was_never_waited_for_is_reported_once(capfd):
    comm = serial()
    comm.all_reduce(np.zeros(3), async_op=True)
    comm.engine.close()
    assert capfd.readouterr().err.count("never waited for") == 1
    comm.engine.close()
    assert capfd.readouterr().err == ""


def test_a_rank_alone_copies_no_array(monkeypatch):
    """It copies neither to the host nor back, as there is nothing to send."""

    class OnDevice(np.ndarray):
        pass

    def copies(x):
        raise AssertionError("a copy")

    monkeypatch.setattr("minipar.comm.communicator.to_host", copies)
    monkeypatch.setattr("minipar.comm.communicator.from_host", copies)
    x = np.ones(3).view(OnDevice)
    assert serial().all_reduce(x) is x and serial().broadcast(x) is x and x.tolist() == [1, 1, 1]


def test_operations_of_all_sizes_and_dtypes_share_one_scratch():
    def program(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            held = []
            views = []
            for count, dtype in ((1, "u1"), (4, "f8"), (8, "f4"), (2, "f8"), (9, "f8"), (4, "f8"), (18, "f4")):
                views.append(comm.scratch(count, np.dtype(dtype)))
                held.append(ledger.held["buffers"])
        assert [(view.size, view.dtype.str[1:]) for view in views[:3]] == [(1, "u1"), (4, "f8"), (8, "f4")]
        first = [np.shares_memory(views[1], view) for view in views]
        second = [np.shares_memory(views[4], view) for view in views]
        return held[0], held[-1], first, second

    first = [False, True, True, True, False, False, False]
    second = [False, False, False, False, True, True, True]
    ((smallest, last, found_first, found_second),) = run_local(1, program)
    assert (found_first, found_second) == (first, second)
    assert (smallest, last) == (1, 1 + 32 + 72)  # this test keeps all three


def test_a_rank_alone_that_waits_for_a_message_is_a_deadlock():
    with pytest.raises(CommunicationError, match="every rank waits.*\n  rank 0, recv: receive from rank 0"):
        serial().irecv(np.zeros(1), 0).wait()


@pytest.mark.parametrize(
    ("op", "algorithm", "elements"),
    [
        ("all_reduce", "ring", 2 * 3),
        ("all_reduce", "ordered", 9),
        ("all_reduce", "tree", 9),
        ("all_reduce", "recursive_doubling", 9),
        ("all_reduce", "recursive_halving", 9),
        ("reduce_scatter", "ring", 2 * 3),
        ("reduce_scatter", "ordered", 9),
        ("reduce_scatter", "tree", 9),
        ("reduce_scatter", "recursive_halving", 9),
    ],
)
def test_an_operation_needs_no_more_scratch_than_this(op, algorithm, elements):
    """For 9 elements on 3 ranks a ring needs two chunks, the others all elements. (Rank 0 rests without any.)"""

    def program(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            getattr(comm, op)(np.zeros(9), algorithm=algorithm)
            return ledger.held["buffers"]

    assert run_local(3, program)[1:] == [8 * elements] * 2
