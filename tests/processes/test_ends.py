"""However a rank ends or freezes: the job ends in seconds, and says why."""

import time

import pytest
from launcher import mpirun_is_open_mpi, run_mpi

pytestmark = pytest.mark.skipif(mpirun_is_open_mpi(), reason="Open MPI's mpirun ends the ranks itself")


def run(ranks, program, **env):
    start = time.monotonic()
    result = run_mpi(ranks, program, env=env)
    assert time.monotonic() - start < 20  # 1 to 5 s on two free cores
    return result


# ---- while the program runs ------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
import numpy as np
from minipar.comm.launch import launch, world
from minipar.errors import UsageError

def program(comm):
    comm.barrier()
    if comm.rank == 2:
        {leaving}
    comm.all_reduce(np.ones(1000))
    comm.all_reduce(np.ones(1000))

{start}
"""
RETURNED = "rank 2 has returned"
ENDS = {  # what rank 2 does, mpirun's exit code, and what the job says
    "nothing wrong": ("pass", 0, ""),
    "a usage error": ("raise UsageError('only here')", 2, "minipar: error: only here\n"),
    "no memory": ("raise MemoryError('no 16 GiB')", 2, "minipar: error: no 16 GiB\n"),
    "exit 256": ("sys.exit(256)", 1, "rank 2 exits with 256"),
    "exit with text": ("sys.exit('why')", 1, "rank 2 exits with 'why'"),
}
WITHOUT_MAIN = {  # the same in a script that calls `world()`
    "an exception": ("raise KeyError('broken')", 1, "KeyError: 'broken'"),
    "exit 3": ("sys.exit(3)", 1, RETURNED),
    "a return": ("return", 1, RETURNED),
}


def check(end, start):
    leaving, code, words = end
    result = run(3, PROGRAM.format(leaving=leaving, start=start))
    assert result.returncode == code, result.stderr
    assert words in result.stdout + result.stderr and (code or result.stderr == "")


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_ends_ends_the_job(end):
    check(ENDS[end], "launch(program)")


@pytest.mark.parametrize("end", WITHOUT_MAIN)
def test_the_same_in_a_script_that_calls_world(end):
    check(WITHOUT_MAIN[end], "program(world())")


def test_a_wait_for_a_frozen_rank_ends_after_the_timeout():
    program = PROGRAM.format(leaving="os.kill(os.getpid(), signal.SIGSTOP)", start="launch(program)")
    result = run(3, program, MINIPAR_TIMEOUT="3")
    assert result.returncode == 1 and "receive from rank 2 (" in result.stderr
    assert "nothing for 3 s (MINIPAR_TIMEOUT)" in result.stderr


# Rank 1 starts 3 s late, and receives 3 s later still what rank 0 has sent before it left.
SLOW = """
import os, time
if os.environ.get("PMI_RANK") == "1": time.sleep(3)
import numpy as np
from minipar.comm import world
comm = world()
if comm.rank == 0:
    comm.isend(np.ones(9), 1).wait()
else:
    time.sleep(3)
    comm.irecv(np.empty(9), 0).wait()
"""
# Rank 0 learns that rank 1 has left before it looks again for the last message of rank 1.
LAST = """
import minipar.comm.mpi as mpi, time
from minipar.comm import world
comm = world()
sleep = time.sleep
sleep(2 * comm.rank)
def poll(seconds):
    sleep(0.5)
    for _ in range(100): mpi.MPI.COMM_WORLD.Iprobe()
if comm.rank == 0: mpi.LEFT_PAUSES, mpi.YIELD_TESTS, time.sleep = 0, 0, poll
comm.barrier()
"""


@pytest.mark.parametrize("program", [SLOW, LAST])
def test_a_rank_that_is_slow_is_no_fault(program):
    result = run(2, program)
    assert (result.returncode, result.stderr) == (0, "")
