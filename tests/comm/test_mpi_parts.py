"""The parts of the MPI transport one by one, over a fake MPI: pauses, the end of a job, messages and notices."""

from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py.MPI import ERR_OTHER, ERR_TRUNCATE
from mpi4py.MPI import Exception as MPIError

from minipar.comm import mpi
from minipar.comm.operation import USER_TAGS
from minipar.errors import CommunicationError


class Owner:
    """An operation, as messages name it."""

    def title(self):
        return "a test"


# ---- pauses and the end ----------------------------------------------------------------------------------------------


def test_a_rank_yields_at_first_and_sleeps_longer_and_longer(monkeypatch):
    done = []
    monkeypatch.setattr(mpi, "os", SimpleNamespace(sched_yield=lambda: done.append("yield")))
    monkeypatch.setattr(mpi, "time", SimpleNamespace(sleep=done.append))
    for attempt in range(mpi.YIELD_TESTS + 1000):
        mpi.MPITransport.pause(None, attempt, None)
    yields, sleeps = done[: mpi.YIELD_TESTS], done[mpi.YIELD_TESTS :]
    assert yields == ["yield"] * mpi.YIELD_TESTS and len(sleeps) == 1000
    assert sleeps[:4] == [mpi.FIRST_SLEEP] * 4 and sleeps[-1] == mpi.LONGEST_SLEEP
    assert sleeps == sorted(sleeps) and len(set(sleeps)) > 5


@pytest.mark.parametrize(
    ("code", "ends_with"), [(1, 1), (3, 3), (255, 255), (256, 1), (257, 1), (-1, 255), (0, 1), (2, 2), (512, 1)]
)
def test_an_abort_prints_everything_before_it_ends_the_job(code, ends_with, monkeypatch):
    done = []
    stream = SimpleNamespace(flush=lambda: done.append("flush"))
    monkeypatch.setattr(mpi, "sys", SimpleNamespace(stdout=stream, stderr=stream))
    monkeypatch.setattr(mpi, "time", SimpleNamespace(sleep=lambda seconds: done.append(("sleep", seconds))))
    monkeypatch.setattr(mpi.mpirun, "end_job", lambda code: done.append(("end", code)))
    world = SimpleNamespace(Abort=lambda code: done.append(("abort", code)))
    monkeypatch.setattr(mpi, "MPI", SimpleNamespace(COMM_WORLD=world))
    mpi.abort(code)
    ends = [("end", ends_with), ("sleep", mpi.mpirun.OUTPUT_SECONDS), ("abort", ends_with)]
    assert done == ["flush", "flush", *ends]


# ---- messages --------------------------------------------------------------------------------------------------------


class Status:
    """What has arrived."""

    tag = None
    count = None
    source = None

    def Get_tag(self):
        return self.tag

    def Get_count(self, kind):
        return self.count

    def Get_source(self):
        return self.source


@pytest.fixture
def status(monkeypatch):
    new = Status()
    monkeypatch.setattr(mpi, "STATUS", new)
    return new


class Handle:
    """MPI's request for a message, which arrives at the second test; MPI forgets it then."""

    def __init__(self, status, tag, count):
        self.status, self.tag, self.count = status, tag, count
        self.tests = 0

    def Test(self, status):
        self.tests += 1
        if self.tests == 2:
            status.tag, status.count = self.tag, self.count
        return self.tests >= 2


def receive_over(handle, nbytes):
    """Return the transport's receive of so many bytes with tag 5, for which MPI gives this handle."""
    comm = Comm("world")
    comm.Irecv = lambda buffer, source, tag: handle
    return mpi.MPITransport(comm, [0, 1], None).irecv(np.zeros(nbytes, np.uint8), 1, 5, Owner())


def receive(status, nbytes, tag, count):
    """Return a receive of so many bytes with tag 5, to which a message of this tag and count comes."""
    return receive_over(Handle(status, tag, count), nbytes)


