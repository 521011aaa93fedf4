"""Ranks that are processes: the few jobs that run with all other tests, one for each thing that threads cannot show."""

import time

import pytest
from launcher import mpirun_is_open_mpi, run_mpi

SECONDS = 60.0


def test_collectives_over_mpi_are_numpys_and_mpis_own():
    result = run_mpi(3, "from minipar import launch\nfrom mpi_collectives import program\nlaunch(program)", SECONDS)
    assert (result.returncode, result.stdout) == (0, "every claim holds\n"), result.stderr


def test_a_3d_training_of_eight_processes_equals_one_device():
    flags = "--dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel --microbatches 4 --clip-grad 1 --verify"
    size = "--layers 2 --hidden 16 --heads 4 --seq-len 16 --global-batch 8 --steps 3 --dtype float64"
    result = run_mpi(8, ["-m", "minipar.train", *size.split(), *flags.split()], SECONDS)
    assert result.returncode == 0, result.stderr
    assert "verify: 8 ranks = 1 device" in result.stdout


@pytest.mark.parametrize(
    ("leaving", "code", "words"),
    [
        ("raise KeyError('broken')", 1, ["rank 2:", "KeyError: 'broken'"]),
        ("sys.exit(0)", 1, ["rank 2 has returned"]),
        ("sys.exit(3)", 3, ["rank 2 exits with 3"]),
        ("return", 1, ["rank 2 has returned"]),
        ("os.kill(os.getpid(), 9)  # SIGKILL", 9, ["signal 9"]),
    ],
)
def test_a_rank_that_leaves_ends_all_within_10_seconds(leaving, code, words, tmp_path):
    if "SIGKILL" in leaving and mpirun_is_open_mpi():
        pytest.skip("Open MPI's mpirun has other words")
    program = f"""
import os, pathlib, sys
import numpy as np
from minipar.comm.launch import launch

def program(comm):
    comm.barrier()
    if comm.rank == 2:
        pathlib.Path({str(tmp_path / "left")!r}).touch()
        {leaving}
    comm.all_reduce(np.ones(1000))
    comm.barrier()

launch(program)
"""
    result = run_mpi(8, program, SECONDS)
    assert time.time() - (tmp_path / "left").stat().st_mtime < 10
    assert result.returncode == code
    assert all(word in result.stdout + result.stderr for word in words), result


def test_a_usage_error_is_one_line_and_code_2_on_every_rank():
    result = run_mpi(2, "from minipar import *\nlaunch(lambda comm: DeviceMesh(comm, dp=2, tp=3))", SECONDS)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("minipar: error: dp*tp = 2*3 = 6, ") and "mpirun started 2 ranks" in line
