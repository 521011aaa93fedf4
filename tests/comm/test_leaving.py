"""A rank that leaves, freezes, or never starts ends the job soon, with its number; nothing is left behind."""

import math
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launcher import ROOT, run_mpi

from minipar.comm import run_local, serial
from minipar.comm.ending import abort_with_traceback
from minipar.comm.work import SAY_SECONDS
from minipar.errors import CommunicationError

SECONDS = 60.0
HEADER = """import os, signal, sys, time
import numpy as np
from minipar.comm import *
"""
PROGRAM = """
def program(comm):
    comm.barrier()
    if comm.rank == 2:
        {leaving}
    comm.all_reduce(np.ones(1000))
    comm.all_reduce(np.ones(1000))
{start}
"""
STARTS = {"main": "main(program)", "world": "program(world())"}
LEAVING = {
    "return": ("return", {}, 1),
    "exit 0": ("sys.exit(0)", {}, 1),
    "os._exit 0": (
        "os._exit(0)",
        dict.fromkeys(STARTS, "minipar: rank 2 has called os._exit(0), which ends the job"),
        1,
    ),
    "exit 3": ("sys.exit(3)", {"main": "minipar: rank 2 exits with 3, and not every rank does"}, 3),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("way", LEAVING)
def test_a_rank_that_leaves_ends_the_job_and_is_named(start, way):
    leaving, others, code = LEAVING[way]
    program = HEADER + PROGRAM.format(leaving=leaving, start=STARTS[start])
    begin = time.monotonic()
    result = run_mpi(3, program, timeout=SECONDS)
    assert result.returncode == (code if start in others else 1)
    assert others.get(start, "rank 2 has returned: did it have fewer batches?") in result.stderr, result.stderr
    assert time.monotonic() - begin < 20  # 4 to 5 s on two free cores; the mistake was a wait of 1800 s


def test_a_rank_that_starts_late_is_waited_for():
    late = "import os, time\nif os.environ['PMI_RANK'] == '1': time.sleep(3)\n"
    result = run_mpi(2, late + HEADER + "world().barrier()", timeout=SECONDS)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_rank_that_has_left_may_have_sent_enough():
    program = "comm = world()\nif comm.rank == 0: comm.isend(np.ones(9), 1).wait()\n"
    program += "else: time.sleep(3); comm.irecv(np.empty(9), 0).wait()"
    result = run_mpi(2, HEADER + program, timeout=SECONDS)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_frozen_rank_is_named_and_the_others_report():
    program = HEADER + PROGRAM.format(leaving="os.kill(os.getpid(), signal.SIGSTOP)", start="main(program)")
    result = run_mpi(3, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "3"})
    assert result.returncode == 1 and "rank 2 does not answer" in result.stderr
    reports = sorted(line for line in result.stderr.splitlines() if "last operations" in line)
    assert len(reports) == 2
    for rank, report in enumerate(reports):
        waits, *operations = report.split("; ")
        assert re.match(rf"minipar: rank {rank}, all_reduce \w+: receive from rank \d \(", waits), waits
        assert operations[0].startswith("last operations, the newest first: world: all_reduce sum of ")
        assert operations[-1] == "world: barrier of uint8 (dissemination, operation 1)"


def test_the_rank_that_is_behind_is_named():
    program = HEADER + PROGRAM.format(leaving="comm.irecv(np.empty(1), 0, 5).wait()", start="main(program)")
    result = run_mpi(3, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "3"})
    assert result.returncode == 1 and "rank 2 has called the fewest operations" in result.stderr
    assert "minipar: rank 2, recv: receive from rank 0 (8 bytes, tag 5); last operations" in result.stderr


def test_rank_0_says_what_it_waits_for_after_a_while():
    document = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"| a wait of {SAY_SECONDS:g} s | leaving: says_what |" in document
    program = "from minipar.comm import work\nwork.SAY_SECONDS = 0.2\ncomm = world()\n"
    program += "if comm.rank: time.sleep(2)\ncomm.split(comm.rank % 1, 'dp').barrier()"
    result = run_mpi(2, HEADER + program, timeout=SECONDS)
    lines = result.stderr.splitlines()
    assert result.returncode == 0 and 1 <= len(lines) <= 5  # after 0.2, 0.4, 0.8, 1.6 s
    assert all(line.startswith("minipar: rank 0, control ring: receive from rank 1 (") for line in lines)