@pytest.mark.parametrize(("nbytes", "count"), [(8, 8), (1, 1), (0, 0)])
def test_a_receive_is_done_once_its_message_is_there(status, nbytes, count):
    request = receive(status, nbytes, 5, count)
    assert request.test() is False
    assert request.test() is True
    status.tag, status.count = 7, 100  # another message's
    assert request.test() is True


@pytest.mark.parametrize(("nbytes", "tag", "count"), [(8, 5, 4), (1, 5, 0), (8, 6, 8), (8, 6, 4), (0, 6, 0)])
def test_another_size_or_tag_is_an_error(status, nbytes, tag, count):
    request = receive(status, nbytes, tag, count)
    assert not request.test()
    sent = f"sent {count} bytes" if tag == 5 else f"called tag {tag}"
    with pytest.raises(CommunicationError, match=f"^a test: rank 1 {sent}"):
        request.test()


def failing(error):
    def test(status):
        raise MPIError(error)

    return SimpleNamespace(Test=test)


def test_a_longer_message_is_an_error_with_the_expected_size(status):
    status.tag = 5
    request = receive_over(failing(ERR_TRUNCATE), 8)
    with pytest.raises(CommunicationError, match=r"^a test: rank 1 sent more than 8 bytes \(tag 5\), but 8 were"):
        request.test()


def test_an_error_of_mpi_says_what_was_waited_for(status):
    request = receive_over(failing(ERR_OTHER), 8)
    with pytest.raises(CommunicationError, match=r"^a test: receive from rank 1 \(8 bytes, tag 5\): ."):
        request.test()


class Group:
    """MPI's handle of a group, which has to be freed."""

    def __init__(self, freed, ranks=None):
        self.freed, self.ranks = freed, ranks

    def Incl(self, ranks):
        return Group(self.freed, ranks)

    def Free(self):
        self.freed.append(self.ranks)


class Comm:
    """An MPI communicator that notes what is posted on it."""

    def __init__(self, name, rank=0, size=2):
        self.name = name
        self.rank = rank
        self.size = size
        self.posted = []
        self.freed = []

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Dup(self):
        self.copy = Comm("copy", self.rank, self.size)
        return self.copy

    def Get_group(self):
        return Group(self.freed)

    def Create_group(self, group):
        return Comm(f"of {group.ranks}", rank=0, size=len(group.ranks))

    def Isend(self, buffer, dest, tag):
        self.posted.append(("send", buffer[1], dest, tag))

    def Irecv(self, buffer, source, tag):
        self.posted.append(("receive", buffer[1], source, tag))


def test_users_and_collectives_messages_never_meet():
    """A user's message is received by its tag, a collective's by its order, on a communicator of its own."""
    comm = Comm("world")
    transport = mpi.MPITransport(comm, [4, 7], None)
    for tag in (0, USER_TAGS - 1, USER_TAGS + 1):
        sent = transport.isend(np.zeros(2), 1, tag, Owner())
        received = transport.irecv(np.zeros(3), 1, tag, Owner())
        assert sent.describe().startswith("a test: send to rank 7 (16 bytes, ")
        assert received.describe().startswith("a test: receive from rank 7 (24 bytes, ")
    last = USER_TAGS - 1
    assert comm.posted == [("send", 16, 1, 0), ("receive", 24, 1, 0), ("send", 16, 1, last), ("receive", 24, 1, last)]
    assert comm.copy.posted == [("send", 16, 1, USER_TAGS + 1), ("receive", 24, 1, mpi.MPI.ANY_TAG)]


def test_a_group_has_its_ranks_and_leaves_no_handles():
    comm = Comm("world", size=3)
    notices = object()
    group = mpi.MPITransport(comm, [4, 6, 7], notices).group([2, 0], "a name")
    assert (group.comm.name, group.name, group.ranks, group.size) == ("of [2, 0]", "a name", [7, 4], 2)
    assert group.notices is notices and comm.freed == [[2, 0], None]


# ---- notices ---------------------------------------------------------------------------------------------------------


