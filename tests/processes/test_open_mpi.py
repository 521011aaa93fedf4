"""The environment that `make openmpi` makes: plain mpirun starts ranks, with no variable that the user has to set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import OPEN_MPI

BIN = Path(sys.prefix) / "bin"
SETTINGS = Path(sys.prefix) / "etc" / "prte-mca-params.conf"
RANKS = (os.cpu_count() or 1) + 3


def test_plain_mpirun_starts_more_ranks_than_cores():
    if not SETTINGS.exists():
        pytest.skip("not an environment with Open MPI's wheel")
    environment = {name: value for name, value in os.environ.items() if name not in OPEN_MPI}
    ranks = "from mpi4py import MPI; print('rank', MPI.COMM_WORLD.Get_rank())"
    command = f'. {BIN}/activate && mpirun -n {RANKS} python -c "{ranks}"'
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"rank {rank}" for rank in range(RANKS))