def test_a_patient_wait_has_no_timeout():
    program = "comm = world()\nwith comm.engine.patient():\n    if comm.rank: time.sleep(3)\n    comm.barrier()"
    result = run_mpi(2, HEADER + program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "1"})
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_patient_wait_the_timeout_is_back(fails, monkeypatch):
    monkeypatch.setenv("MINIPAR_TIMEOUT", "0.3")

    def program(comm):
        with suppress(KeyError), comm.engine.patient():
            with comm.engine.patient():
                pass
            assert comm.engine.timeout == math.inf  # nested: the outer one goes on
            if fails:
                raise KeyError("inside")
        if comm.rank == 1:
            time.sleep(2)
        comm.barrier()

    with pytest.raises(CommunicationError, match=r"nothing for 0.3 s \(MINIPAR_TIMEOUT\)"):
        run_local(2, program)


def test_without_a_variable_the_timeout_is_1800_seconds(monkeypatch):
    monkeypatch.delenv("MINIPAR_TIMEOUT", raising=False)
    assert run_local(1, lambda comm: comm.engine.timeout) == [1800]


def test_a_report_has_the_last_8_operations():
    program = HEADER + "comm = world()\nfor _ in range(12): comm.barrier()\n"
    program += "if comm.rank == 0: time.sleep(60)\ncomm.all_reduce(np.ones(3))"
    result = run_mpi(2, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "2"})
    (report,) = [line for line in result.stderr.splitlines() if "last operations" in line]
    waits, newest, *older = report.split("; ")
    assert result.returncode == 1 and waits.startswith("minipar: rank 1, all_reduce ")
    assert newest.startswith("last operations, the newest first: world: all_reduce sum of float64")
    assert older == [f"world: barrier of uint8 (dissemination, operation {i})" for i in range(12, 5, -1)]


def test_a_bad_timeout_under_mpirun_is_one_line():
    result = run_mpi(2, HEADER + "main(print)", timeout=SECONDS, env={"MINIPAR_TIMEOUT": "x"})
    problem = "minipar: error: MINIPAR_TIMEOUT=x: expected a positive, finite number of seconds\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", problem)


def test_a_work_never_waited_for_is_reported(capfd):
    def program(comm):
        comm.all_reduce(np.ones(3), async_op=True).wait()
        comm.all_reduce(np.ones(3), async_op=True)
        comm.barrier()

    run_local(2, program)
    lines = capfd.readouterr().err.splitlines()
    line = program.__code__.co_firstlineno + 2
    words = f"all_reduce recursive_doubling, issued at {Path(__file__)}:{line}: never waited for"
    assert sorted(lines) == [f"minipar: rank {rank}, {words}" for rank in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_reports_what_it_never_waited_for_at_its_end(ranks):
    program = "comm = world()\ncomm.all_reduce(np.ones(3), async_op=True)\ncomm.barrier()\n"
    result = run_mpi(ranks, HEADER + program, timeout=SECONDS)
    lines = sorted(line for line in result.stderr.splitlines() if "never waited for" in line)
    assert result.returncode == 0 and len(lines) == ranks
    for rank, line in enumerate(lines):
        assert line.startswith(f"minipar: rank {rank}, all_reduce recursive_doubling, issued at ")


def test_after_an_error_no_work_is_reported_as_never_waited_for(capfd, monkeypatch):
    """Also where another rank ends the job first, so that `abort` returns."""
    mpi = SimpleNamespace(MPI=SimpleNamespace(Is_finalized=lambda: False, Exception=OSError))
    monkeypatch.setitem(sys.modules, "mpi4py", mpi)
    monkeypatch.setitem(sys.modules, "minipar.comm.mpi", SimpleNamespace(abort=lambda code: None))
    comm = serial()
    comm.transport = SimpleNamespace(notices=SimpleNamespace(print_once=lambda text: None))
    comm.all_reduce(np.ones(3), async_op=True)
    abort_with_traceback(comm, ValueError, ValueError("an error"), None)
    comm.engine.close()
    assert capfd.readouterr().err == ""


def test_a_work_tested_once_and_never_finished_is_reported(capfd):
    def program(comm):
        if comm.rank == 1:
            comm.irecv(np.zeros(1), 0).wait()  # so rank 0 has tested before rank 1 begins
        work = comm.all_reduce(np.ones(3), async_op=True)
        if comm.rank == 0:
            assert not work.test()
            comm.isend(np.zeros(1), 1).wait()
        else:
            while not work.test():
                pass
        comm.barrier()

    run_local(2, program)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("minipar: rank 0, all_reduce recursive_doubling, issued at ") and "never waited for" in line


def test_threads_name_a_rank_that_has_returned():
    with pytest.raises(CommunicationError, match=r"rank 2 has returned: did it have fewer batches\?"):
        run_local(3, lambda comm: comm.rank == 2 or comm.barrier())
