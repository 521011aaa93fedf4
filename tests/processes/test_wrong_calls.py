"""Ranks that call different things get an error that names both; a wait for what never comes ends by the clock."""

import pytest
from launcher import run_mpi

from minipar.comm.work import LATE_SECONDS

SECONDS = 60.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("comm.broadcast(x)", "broadcast of float64"),
        ("comm.all_reduce(np.ones(1000, int))", "all_reduce of int64, elements mod 1024 = 1000"),
        ("comm.all_reduce(np.ones(1001))", "all_reduce of float64, elements mod 1024 = 1001"),
    ],
)
def test_one_wrong_call_ends_all_of_8_ranks(call, words):
    program = f"""
import numpy as np
from minipar.comm.launch import launch
def program(comm):
    comm.barrier()
    x = np.ones(1000)
    {call} if comm.rank == 2 else comm.all_reduce(x)
    print(x[0])
launch(program)
"""
    result = run_mpi(8, program, SECONDS)
    assert (result.returncode, result.stdout) == (1, "")
    assert words in result.stderr and "all_reduce of float64, elements mod 1024 = 1000" in result.stderr


def test_a_message_of_the_wrong_size_names_both_sizes():
    program = """
import numpy as np
from minipar.comm.launch import launch
launch(lambda comm: comm.irecv(np.zeros(5), 0).wait() if comm.rank else comm.isend(np.zeros(4), 1).wait())
"""
    result = run_mpi(2, program, SECONDS)
    assert result.returncode == 1
    assert all(words in result.stderr for words in ("rank 1", "rank 0 sent 32 bytes", "40")), result.stderr


def test_a_wait_of_30_seconds_is_reported_once():
    """Here of 0.2 s. Rank 0 says what it waits for; so does a rank that waits for rank 0."""
    assert LATE_SECONDS == 30
    script = """
import time
import numpy as np
from minipar.comm import work, world
work.LATE_SECONDS = 0.2
comm = world()
group = comm.new_group([0, 1], "world")
if comm.rank == 0: time.sleep(1)
comm.broadcast(np.ones(1))
if comm.rank == 1: time.sleep(1)
group.broadcast(np.ones(1), 1)
"""
    result = run_mpi(2, script, SECONDS)
    lines = result.stderr.splitlines()
    assert result.returncode == 0 and len(lines) == 2
    for rank, line in zip((1, 0), lines, strict=True):
        assert line.startswith(f"minipar: rank {rank}, ") and f"receive from rank {1 - rank} (" in line
