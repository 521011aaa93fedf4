"""A rank that leaves, freezes, or never starts ends the job soon, with its number; nothing is left behind."""

import math
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from launcher import run_mpi
from sampled import sampled

from minipar.comm import run_local
from minipar.errors import CommunicationError
from minipar.robust_start.report import write_report

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


def test_a_frozen_rank_is_named_and_the_others_report(tmp_path):
    program = HEADER + PROGRAM.format(leaving="os.kill(os.getpid(), signal.SIGSTOP)", start="main(program)")
    result = run_mpi(3, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "3", "TMPDIR": str(tmp_path)})
    assert result.returncode == 1 and "rank 2 does not answer" in result.stderr
    reports = sorted(tmp_path.glob("minipar-*/rank-*.txt"))
    assert [path.name[-5] for path in reports] == ["0", "1"]
    for rank, path in enumerate(reports):
        waits, _, *operations = path.read_text().splitlines()
        assert re.match(rf"rank {rank}, all_reduce \w+: receive from rank \d \(", waits), waits
        assert operations[-1] == "world: barrier of uint8 (dissemination, operation 1)"


def test_the_rank_that_is_behind_is_named(tmp_path):
    program = HEADER + PROGRAM.format(leaving="comm.irecv(np.empty(1), 0, 5).wait()", start="main(program)")
    result = run_mpi(3, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "3", "TMPDIR": str(tmp_path)})
    assert result.returncode == 1 and "rank 2 has called the fewest operations" in result.stderr
    assert "rank 2, recv: receive from rank 0 (8 bytes, tag 5)" in (next(tmp_path.glob("*/rank-2.txt"))).read_text()


def report_is_in_the_way(folder, make, n=2):
    """Run a job that times out, with what `make` puts at the path of rank 1's report or of the directory."""
    own = folder / f"minipar-{os.getuid()}"
    make(own)
    program = HEADER + "comm = world()\nif comm.rank == 0: time.sleep(60)\ncomm.barrier()"
    return own, run_mpi(n, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "2", "TMPDIR": str(folder)})


def test_a_report_is_in_a_directory_of_the_users_own(tmp_path):
    def earlier(own):
        own.mkdir(mode=0o777)
        (own / "rank-1.txt").write_text("of an earlier job\n" * 1000)

    own, result = report_is_in_the_way(tmp_path, earlier)
    assert result.returncode == 1 and f"what each rank waits for, and its last operations, are in {own}/rank-*.txt" in (
        result.stderr
    )
    assert (own / "rank-1.txt").read_text().startswith("rank 1, barrier dissemination: receive from rank 0 (")
    assert "earlier" not in (own / "rank-1.txt").read_text()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (own, own / "rank-1.txt")] == [0o700, 0o600]


IN_THE_WAY = {
    "a pipe as directory": lambda own: os.mkfifo(own),
    "a file as directory": lambda own: own.write_text(""),
    "a link to a directory": lambda own: own.symlink_to(own.parent / "elsewhere"),
    "a directory as file": lambda own: (own / "rank-1.txt").mkdir(parents=True),
}


@pytest.mark.parametrize("kind", sampled(list(IN_THE_WAY), every=2))
def test_a_report_that_cannot_be_written_is_printed(kind, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    own, result = report_is_in_the_way(tmp_path, IN_THE_WAY[kind])
    assert result.returncode == 1 and f"minipar: rank 1: its report cannot be written to {own}" in result.stderr
    assert "rank 1, barrier dissemination: receive from rank 0 (" in result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_at_a_reports_path_is_replaced(kind, tmp_path):
    def put(own):
        own.mkdir()
        (tmp_path / "precious").write_text("precious")
        if kind == "pipe":
            os.mkfifo(own / "rank-1.txt")
        else:
            (own / "rank-1.txt").symlink_to(tmp_path / "precious")

    own, result = report_is_in_the_way(tmp_path, put)
    assert result.returncode == 1 and (own / "rank-1.txt").read_text().startswith("rank 1, barrier")
    assert (tmp_path / "precious").read_text() == "precious"


def test_another_users_directory_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(OSError, match="Not a directory of this user"):
        write_report(tmp_path / "theirs" / "rank-0.txt", "text")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_rank_0_says_what_it_waits_for_after_a_while():
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


def test_a_report_has_the_last_64_operations(tmp_path):
    program = HEADER + "comm = world()\nfor _ in range(70): comm.barrier()\n"
    program += "if comm.rank == 0: time.sleep(60)\ncomm.all_reduce(np.ones(3))"
    result = run_mpi(2, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "2", "TMPDIR": str(tmp_path)})
    _, _, newest, *older = next(tmp_path.glob("*/rank-1.txt")).read_text().splitlines()
    assert result.returncode == 1 and newest.startswith("world: all_reduce sum of float64")
    assert older == [f"world: barrier of uint8 (dissemination, operation {i})" for i in range(70, 7, -1)]


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
