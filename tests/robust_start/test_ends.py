"""Claims about a process that ends: with which code, after which line, and what mpirun and the other ranks hear."""

import os
import signal
import socket
import threading
import time

import pytest
from process_end import Ended

from minipar.errors import UsageError
from minipar.robust_start import exits, interrupt, mpirun, one_line

OWN, OTHER = 100, 101  # the rank's process, and one that it has forked
WAIT = ("sleep", interrupt.FIRST_SECONDS)


@pytest.mark.parametrize(
    ("process", "status", "code"),
    [(OWN, 3, 3), (OWN, 255, 255), (OWN, 257, 257), (OWN, 1, 1), (OTHER, 0, 0), (OTHER, 3, 3)],
)
def test_other_exits_are_those_of_python(process, status, code, ends, monkeypatch, capsys):
    monkeypatch.setattr(os, "getpid", lambda: process)
    with pytest.raises(Ended):
        exits.end_process(2, OWN, status)
    assert ends == [("exit", code)] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("status", [0, 256, 512])
def test_an_exit_with_0_ends_the_job_with_1(status, ends, monkeypatch, capsys):
    """The system reads the last 8 bits of a code."""
    monkeypatch.setattr(os, "getpid", lambda: OWN)
    exits.refuse_exit_0(2)
    with pytest.raises(Ended):
        os._exit(status)
    remedy = "return, or call sys.exit(0), which lets the other ranks finish"
    line = f"minipar: rank 2 has called os._exit(0), which ends the job: {remedy}\n"
    assert capsys.readouterr() == ("", line) and ends == [("job", 1), ("exit", 1)]


@pytest.mark.parametrize(("rank", "before"), [(None, []), ("0", []), ("1", [WAIT]), ("7", [WAIT])])
def test_ctrl_c_ends_every_rank_and_rank_0_says_so(rank, before, ends, monkeypatch, capsys):
    monkeypatch.delenv("PMI_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("PMI_RANK", rank)
    with pytest.raises(Ended):
        interrupt.end_at_once(signal.SIGINT, None)
    assert ends == [*before, ("job", 130), ("exit", 130)]
    assert capsys.readouterr() == ("", "" if before else "minipar: interrupted\n")


@pytest.fixture
def handler():
    """Set the handler of Ctrl-C, and put the one of before back."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda each: signal.signal(signal.SIGINT, each)
    signal.signal(signal.SIGINT, before)


def test_only_the_main_thread_sets_a_handler(handler):
    handler(signal.default_int_handler)
    thread = threading.Thread(target=interrupt.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupt.install()
    assert signal.getsignal(signal.SIGINT) is interrupt.end_at_once
    interrupt.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_left_alone(handler):
    for own in (signal.SIG_IGN, lambda number, frame: None):
        handler(own)
        interrupt.install()
        assert signal.getsignal(signal.SIGINT) is own
        interrupt.restore()
        assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.parametrize("number", [None, 0, 2])
def test_an_early_mistake_is_one_line_of_rank_0(number, handler, ends, monkeypatch, capsys):
    """The others leave it the time; then each ends with code 2, and Ctrl-C is an exception again."""
    for variable in ("PMI", "OMPI_COMM_WORLD", "PMIX"):
        monkeypatch.delenv(f"{variable}_SIZE", raising=False)
    if number is not None:
        monkeypatch.setenv("PMI_SIZE", "3")
        monkeypatch.setenv("PMI_RANK", str(number))
    handler(signal.default_int_handler)
    with pytest.raises(SystemExit) as leaving, one_line.one_line_errors():
        assert signal.getsignal(signal.SIGINT) is interrupt.end_at_once
        raise UsageError("a\nmistake")
    assert leaving.value.code == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ends == ([("sleep", one_line.MEET_SECONDS)] if number == 2 else [])
    assert capsys.readouterr() == ("", "" if number == 2 else "minipar: error: a mistake\n")


def test_another_error_goes_on_and_ctrl_c_is_restored(handler):
    handler(signal.default_int_handler)
    with pytest.raises(KeyError), one_line.one_line_errors():
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with one_line.one_line_errors():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- mpirun's connection ---------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(monkeypatch):
    """mpirun's end of the connection of a rank, whose other end is in the environment."""
    own, rank = socket.socketpair()
    with own, rank:
        own.settimeout(10)
        monkeypatch.setenv("HYDI_CONTROL_FD", "5")
        monkeypatch.setenv("PMI_FD", str(rank.fileno()))
        yield own


def test_a_rank_of_mpich_is_connected(proxy, monkeypatch):
    assert mpirun.connected() is True
    monkeypatch.delenv("HYDI_CONTROL_FD")
    assert mpirun.connected() is False


def test_what_is_no_socket_is_no_connection(monkeypatch, tmp_path):
    """A process that a rank has started has such a PMI_FD: it is closed, or another file."""
    monkeypatch.setenv("HYDI_CONTROL_FD", "5")
    monkeypatch.delenv("PMI_FD", raising=False)
    assert mpirun.connected() is False
    with open(tmp_path / "file", "w") as file:
        for value in (str(file.fileno()), "x", "987654"):
            monkeypatch.setenv("PMI_FD", value)
            assert mpirun.connected() is False


@pytest.mark.parametrize(("found", "value"), [("value=(vector,(0,1,2))\n", "(vector,(0,1,2))"), ("rc=1\n", "")])
def test_a_value_is_asked_for_in_the_jobs_own_store(found, value, proxy):
    asked = []

    def answer():
        for text in ("cmd=my_kvsname kvsname=kvs_7\n", f"cmd=get_result {found}"):
            asked.append(proxy.recv(1000))
            proxy.sendall(text.encode())

    thread = threading.Thread(target=answer)
    thread.start()
    assert mpirun.value_of("a_key") == value
    thread.join()
    assert asked == [b"cmd=get_my_kvsname\n", b"cmd=get kvsname=kvs_7 key=a_key\n"]


def test_a_long_answer_is_read_whole(proxy):
    text = "x" * 50_000
    proxy.sendall(text.encode())
    assert mpirun.ask("cmd=any") == text


def test_ranks_meet_at_mpiruns_barrier(proxy):
    proxy.sendall(b"cmd=barrier_out\n")
    mpirun.meet()
    assert proxy.recv(100) == b"cmd=barrier_in\n"


def test_the_end_of_a_job_is_asked_for_after_its_output(proxy, monkeypatch):
    sleeps = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    mpirun.end_job(7)
    assert proxy.recv(100) == b"cmd=abort exitcode=7\n" and sleeps == [mpirun.OUTPUT_SECONDS, mpirun.END_SECONDS]
    proxy.close()  # mpirun has ended: nothing to wait for
    mpirun.end_job(7)
    assert sleeps == [mpirun.OUTPUT_SECONDS, mpirun.END_SECONDS, mpirun.OUTPUT_SECONDS]
    monkeypatch.delenv("HYDI_CONTROL_FD")
    mpirun.end_job(7)
    assert sleeps == [mpirun.OUTPUT_SECONDS, mpirun.END_SECONDS, mpirun.OUTPUT_SECONDS]
