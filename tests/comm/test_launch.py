"""How a job ends: a mistake with one line and code 2, a failure with its traceback, and never by hanging."""

import subprocess
import sys
import time

import pytest
from launcher import ROOT, MPITimeout, interrupt_mpi, run_mpi

HEADER = "import sys, time\nimport numpy as np\nfrom minipar.comm import *\nfrom minipar.errors import UsageError\n"
SECONDS = 30.0  # starting 4 ranks on a busy machine, and ending them


def run(n, body, timeout=SECONDS, **kwargs):
    start = time.monotonic()
    result = run_mpi(n, HEADER + body, timeout=timeout, **kwargs)
    return result, time.monotonic() - start


@pytest.mark.parametrize("n", [1, 4])
def test_a_usage_error_is_one_line_and_code_2(n):
    result, _ = run(n, "def program(comm):\n    raise UsageError('dp*tp*pp = 12,\\nbut')\nmain(program)")
    assert result.returncode == 2
    assert result.stderr == "minipar: error: dp*tp*pp = 12, but\n"
    assert result.stdout == ""


def test_a_mesh_that_does_not_fit_names_mpirun():
    result, _ = run(4, "main(lambda comm: DeviceMesh(comm, dp=2, tp=3))")
    assert result.returncode == 2
    assert result.stderr == "minipar: error: dp*tp = 2*3 = 6, but mpirun started 4 ranks\n"


def test_a_usage_error_on_one_rank_alone_ends_the_job():
    body = "def program(comm):\n    if comm.rank == 2: raise UsageError('only here')\n    comm.barrier()\nmain(program)"
    result, _ = run(4, body)
    assert result.returncode == 2
    assert result.stderr.count("minipar: error: only here\n") == 1


@pytest.mark.parametrize("entry", ["main(program)", "program(world())"])
def test_an_exception_on_one_rank_aborts_the_job_with_its_traceback(entry):
    body = f"def program(comm):\n    if comm.rank == 1: raise KeyError('broken')\n    comm.barrier()\n{entry}"
    result, seconds = run(4, body)
    assert result.returncode != 0
    assert "rank 1:\nTraceback" in result.stderr and "KeyError: 'broken'" in result.stderr
    assert seconds < SECONDS


def test_leaving_early_on_one_rank_ends_the_job():
    result, _ = run(3, "def program(comm):\n    if comm.rank == 1: sys.exit(3)\n    comm.barrier()\nmain(program)")
    assert result.returncode != 0


@pytest.mark.parametrize("sizes", ["[100, 101]", "[200_000, 200_001]"])
def test_wrong_sizes_end_every_rank(sizes):
    body = f"main(lambda comm: comm.all_reduce(np.zeros({sizes}[comm.rank])))"
    result, _ = run(2, body)
    assert result.returncode != 0
    assert "CommunicationError" in result.stderr and "expected" in result.stderr and "arrived" in result.stderr


@pytest.mark.parametrize(
    ("n", "call"),
    [
        (4, "comm.all_reduce(np.zeros(10 if comm.rank < 2 else 100_000))"),
        (2, "comm.barrier() if comm.rank == 0 else comm.all_reduce(np.zeros(5))"),
    ],
)
def test_ranks_in_different_operations_do_not_wait_for_ever(n, call):
    """A message of the wrong size says so; where the messages would never come, MINIPAR_TIMEOUT ends the wait."""
    result, _ = run(n, f"main(lambda comm: {call})", env={"MINIPAR_TIMEOUT": "2"})
    assert result.returncode != 0
    assert "CommunicationError" in result.stderr and ("arrived" in result.stderr or "nothing for 2 s" in result.stderr)


def test_a_message_that_is_too_short_is_an_error_too():
    """MPI delivers it without a word; only the count that arrived tells."""
    body = "main(lambda comm: (comm.irecv(np.zeros(5), 0) if comm.rank else comm.isend(np.zeros(4), 1)).wait())"
    result, _ = run(2, body)
    assert result.returncode != 0
    assert "rank 1, recv: expected 40 bytes from rank 0 (tag 0), but 32 arrived" in result.stderr


def test_a_silent_peer_ends_the_wait():
    body = "def program(comm):\n    if comm.rank == 0: time.sleep(60)\n    comm.barrier()\nmain(program)"
    result, _ = run(2, body, env={"MINIPAR_TIMEOUT": "1"})
    assert result.returncode != 0
    assert "rank 1, barrier dissemination: receive of 0 bytes from rank 0" in result.stderr
    assert "nothing for 1 s (MINIPAR_TIMEOUT)" in result.stderr


def test_one_process_without_mpirun_is_a_world_of_one():
    script = HEADER + "main(lambda comm: print(comm.rank, comm.size, comm.all_reduce(np.ones(2)).tolist()))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 [1.0, 1.0]\n", "")


def test_ranks_without_an_mpi_library_say_so():
    script = "import sys; sys.modules['mpi4py'] = None\n" + HEADER + "main(print)"
    result = run_mpi(2, script, timeout=SECONDS)
    assert result.returncode == 2
    assert result.stderr.startswith("minipar: error: mpirun started 2 ranks, but MPI cannot be loaded")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "many"], "--sizes many: expected bytes, such as 4096, 64K or 1M"),
        (["--ops", "gossip"], "--ops gossip: expected some of all_reduce"),
        (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
    ],
)
def test_bad_bench_arguments_are_one_line(arguments, message):
    result = run_mpi(2, ["-m", "minipar.bench", "collectives", *arguments], timeout=SECONDS)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and message in result.stderr


def test_a_hang_shows_every_ranks_stack():
    body = "def stuck_here(comm):\n    comm.irecv(np.zeros(1), 0, tag=comm.rank + 1).wait()\nmain(stuck_here)"
    with pytest.raises(MPITimeout) as caught:
        run(2, body, timeout=5)
    text = str(caught.value)
    for rank in (0, 1):
        stack = text.split(f"--- rank {rank}\n")[1].split("---")[0]
        assert "in stuck_here" in stack and "in wait" in stack


@pytest.mark.parametrize("ranks", [1, 3])
def test_ctrl_c_ends_the_job_with_one_line_of_its_own(ranks, tmp_path):
    started = tmp_path / "started"
    script = tmp_path / "waits.py"
    script.write_text(
        "import pathlib, time\n"
        "from minipar.comm import main\n"
        "def wait(comm):\n"
        "    comm.barrier()\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        "    time.sleep(60)\n"
        "main(wait)\n"
    )
    result = interrupt_mpi(ranks, [str(script)], started.exists, timeout=30)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert result.stderr.count("minipar: interrupted") == 1
