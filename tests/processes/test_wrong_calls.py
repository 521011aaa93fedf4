"""Ranks that call different things get an error that names both; a wait for what never comes ends by the clock."""

import json

import pytest
from launcher import run_mpi

from minipar.comm.work import LATE_SECONDS

SECONDS = 60.0

# What rank 1 calls, what rank 0 calls, and what the error of one of them says.
MISTAKES = {
    "dtype": (
        "comm.all_reduce(np.ones(100, np.int64), algorithm='ring')",
        "comm.all_reduce(np.ones(100), algorithm='ring')",
        ["all_reduce of int64", "all_reduce of float64"],
    ),
    "elements": (
        "comm.reduce_scatter(np.ones(48), algorithm='ring')",
        "comm.reduce_scatter(np.ones(47), algorithm='ring')",
        ["elements mod 1024"],
    ),
    "many elements": ("comm.all_reduce(np.ones(200_000))", "comm.all_reduce(np.ones(200_001))", ["elements mod 1024"]),
    "counts": (
        "comm.all_to_all(np.ones(6), counts=([3, 3], [3, 3]))",
        "comm.all_to_all(np.ones(4), counts=([2, 2], [2, 2]))",
        ["16", "24", "all_to_all of float64"],
    ),
    "operation": ("comm.barrier()", "comm.all_reduce(np.ones(100))", ["barrier", "all_reduce of float64"]),
    "order": (
        "comm.all_gather(np.ones(4)); comm.all_reduce(np.ones(100))",
        "comm.all_reduce(np.ones(100)); comm.all_gather(np.ones(4))",
        ["all_gather of float64", "all_reduce of float64"],
    ),
    "a short message": (
        "comm.irecv(np.zeros(5), 0).wait()",
        "comm.isend(np.zeros(4), 1).wait()",
        ["rank 1", "rank 0 sent 32 bytes", "40"],
    ),
}


def test_ranks_that_disagree_learn_what_both_called():
    """Each mistake on a communicator of its own, in one job; rank 0 prints the errors that the two ranks get."""
    result = run_mpi(
        2,
        f"""
import json
import numpy as np
from minipar.comm import world
from minipar.errors import CommunicationError
world = world()
errors = []
for one, others, _ in {list(MISTAKES.values())!r}:
    comm, text = world.new_group([0, 1], "pair"), ""
    try:
        exec(one if comm.rank == 1 else others)
    except CommunicationError as error:
        text = str(error)
    comm.queue.clear()  # forget the call that failed
    errors.append([text.decode() for text in world.all_gather_bytes(text.encode())])
if world.rank == 0:
    print(json.dumps(errors), flush=True)
world.transport.job.abort(0, "")  # messages of the mistakes are still under way
""",
        SECONDS,
        env={"MINIPAR_TIMEOUT": "3"},
    )
    for errors, (_, _, facts) in zip(json.loads(result.stdout), MISTAKES.values(), strict=True):
        assert any(all(fact in error for fact in facts) for error in errors), errors


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


def test_a_lost_message_ends_the_job():
    script = """
import numpy as np
from transports import Lossy
from minipar.comm import Communicator
from minipar.comm.launch import launch
def program(comm):
    lossy = Communicator(Lossy(comm.transport, ("world", 0, 1, 2)))
    lossy.all_reduce(np.ones(10), algorithm="ring")
launch(program)
"""
    result = run_mpi(2, script, SECONDS, env={"MINIPAR_TIMEOUT": "1"})
    assert result.returncode != 0
    assert "rank 1, all_reduce ring: receive from rank 0 (40 bytes, " in result.stderr
    assert "1 s (MINIPAR_TIMEOUT)" in result.stderr


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
