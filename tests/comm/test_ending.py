"""The end of a rank after an error: what it prints, whom it asks, and which code it leaves with."""

import sys
from types import SimpleNamespace

import pytest

from minipar.comm.ending import abort_with_traceback, end_every_rank
from minipar.errors import UsageError
from minipar.robust_start.one_line import MEET_SECONDS


class Lost(Exception):
    """MPI's error for a message that cannot leave."""


class Notices:
    """The answer of the other ranks, and what they are asked."""

    def __init__(self, everyone):
        self.everyone = everyone
        self.asked = []
        self.printed = []

    def send(self, tag, seconds):
        self.asked.append((tag, seconds))
        return self.everyone

    def print_once(self, text):
        self.printed.append(text)


def a_rank(rank, size, everyone=True):
    notices = Notices(everyone)
    engine = SimpleNamespace(unwaited={"an operation": "a line"})
    return SimpleNamespace(rank=rank, size=size, engine=engine, transport=SimpleNamespace(notices=notices))


@pytest.fixture
def aborts(monkeypatch):
    """The codes of the aborts, each of which returns as if another rank's had come first."""
    codes = []
    mpi = SimpleNamespace(Is_finalized=lambda: False, Exception=Lost)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setitem(sys.modules, "minipar.comm.mpi", SimpleNamespace(abort=codes.append, FAILED="failed"))
    return codes


ASKED = [("failed", MEET_SECONDS)]
INTERRUPTED = "minipar: interrupted\n"
ERROR = "minipar: error: why\n"
# The error, the rank, the ranks, whether all of them fail: what is printed, whom it asks, the aborts and the code.
ENDS = [
    (KeyboardInterrupt(), 0, 1, True, (INTERRUPTED, [], [], 130)),
    (KeyboardInterrupt(), 0, 2, True, (INTERRUPTED, [], [130], 130)),
    (KeyboardInterrupt(), 1, 2, True, ("", [], [130], 130)),
    (SystemExit(), 0, 1, True, ("", [], [], None)),
    (SystemExit(0), 1, 2, False, ("", [], [], 0)),
    (SystemExit(), 1, 2, False, ("", [], [], None)),
    (SystemExit(1), 0, 1, True, ("", [], [], 1)),
    (SystemExit(1), 1, 2, True, ("", ASKED, [], 1)),
    (SystemExit(3), 0, 2, False, ("minipar: rank 0 exits with 3, and not every rank does\n", ASKED, [3], 3)),
    (
        SystemExit("why"),
        1,
        3,
        False,
        ("minipar: rank 1 exits with 'why', and not every rank does\n", ASKED, [1], "why"),
    ),
    (UsageError("why"), 0, 1, True, (ERROR, [], [], 2)),
    (UsageError("why"), 0, 2, True, (ERROR, ASKED, [], 2)),
    (UsageError("why"), 1, 2, True, ("", ASKED, [], 2)),
    (UsageError("why"), 0, 2, False, (ERROR, ASKED, [2], 2)),
    (UsageError("why"), 1, 2, False, (ERROR, ASKED, [2], 2)),
    (MemoryError("why"), 2, 3, True, ("", ASKED, [], 2)),
]


@pytest.mark.parametrize(("error", "rank", "size", "everyone", "expected"), ENDS)
def test_every_error_has_its_line_and_its_code(error, rank, size, everyone, expected, aborts, capfd):
    """One rank prints, rank 0 if all fail. A rank that is alone, or that succeeded, asks nobody."""
    comm = a_rank(rank, size, everyone)
    with pytest.raises(SystemExit) as leaving:
        end_every_rank(comm, error)
    assert (capfd.readouterr().err, comm.transport.notices.asked, aborts, leaving.value.code) == expected
    failed = not isinstance(error, KeyboardInterrupt) and expected[-1] not in (0, None)
    assert comm.engine.unwaited == ({} if failed else {"an operation": "a line"})


def test_a_traceback_is_printed_once_and_ends_the_job(aborts, capfd):
    comm = a_rank(1, 2)
    abort_with_traceback(comm, ValueError, ValueError("why"), None)
    assert comm.transport.notices.printed == ["ValueError: why\n"] and aborts == [1]
    assert comm.engine.unwaited == {} and capfd.readouterr().err == ""


def test_a_rank_whose_messages_are_lost_prints_its_traceback(aborts, capfd):
    def lost(text):
        raise Lost

    comm = a_rank(1, 2)
    comm.transport.notices.print_once = lost
    abort_with_traceback(comm, ValueError, ValueError("why"), None)
    assert capfd.readouterr().err == "rank 1:\nValueError: why\n" and aborts == [1]


def test_after_the_end_of_mpi_python_prints_the_traceback(aborts, monkeypatch):
    """The other ranks end by themselves: nobody is told, and nothing is aborted."""
    printed = []
    sys.modules["mpi4py"].MPI.Is_finalized = lambda: True
    monkeypatch.setattr(sys, "__excepthook__", lambda *error: printed.append(error))
    comm = a_rank(1, 2)
    error = ValueError("why")
    abort_with_traceback(comm, ValueError, error, None)
    assert printed == [(ValueError, error, None)]
    assert aborts == [] and comm.transport.notices.printed == [] and comm.engine.unwaited != {}