class Notes:
    """MPI and a clock for one rank of three: what comes from the others, and when."""

    def __init__(self, monkeypatch, rank, arriving=()):
        self.rank = rank
        self.now = 0.0
        self.sent = []
        self.arriving = sorted(arriving)  # (time, source, tag, value)
        self.COMM_WORLD = self
        self.status = Status()
        monkeypatch.setattr(mpi, "MPI", self)
        monkeypatch.setattr(mpi, "STATUS", self.status)
        monkeypatch.setattr(mpi, "time", self)
        self.notices = mpi.Notices()

    def Dup(self):
        return self

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return 3

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def Iprobe(self, status):
        if not self.arriving or self.arriving[0][0] > self.now:
            return False
        _, status.source, status.tag, _ = self.arriving[0]
        return True

    def Recv(self, buffer, source, tag):
        array, nbytes, _ = buffer
        assert nbytes == 8 and (source, tag) == self.arriving[0][1:3]
        array[:1] = self.arriving.pop(0)[3]

    def Isend(self, buffer, dest, tag):
        array, nbytes, _ = buffer
        assert nbytes == array.nbytes == 8
        self.sent.append((dest, tag, int(array[0])))


def test_a_notice_goes_to_all_others_and_waits_for_theirs(monkeypatch):
    notes = Notes(monkeypatch, 1, [(0.5, 0, mpi.FAILED, 0), (1.5, 2, mpi.FAILED, 0)])
    assert notes.notices.send(mpi.FAILED, 9, seconds=2.0) is True
    assert notes.sent == [(0, mpi.FAILED, 9), (2, mpi.FAILED, 9)] and 1.5 <= notes.now < 2.0
    assert notes.notices.arrived[mpi.FAILED] == {0: 0, 1: 9, 2: 0}


def test_a_notice_that_comes_too_late_is_not_waited_for(monkeypatch):
    notes = Notes(monkeypatch, 1, [(0.5, 0, mpi.FAILED, 0), (5.0, 2, mpi.FAILED, 0), (0.0, 2, mpi.LEFT, 0)])
    assert notes.notices.send(mpi.FAILED, seconds=2.0) is False
    assert 2.0 <= notes.now < 2.1


def test_a_rank_leaves_when_all_do(monkeypatch):
    notes = Notes(monkeypatch, 0, [(3.0, 1, mpi.LEFT, 0), (20.0, 2, mpi.LEFT, 0)])
    notes.notices.leave()
    assert 20 <= notes.now < 20.1


DIGEST = 2403399168  # zlib.crc32(b"why\n"), a checksum that other software computes too


def printed(monkeypatch, capfd, rank, arriving):
    """Return what a rank prints of an exception, and after which part of RAISED_SECONDS it is done."""
    notes = Notes(monkeypatch, rank, [(when, source, mpi.RAISED, value) for when, source, value in arriving])
    notes.notices.print_once("why\n")
    assert notes.sent == [(other, mpi.RAISED, DIGEST) for other in range(3) if other != rank]
    return capfd.readouterr().err, notes.now / mpi.RAISED_SECONDS


@pytest.mark.parametrize(
    ("rank", "arriving", "text", "seconds"),
    [
        (0, [], "rank 0:\nwhy\n", 1),
        (0, [(0.1, 2, DIGEST)], "rank 0:\nwhy\nminipar: the same on rank 2\n", 1),
        (0, [(0.1, 2, DIGEST), (0.2, 1, DIGEST)], "rank 0:\nwhy\nminipar: the same on rank 1, 2\n", 0.2),
        (1, [(0.1, 0, 5), (0.2, 2, 5)], "rank 1:\nwhy\n", 0.2),
        (1, [(0.1, 0, 5), (0.2, 2, DIGEST)], "rank 1:\nwhy\nminipar: the same on rank 2\n", 0.2),
        (2, [], "rank 2:\nwhy\n", 1),
    ],
)
def test_an_exception_is_printed_with_the_ranks_that_have_it(rank, arriving, text, seconds, monkeypatch, capfd):
    arriving = [(when * mpi.RAISED_SECONDS, *rest) for when, *rest in arriving]
    found, took = printed(monkeypatch, capfd, rank, arriving)
    assert found == text and took == pytest.approx(seconds, abs=0.02)


