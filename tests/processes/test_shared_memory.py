"""Shared memory of a host: a job starts in little of it, or ends with one line that is true, and leaves nothing."""

import re

import own_machine
import pytest

from minipar.robust_start.start import BYTES_OF_RANK

TRAIN = "-m minipar.train --layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 8 --steps 1".split()
STATES = """
import os
from minipar.comm import world
comm = world()
comm.barrier()
shared = os.statvfs("/dev/shm")
if comm.rank == 0:
    print(os.environ["UCX_TLS"], (shared.f_blocks - shared.f_bfree) * shared.f_frsize)
comm.barrier()
"""
MIB = 2**20


@pytest.fixture(autouse=True)
def _machine():
    if own_machine.why_not() is not None:
        pytest.skip(own_machine.why_not())


def numbers(text):
    return [int(word.replace(",", "")) for word in re.findall(r"\d[\d,]*", text)]


def test_eight_ranks_train_in_dockers_shared_memory(tmp_path):
    result, left = own_machine.run_alone(tmp_path, 8, TRAIN, "size=64m")
    assert (result.returncode, result.stderr, left) == (0, "", [])


@pytest.mark.parametrize(("ranks", "size"), [(2, 2 * MIB), (2, 3 * MIB), (8, 8 * MIB)])
def test_little_shared_memory_is_enough_or_one_true_line(ranks, size, tmp_path):
    result, left = own_machine.run_alone(tmp_path, ranks, STATES, f"size={size}")
    needed = ranks * BYTES_OF_RANK
    if needed <= size:
        assert (result.returncode, result.stderr) == (0, "")
    else:
        (line,) = result.stderr.splitlines()
        assert result.returncode == 2 and line.startswith("minipar: error: /dev/shm ")
        assert numbers(line)[:3] == [size, needed, ranks]
    assert left == []


@pytest.mark.parametrize(("ranks", "env", "transports"), [(1, {}, "^posix"), (7, {"UCX_TLS": "tcp,self"}, "tcp,self")])
def test_mpi_takes_as_much_as_the_message_says(ranks, env, transports, tmp_path):
    """The user's choice of transports stays."""
    result, _ = own_machine.run_alone(tmp_path, ranks, STATES, env=env)
    chosen, taken = result.stdout.split()
    assert chosen == transports and 0.98 * ranks * BYTES_OF_RANK < int(taken) <= ranks * BYTES_OF_RANK


def test_memory_of_killed_jobs_is_named_and_stays(tmp_path):
    """No job can know whether another one, of another container perhaps, still uses it."""
    fill = "head -c 3000000 /dev/zero > /dev/shm/mpich_shm_1_0"
    result, left = own_machine.run_alone(tmp_path, 2, STATES, "size=4m", first=fill)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and left == []
    assert "/dev/shm/mpich_shm_*" in line and numbers(line)[-1] == 3_000_000


def test_shared_memory_that_cannot_be_written_is_one_line(tmp_path):
    result, left = own_machine.run_alone(tmp_path, 2, STATES, "ro")
    (line,) = result.stderr.splitlines()
    assert (result.returncode, left) == (2, []) and line.startswith("minipar: error: /dev/shm ")
