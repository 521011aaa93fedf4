"""Claims about the ends of a job: none leaves a file in /tmp, or shared memory, whenever a rank ends."""

import own_machine
import pytest

BEFORE = "import os, sys, time\nif os.environ['PMI_RANK'] == '{rank}': {end}\n"
START = """
import os, sys
import numpy as np
from minipar.comm import main, world
from minipar.errors import UsageError
"""
PROGRAM = """
def program(comm):
    comm.barrier()
    if comm.rank == {rank}: {end}
    comm.all_reduce(np.ones(1000))
main(program)
"""
ENDS = {
    "an exception": "raise KeyError(1)",
    "a usage error": "raise UsageError('here')",
    "an exit": "sys.exit(3)",
    "a return": "return",
    "another operation": "comm.barrier()",
    "SIGKILL": "os.kill(os.getpid(), 9)",
}


@pytest.fixture(autouse=True)
def _machine():
    if own_machine.why_not() is not None:
        pytest.skip(own_machine.why_not())


def test_a_job_that_succeeds_leaves_nothing(tmp_path):
    result, left = own_machine.run_alone(tmp_path, 3, START + PROGRAM.format(rank=-1, end="pass"))
    assert (result.returncode, result.stderr, left) == (0, "", [])


def test_a_users_file_of_the_processors_stays(tmp_path):
    """mpirun reads it in place of a file of its own."""
    mine = "/tmp/hydra_hwloc_xmlfile_mine"
    program = START + PROGRAM.format(rank=-1, end="pass")
    result, left = own_machine.run_alone(tmp_path, 2, program, env={"HWLOC_XMLFILE": mine}, first=f"echo > {mine}")
    assert (result.returncode, left) == (0, [mine])


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_ends_the_job_leaves_nothing(end, rank, tmp_path):
    result, left = own_machine.run_alone(tmp_path, 3, START + PROGRAM.format(rank=rank, end=ENDS[end]))
    assert result.returncode != 0 and left == []


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("end", ["raise ImportError('x')", "sys.exit(3)", "os._exit(0)"])
def test_a_rank_that_ends_before_mpi_leaves_nothing(end, rank, tmp_path):
    program = BEFORE.format(rank=rank, end=end) + START + PROGRAM.format(rank=-1, end="pass")
    result, left = own_machine.run_alone(tmp_path, 3, program)
    assert result.returncode in (1, 3) and left == []  # minipar's, or that of the rank
    assert result.stderr.count(f"minipar: rank {rank} has ended before MPI started\n") == 1


def test_a_rank_killed_before_mpi_leaves_nothing(tmp_path):
    program = BEFORE.format(rank=1, end="os.kill(os.getpid(), 9)") + START + PROGRAM.format(rank=-1, end="pass")
    result, left = own_machine.run_alone(tmp_path, 3, program)
    assert (result.returncode, left) == (9, [])


AFTER_MEETING = """
import os, signal
from minipar.robust_start import mpirun, watch
watch.LEAST_TIMEOUT = 3.0
meet = mpirun.meet
def meet_and_end():
    meet()
    if os.environ["PMI_RANK"] == "{rank}": {end}
mpirun.meet = meet_and_end
"""


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_ends_while_mpi_starts_leaves_nothing(rank, tmp_path):
    """The others are in MPI_Init; mpirun itself ends them."""
    program = AFTER_MEETING.format(rank=rank, end="os._exit(5)") + START + PROGRAM.format(rank=-1, end="pass")
    result, left = own_machine.run_alone(tmp_path, 3, program)
    assert result.returncode != 0 and left == []


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_frozen_while_mpi_starts_is_one_line(rank, tmp_path):
    """The others wait in MPI_Init, rank 0 with shared memory that it has made and named."""
    end = "os.kill(os.getpid(), signal.SIGSTOP)"
    program = AFTER_MEETING.format(rank=rank, end=end) + START + PROGRAM.format(rank=-1, end="pass")
    result, left = own_machine.run_alone(tmp_path, 3, program, env={"MINIPAR_TIMEOUT": "1"})
    reason = "MPI has not started within 3 s (MINIPAR_TIMEOUT): a rank has ended, or comes too late"
    assert (result.returncode, result.stderr, left) == (1, f"minipar: {reason}\n", [])