def test_a_lower_ranks_same_exception_is_left_to_that_rank(monkeypatch, capfd):
    """That rank's abort ends this one, which sleeps until then; if that rank has died, this one prints at last."""
    text, took = printed(monkeypatch, capfd, 2, [(0.0, 0, 5), (0.1 * mpi.RAISED_SECONDS, 1, DIGEST)])
    assert text == "rank 2:\nwhy\n" and took > 2


def test_an_exception_is_printed_before_others_are_waited_for(monkeypatch):
    """Rank 0 has nobody to ask: it prints at once."""
    notes = Notes(monkeypatch, 0)
    times = []
    stderr = SimpleNamespace(write=lambda text: times.append((text, notes.now)))
    monkeypatch.setattr(mpi, "sys", SimpleNamespace(stderr=stderr))
    notes.notices.print_once("why\n")
    assert times == [("rank 0:\nwhy\n", 0.0)]


# ---- reports ---------------------------------------------------------------------------------------------------------

WAITS = SimpleNamespace(describe=lambda: "rank 0 waits for rank 2", peer=2)
ENGINE = SimpleNamespace(recent=[("world", 3), ("dp", 5)], operations=9)
REPORT = "minipar: rank 0 waits for rank 2; last operations, the newest first: dp: tag 5; world: tag 3\n"


@pytest.mark.parametrize(
    ("arriving", "says"),
    [
        ([(0.1, 1, 8), (0.2, 2, 9)], "; rank 1 has called the fewest operations"),
        ([(0.1, 1, 10), (0.2, 2, 12)], "; rank 0 has called the fewest operations"),
        ([(0.1, 1, 8)], "; rank 2 does not answer: it computes, or is stopped"),
        ([], "; rank 1, 2 does not answer: it computes, or is stopped"),
    ],
)
def test_a_report_names_the_rank_that_is_behind(arriving, says, monkeypatch, capfd):
    notes = Notes(monkeypatch, 0, [(when, source, mpi.REPORTED, count) for when, source, count in arriving])
    assert notes.notices.report(WAITS, ENGINE) == says
    assert capfd.readouterr().err == REPORT
    assert notes.sent == [(1, mpi.REPORTED, 9), (2, mpi.REPORTED, 9)]
    if len(arriving) == 2:
        assert notes.now < 0.3
    else:
        assert notes.now >= mpi.REPORT_SECONDS


def test_a_rank_reports_once_when_another_has(monkeypatch, capfd):
    notes = Notes(monkeypatch, 0, [(1.0, 1, mpi.REPORTED, 4)])
    notes.notices.look(WAITS, 0.5, ENGINE)
    assert (capfd.readouterr().err, notes.sent) == ("", [])
    notes.now = 1.0
    for _ in range(2):
        notes.notices.look(WAITS, 1.0, ENGINE)
    assert capfd.readouterr().err == REPORT and len(notes.sent) == 2


def test_a_rank_that_left_is_named_some_time_after_it(monkeypatch):
    """It is named only if it is the one that is waited for, and later: its last messages may still be on their way."""
    notes = Notes(monkeypatch, 0, [(0.0, 1, mpi.LEFT, 0)])
    notes.notices.look(WAITS, 10 * mpi.LEFT_SECONDS, ENGINE)
    notes.arriving = [(0.0, 2, mpi.LEFT, 0)]
    notes.notices.look(WAITS, mpi.LEFT_SECONDS, ENGINE)
    with pytest.raises(CommunicationError, match=r"^rank 0 waits for rank 2: rank 2 has returned: did it have"):
        notes.notices.look(WAITS, 1.01 * mpi.LEFT_SECONDS, ENGINE)
