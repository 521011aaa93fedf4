"""The beginning of a program: which ranks it has, what it may not be started with, and what it does to the process."""

import os
import subprocess
import sys

import pytest
from launcher import ROOT, run_mpi

HEADER = """import os, sys
import numpy as np
from minipar.comm import *
from minipar.comm.launch import launch
from minipar.errors import UsageError
"""
SECONDS = 60.0


def run_alone(body, env=None):
    """Run a program in one process without mpirun, with these variables in its environment."""
    return subprocess.run(
        [sys.executable, "-c", HEADER + body],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
    )


def assert_one_line(result, *values):
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("minipar: error: ") and all(value in line for value in values), line


# ---- one process -----------------------------------------------------------------------------------------------------

THREADS = "from threadpoolctl import threadpool_info\n"
THREADS += "def threads(): return {p['num_threads'] for p in threadpool_info()}\n"
STATE = "(dict(os.environ), threads(), sys.excepthook)"
HOOK = "sys.excepthook is sys.__excepthook__"
ALONE = {  # a program, variables of its environment, the exit code, and what it prints
    "without mpirun, one rank": ("launch(lambda comm: print(comm.rank, comm.size))", {}, 0, "0 1"),
    "what launch returns": ("print(launch(lambda comm: comm.size))", {}, 0, "1"),
    "of threads, every rank's": ("print(launch(lambda comm: comm.rank, threads=3))", {}, 0, "[0, 1, 2]"),
    "one process of torchrun": ("launch(lambda comm: print(comm.size))", {"WORLD_SIZE": "1"}, 0, "1"),
    "one BLAS thread": (f"{THREADS}world(); print(threads())", {}, 0, "{1}"),
    "the user's BLAS threads": (f"{THREADS}world(); print(threads())", {"OPENBLAS_NUM_THREADS": "2"}, 0, "{2}"),
    "BLAS threads after threads": (
        f"{THREADS}before = threads(); print(run_local(2, lambda comm: threads()), threads() == before)",
        {},
        0,
        "[{1}, {1}] True",
    ),
    "nothing changes by an import": (
        f"{THREADS}before = {STATE}\nimport minipar.train.trainer\nprint({STATE} == before)",
        {},
        0,
        "True",
    ),
    "Python's own exit": (f"world(); print({HOOK}, flush=True); os._exit(3)", {}, 3, "True"),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_program_in_one_process(name):
    body, env, code, printed = ALONE[name]
    done = run_alone(body, env)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (code, printed, "")


def test_a_rank_has_the_same_bits_whoever_loaded_numpy_first():
    product = "a = np.random.default_rng(0).standard_normal((700, 700)); print((a @ a).tobytes().hex()[:4000])"
    late, early = run_alone(f"world(); {product}"), run_alone(product, {"OPENBLAS_NUM_THREADS": "1"})
    assert late.stdout == early.stdout != ""


REFUSED = {  # a program, variables of its environment, and what the line of the error has of both
    "a usage error of threads": (
        "launch(lambda c: DeviceMesh(c, dp=2), threads=3)",
        {},
        ["dp = 2", "this process started 3"],
    ),
    "no memory on threads": ("def f(c): raise MemoryError('16 GiB')\nlaunch(f, threads=3)", {}, ["16 GiB"]),
    "torchrun": ("launch(print)", {"WORLD_SIZE": "2", "RANK": "0"}, ["WORLD_SIZE = 2", "mpirun -n 2"]),
    "srun": (
        "launch(print)",
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
        ["SLURM_STEP_NUM_TASKS = 4", "mpirun -n 4"],
    ),
    "ranks that MPI does not see": ("launch(print)", {"PMI_SIZE": "4", "PMI_RANK": "0"}, ["PMI_SIZE = 4", "sees 1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_start_that_cannot_be_is_one_line_and_code_2(name):
    body, env, values = REFUSED[name]
    assert_one_line(run_alone(body, env), *values)


# ---- several ---------------------------------------------------------------------------------------------------------


def test_ranks_without_mpi_say_so_each():
    """They do not know of one another."""
    result = run_mpi(2, HEADER + "sys.modules['mpi4py'] = None; launch(print)", SECONDS)
    (line,) = set(result.stderr.splitlines())
    assert result.returncode == 2 and "2 processes were started, but MPI sees 1 rank" in line


def test_launch_returns_the_result_of_this_rank():
    """There are as many ranks as mpirun has started, whatever other launchers' variables say."""
    body = "sys.stdout.write(f'{launch(lambda comm: (comm.rank, comm.size))}\\n')"
    result = run_mpi(3, HEADER + body, SECONDS, {"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "8"})
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["(0, 3)", "(1, 3)", "(2, 3)"])
