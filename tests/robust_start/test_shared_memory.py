"""Claims about shared memory: a job starts in little of it, or ends with one line that is true, and leaves nothing."""

import re

import own_machine
import pytest

from minipar.robust_start.start import BYTES_OF_RANK

TRAIN = "-m minipar.train --layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 8 --steps 1".split()
SUM = """
import numpy as np
from minipar.comm import main
main(lambda comm: comm.all_reduce(np.ones(100_000)))
"""
KIB, MIB = 2**10, 2**20
TRUE_LINE = re.compile(
    r"minipar: error: /dev/shm has ([\d,]+) bytes left, but MPI needs about ([\d,]+) for (\d+) ranks; "
    r"enlarge it \(docker run --shm-size=1g\), or start fewer ranks\n"
)


@pytest.fixture(autouse=True)
def _machine():
    if own_machine.why_not() is not None:
        pytest.skip(own_machine.why_not())


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_eight_ranks_train_in_dockers_shared_memory(tmp_path):
    result, left = own_machine.run_alone(tmp_path, 8, TRAIN, "size=64m")
    assert (result.returncode, result.stderr, left) == (0, "", [])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "size"), [(2, 4 * KIB), (2, 2 * MIB), (2, 3 * MIB), (8, 8 * MIB), (8, 9 * MIB)])
def test_little_shared_memory_is_enough_or_one_true_line(ranks, size, tmp_path):
    result, left = own_machine.run_alone(tmp_path, ranks, SUM, f"size={size}")
    needed = ranks * BYTES_OF_RANK
    if needed <= size:
        assert (result.returncode, result.stderr) == (0, "")
    else:
        line = TRUE_LINE.fullmatch(result.stderr)
        assert line is not None, result.stderr
        assert (result.returncode, *map(number, line.groups())) == (2, size, needed, ranks)
    assert left == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_mpi_takes_as_much_as_the_message_says(ranks, tmp_path):
    taken = """
import os
from minipar.comm import world
comm = world()
comm.barrier()
shared = os.statvfs("/dev/shm")
if comm.rank == 0: print((shared.f_blocks - shared.f_bfree) * shared.f_frsize)
comm.barrier()
"""
    result, _ = own_machine.run_alone(tmp_path, ranks, taken)
    assert 0.98 * ranks * BYTES_OF_RANK < int(result.stdout) <= ranks * BYTES_OF_RANK


def test_memory_of_killed_jobs_is_named_and_stays(tmp_path):
    """No job can know whether another one, of another container perhaps, still uses it."""
    fill = "head -c 3000000 /dev/zero > /dev/shm/mpich_shm_1_0"
    result, left = own_machine.run_alone(tmp_path, 2, SUM, "size=4m", first=fill)
    remedy = "/dev/shm/mpich_shm_* of jobs that were killed hold 3,000,000: remove them when no job runs\n"
    assert result.returncode == 2 and result.stderr.endswith(remedy) and result.stderr.count("\n") == 1
    assert left == ["/dev/shm/mpich_shm_1_0"]


def test_shared_memory_that_cannot_be_written_is_one_line(tmp_path):
    result, left = own_machine.run_alone(tmp_path, 2, SUM, "ro")
    problem = "/dev/shm cannot be written, where MPI shares memory between the ranks of a host"
    assert (result.returncode, result.stderr, left) == (2, f"minipar: error: {problem}\n", [])


def test_the_users_choice_of_transports_stays(tmp_path):
    chosen = "import os\nfrom minipar.comm import world\nworld()\nos.write(1, os.environ['UCX_TLS'].encode() + b'\\n')"
    result, _ = own_machine.run_alone(tmp_path, 2, chosen, env={"UCX_TLS": "tcp,self"})
    assert result.stdout == "tcp,self\n" * 2
    result, _ = own_machine.run_alone(tmp_path, 2, chosen)
    assert result.stdout == "^posix\n" * 2
