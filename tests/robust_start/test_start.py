"""Claims about the order in which MPI starts, with a stand-in for MPI: who meets, who checks, and what comes after."""

import atexit
import ctypes
import os
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from minipar.robust_start import mpirun, start

HOSTS = [0, 0]


class Communicator:
    """MPI's communicator, which notes what is asked of it."""

    def __init__(self, name, events):
        self.name = name
        self.events = events

    def Set_errhandler(self, handler):
        self.events.append(f"{self.name}: {handler}")

    def Barrier(self):
        self.events.append(f"{self.name}: barrier")


class Thread:
    """A thread that never runs, and notes how it was made."""

    def __init__(self, target, args, daemon):
        self.made = (target, args, daemon)

    def start(self):
        Thread.events.append("watch")
        Thread.started = self.made


@pytest.fixture
def begin(monkeypatch):
    """Start MPI in an environment; return what happened, in order."""

    def run(hydra, ranks=2, here=2, local="0", **variables):
        events = Thread.events = []
        module = ModuleType("mpi4py")
        module.rc = SimpleNamespace(initialize=True)
        worlds = {name: Communicator(name, events) for name in ("COMM_SELF", "COMM_WORLD")}
        library = SimpleNamespace(
            __file__="mpi.so", THREAD_MULTIPLE=3, ERRORS_RETURN="errors return", Finalize="finalize", **worlds
        )
        module.MPI = library
        monkeypatch.setitem(sys.modules, "mpi4py", module)
        monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
        monkeypatch.setattr(mpirun, "connected", lambda: hydra)
        monkeypatch.setattr(mpirun, "meet", lambda: events.append("meet"))
        monkeypatch.setattr(start, "host_of_each_rank", lambda: HOSTS)
        monkeypatch.setattr(start, "ranks_and_those_here", lambda: (ranks, here))
        monkeypatch.setattr(start, "prepare_host", lambda: events.append("prepare"))
        monkeypatch.setattr(start, "remove_shared_memory", lambda: events.append("remove"))
        monkeypatch.setattr(threading, "Thread", Thread)
        monkeypatch.setattr(atexit, "register", lambda function: events.append(function))

        def initialize(arguments, words, level, provided):
            events.append(("initialize", arguments, words, level, Thread.started[1][2].is_set()))

        monkeypatch.setattr(ctypes, "CDLL", lambda path: {"mpi.so": SimpleNamespace(MPI_Init_thread=initialize)}[path])
        monkeypatch.setenv("MPI_LOCALRANKID", local)
        monkeypatch.setenv("UCX_TLS", "")  # to be put back
        monkeypatch.delenv("UCX_TLS")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        start.start_mpi(30.0)
        assert module.rc.initialize is False
        return events

    return run


INITIALIZE = ("initialize", None, None, 3, False)
REST = ["finalize", "COMM_SELF: errors return", "COMM_WORLD: errors return", "COMM_WORLD: barrier", "remove"]


def test_ranks_of_a_host_are_checked_and_meet_before_mpi(begin):
    assert begin(True) == ["watch", "prepare", "meet", INITIALIZE, *REST]
    target, (hosts, timeout, started, clean_up), daemon = Thread.started
    assert (target, hosts, timeout, daemon) == (start.watch, HOSTS, 30.0, True)
    assert started.is_set() and clean_up is start.remove_shared_memory


def test_one_rank_of_each_host_checks_it(begin):
    assert begin(True, local="1") == ["watch", "meet", INITIALIZE, *REST]


def test_ranks_of_several_hosts_do_not_meet(begin):
    assert begin(True, ranks=4) == ["watch", "prepare", INITIALIZE, *REST]


def test_without_mpichs_mpirun_nobody_meets_or_checks(begin):
    assert begin(False) == ["watch", INITIALIZE, *REST]
    assert "UCX_TLS" not in os.environ


@pytest.mark.parametrize(("given", "used"), [({}, "^posix"), ({"UCX_TLS": "tcp"}, "tcp")])
def test_ucx_takes_no_shared_memory_unless_the_user_says(given, used, begin):
    begin(True, **given)
    assert os.environ["UCX_TLS"] == used


def test_a_program_that_has_started_mpi_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", ModuleType("mpi4py.MPI"))
    monkeypatch.setattr(mpirun, "connected", None)
    monkeypatch.setattr(start, "host_of_each_rank", None)
    start.start_mpi(30.0)
