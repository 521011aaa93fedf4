"""A rank that leaves, freezes, or never starts ends the job soon, with its number; nothing is left behind."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from launcher import run_mpi

from minipar.comm import run_local
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
    "return": ("return", {}),
    "exit 0": ("sys.exit(0)", {}),
    "exit 3": ("sys.exit(3)", {"main": "minipar: rank 2 exits with 3, and not every rank does"}),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("way", LEAVING)
def test_a_rank_that_leaves_ends_the_job_and_is_named(start, way):
    leaving, others = LEAVING[way]
    program = HEADER + PROGRAM.format(leaving=leaving, start=STARTS[start])
    begin = time.monotonic()
    result = run_mpi(3, program, timeout=SECONDS)
    assert result.returncode not in (0, 15)
    assert others.get(start, "rank 2 has returned") in result.stderr, result.stderr
    assert time.monotonic() - begin < 20  # 4 to 5 s on two free cores; the mistake was a wait of 1800 s


def test_a_rank_that_ends_before_mpi_starts_is_named():
    result = run_mpi(3, "import os\nif os.environ['PMI_RANK'] == '1': raise ImportError('x')\n" + HEADER + "world()")
    assert result.returncode != 0 and "minipar: rank 1 has ended before MPI started" in result.stderr


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
    reports = sorted(tmp_path.glob("minipar-*-rank-*.txt"))
    assert [path.name[-5] for path in reports] == ["0", "1"]
    for rank, path in enumerate(reports):
        waits, _, *operations = path.read_text().splitlines()
        assert re.match(rf"rank {rank}, all_reduce \w+: receive from rank \d \(", waits), waits
        assert operations[-1] == "world: barrier of uint8 (dissemination, operation 1)"


def test_the_rank_that_is_behind_is_named(tmp_path):
    program = HEADER + PROGRAM.format(leaving="comm.irecv(np.empty(1), 0, 5).wait()", start="main(program)")
    result = run_mpi(3, program, timeout=SECONDS, env={"MINIPAR_TIMEOUT": "3", "TMPDIR": str(tmp_path)})
    assert result.returncode == 1 and "rank 2 has called the fewest operations" in result.stderr
    assert "rank 2, recv: receive from rank 0 (8 bytes, tag 5)" in (next(tmp_path.glob("*-rank-2.txt"))).read_text()


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


@pytest.mark.parametrize("end", ["", "if comm.rank: raise KeyError(1)", "if comm.rank: os.kill(os.getpid(), 9)"])
def test_no_end_leaves_shared_memory_or_files(end, tmp_path):
    named = "[line for line in open('/proc/self/maps') if 'mpich_shm' in line and '(deleted)' not in line]"
    program = HEADER + f"comm = world()\nprint({named}, flush=True)\ncomm.barrier()\n{end}\ncomm.barrier()"
    result = run_mpi(2, program, timeout=SECONDS, env={"TMPDIR": str(tmp_path)})
    assert (result.returncode == 0) == (end == "") and list(tmp_path.iterdir()) == []
    assert result.stdout.count("[]") == 2  # no segment has a name any more


def test_too_little_shared_memory_is_one_line():
    program = "from minipar.comm import launch\nlaunch.BYTES_OF_RANK = 10**15\n" + HEADER + "main(lambda comm: None)"
    result = run_mpi(2, program, timeout=SECONDS)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "/dev/shm has " in result.stderr and "needs about 2,000,000,012,000,000" in result.stderr


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


def test_threads_name_a_rank_that_has_returned():
    with pytest.raises(CommunicationError, match="rank 2 has returned"):
        run_local(3, lambda comm: comm.rank == 2 or comm.barrier())
