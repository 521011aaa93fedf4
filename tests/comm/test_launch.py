"""The beginning and the end of a job: a mistake is one line and code 2, a failure a traceback, and nothing hangs."""

import os
import re
import subprocess
import sys
import time

import pytest
from launcher import ROOT, MPITimeout, interrupt_mpi, mpirun_is_open_mpi, run_each, run_mpi, seconds_of_help

from minipar.comm.launch import launch
from minipar.errors import UsageError, error_line

HEADER = """import sys, time
import numpy as np
from minipar.comm import *
from minipar.comm.launch import launch
from minipar.errors import UsageError
"""
SECONDS = 30.0  # starting 4 ranks on a busy machine, and ending them


def run(n, body, timeout=SECONDS, **kwargs):
    start = time.monotonic()
    result = run_mpi(n, HEADER + body, timeout=timeout, **kwargs)
    return result, time.monotonic() - start


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


def assert_one_line(result, *facts):
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("minipar: error: ") and result.stderr.count("\n") == 1
    assert all(fact in result.stderr for fact in facts), result.stderr


@pytest.mark.parametrize("n", [1, 3])
def test_a_usage_error_is_one_line_and_code_2(n):
    result, _ = run(n, "def program(comm):\n    raise UsageError('dp*tp*pp = 12,\\nbut')\nmain(program)")
    assert result.returncode == 2
    assert result.stderr == "minipar: error: dp*tp*pp = 12, but\n"
    assert result.stdout == ""


def test_a_mesh_that_does_not_fit_names_mpirun():
    result, _ = run(2, "main(lambda comm: DeviceMesh(comm, dp=2, tp=3))")
    assert result.returncode == 2
    assert result.stderr == "minipar: error: dp*tp = 2*3 = 6, but mpirun started 2 ranks\n"


def test_a_usage_error_on_one_rank_alone_ends_the_job():
    body = "def program(comm):\n    if comm.rank == 2: raise UsageError('only here')\n    comm.barrier()\nmain(program)"
    result, _ = run(3, body)
    assert result.returncode == 2
    if not mpirun_is_open_mpi():
        assert result.stderr == "minipar: error: only here\n"  # and none of MPI_Abort's
    assert result.stderr.count("minipar: error: only here\n") == 1


@pytest.mark.parametrize(("leaves_with", "code"), [(3, 3), (256, 1), (-1, 255)])
def test_an_exit_code_is_that_of_mpirun_and_never_0(leaves_with, code):
    body = f"def program(comm):\n    if comm.rank: sys.exit({leaves_with})\n    comm.barrier()\nmain(program)"
    result, _ = run(2, body)
    assert result.returncode == code
    assert f"minipar: rank 1 exits with {leaves_with}, and not every rank does\n" in result.stderr


@pytest.mark.parametrize("entry", ["main(program)", "program(world())"])
def test_an_exception_on_one_rank_ends_the_job(entry):
    body = f"def program(comm):\n    if comm.rank == 1: raise KeyError('broken')\n    comm.barrier()\n{entry}"
    result, seconds = run(3, body)
    assert result.returncode == 1
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
def test_ranks_in_different_operations_end_with_an_error(n, call):
    """A message of the wrong size says so; where the messages would never come, MINIPAR_TIMEOUT ends the wait."""
    result, _ = run(n, f"main(lambda comm: {call})", env={"MINIPAR_TIMEOUT": "2"})
    assert result.returncode != 0
    assert "CommunicationError" in result.stderr and ("arrived" in result.stderr or "nothing for 2 s" in result.stderr)


def test_a_message_that_is_too_short_is_an_error_too():
    """MPI delivers it without a word; only the count that arrived tells."""
    body = "main(lambda comm: (comm.irecv(np.zeros(5), 0) if comm.rank else comm.isend(np.zeros(4), 1)).wait())"
    result, _ = run(2, body)
    assert result.returncode != 0
    assert "rank 1, recv: rank 0 sent 32 bytes (tag 0), but 40 were expected" in result.stderr


def test_a_silent_peer_ends_the_wait():
    body = "def program(comm):\n    if comm.rank == 0: time.sleep(60)\n    comm.barrier()\nmain(program)"
    result, _ = run(2, body, env={"MINIPAR_TIMEOUT": "1"})
    assert result.returncode != 0
    assert "rank 1, barrier dissemination: receive from rank 0 (0 bytes, barrier of uint8" in result.stderr
    assert "nothing for 1 s (MINIPAR_TIMEOUT)" in result.stderr


def test_one_process_without_mpirun_is_a_world_of_one():
    done = run_alone("main(lambda comm: print(comm.rank, comm.size, comm.all_reduce(np.ones(2)).tolist()))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 [1.0, 1.0]\n", "")


@pytest.mark.parametrize(("value", "code"), [("3", 3), ("'text'", 0), ("None", 0)])
def test_main_exits_with_the_int_that_a_program_returns(value, code):
    done = run_alone(f"main(lambda comm: {value})")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_ranks_without_an_mpi_library_say_so():
    script = "import sys; sys.modules['mpi4py'] = None\n" + HEADER + "main(print)"
    assert_one_line(run_mpi(2, script, timeout=SECONDS), "mpirun started 2 ranks, but MPI cannot be loaded")


def test_bad_bench_arguments_are_one_line():
    messages = {
        "--sizes many": "--sizes many: expected bytes, such as 4096, 64K or 1M",
        "--ops gossip": "--ops gossip: expected some of all_reduce",
        "--dtype float8": "argument --dtype: invalid choice: 'float8'",
    }
    results = run_each(2, [["minipar.bench", "collectives", *flags.split()] for flags in messages], timeout=SECONDS)
    for result, message in zip(results, messages.values(), strict=True):
        assert_one_line(result, message)


def test_a_hang_shows_every_ranks_stack():
    body = "def stuck_here(comm):\n    comm.irecv(np.zeros(1), 0, tag=comm.rank + 1).wait()\nmain(stuck_here)"
    with pytest.raises(MPITimeout) as caught:
        run(2, body, timeout=4 + 2 * seconds_of_help(2))  # a busy machine starts ranks late
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
    if not mpirun_is_open_mpi():  # Open MPI does not pass the signal on: it kills the ranks, and nothing is printed
        assert (result.returncode, result.stderr) == (130, "minipar: interrupted\n")


# ---- launch ----------------------------------------------------------------------------------------------------------


WAYS_IN = {
    "a script": "launch(lambda comm: None)",
    "a program": "main(lambda comm: None)",
    "the world": "world()",
    "a command": "sys.argv = ['x', '--steps', '1']; from minipar.train.__main__ import run; main(run)",
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("value", ["x", "nan", "0", "-1", "", "inf", "1e400"])
def test_a_wrong_timeout_is_one_line_before_mpi_starts(value):
    result, _ = run(2, "launch(lambda comm: None)", env={"MINIPAR_TIMEOUT": value})
    line = f"minipar: error: MINIPAR_TIMEOUT={value}: expected a positive, finite number of seconds\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS_IN)
def test_a_wrong_timeout_is_one_line_on_every_way_in(way):
    line = "MINIPAR_TIMEOUT=x: expected a positive, finite number of seconds\n"
    results = [run_alone(WAYS_IN[way], env={"MINIPAR_TIMEOUT": "x"})]
    results += [run(2, WAYS_IN[way], env={"MINIPAR_TIMEOUT": "x"})[0]] * (way != "the world")
    for result in results:
        assert result.returncode != 0 and result.stdout == "" and result.stderr.endswith(line)
        if way != "the world":
            assert result.returncode == 2 and result.stderr == f"minipar: error: {line}"


def test_launch_returns_the_result_of_this_rank():
    result, _ = run(3, "sys.stdout.write(f'{launch(lambda comm: (comm.rank, comm.size))}\\n')")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["(0, 3)", "(1, 3)", "(2, 3)"]
    assert run_alone("print(launch(lambda comm: (comm.rank, comm.size)))").stdout == "(0, 1)\n"


def test_launch_with_threads_returns_all_results():
    assert launch(lambda comm: (comm.rank, comm.size), threads=3) == [(0, 3), (1, 3), (2, 3)]


def test_launch_with_threads_raises_the_first_exception():
    def program(comm):
        if comm.rank == 1:
            raise KeyError("rank 1")
        comm.barrier()

    with pytest.raises(KeyError, match="rank 1"):
        launch(program, threads=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "error", "code", "text"),
    [
        ("(0, 1)", "UsageError('everywhere')", 2, "minipar: error: everywhere\n"),
        ("(1,)", "UsageError('here')", 2, "minipar: error: here\n"),
        ("(0, 1)", "MemoryError('no 16 GiB')", 2, "minipar: error: no 16 GiB\n"),
        ("(0, 1)", "MemoryError()", 2, "minipar: error: out of memory\n"),
        ("(1,)", "KeyError('broken')", 1, "rank 1:\nTraceback"),
    ],
)
def test_an_error_in_launch_ends_every_rank(ranks, error, code, text):
    body = f"def program(comm):\n    if comm.rank in {ranks}: raise {error}\n    comm.barrier()\nlaunch(program)"
    result, _ = run(2, body)
    assert result.returncode == code and result.stderr.count(text) == 1


# ---- an exception that several ranks have ----------------------------------------------------------------------------


def exceptions(stderr):
    """The ranks that printed a traceback, and the last lines of these."""
    return re.findall(r"^rank (\d+):$", stderr, re.MULTILINE), re.findall(r"^ValueError: (.*)$", stderr, re.MULTILINE)


@pytest.mark.parametrize("start", ["main(program)", "program(world())"])
def test_an_exception_of_all_ranks_is_printed_once(start):
    work = "comm.all_reduce(np.ones(3), async_op=True)"
    body = f"def program(comm):\n    {work}\n    raise ValueError('everywhere')\n{start}"
    result, seconds = run(4, body)
    assert result.returncode == 1 and seconds < SECONDS
    assert exceptions(result.stderr) == (["0"], ["everywhere"])
    assert "minipar: the same on rank 1, 2, 3\n" in result.stderr and "never waited for" not in result.stderr


def test_exceptions_that_differ_are_all_printed():
    body = "def program(comm):\n    raise ValueError(f'in {comm.rank // 2}')\nmain(program)"
    result, _ = run(4, body)
    assert result.returncode == 1
    ranks, lines = exceptions(result.stderr)
    assert sorted(ranks) == ["0", "2"] and sorted(lines) == ["in 0", "in 1"]
    assert "minipar: the same on rank 1\n" in result.stderr and "minipar: the same on rank 3\n" in result.stderr


@pytest.mark.parametrize("later", [0, 1, 2])
def test_an_exception_before_the_last_is_not_lost(later):
    """The rank that fails half a second later prints too, and its end does not come before the others' text."""
    body = (
        "def program(comm):\n    if comm.rank == {0}: time.sleep(0.5)\n    raise ValueError(comm.rank)\nmain(program)"
    )
    result, _ = run(3, body.format(later))
    ranks, lines = exceptions(result.stderr)
    assert sorted(ranks) == sorted(lines) == ["0", "1", "2"]


def test_an_exception_is_printed_though_who_should_print_it_died():
    """Rank 0 tells the others that it has the exception, and is killed before it prints."""
    body = """
import zlib
from minipar.comm.mpi import RAISED

def program(comm):
    notices = comm.transport.notices
    def dies(text):
        notices.send(RAISED, zlib.crc32(text.encode()))
        time.sleep(60)
    if comm.rank == 0:
        notices.print_once = dies
    raise ValueError("lost")

main(program)
"""
    result, seconds = run(2, body)
    assert exceptions(result.stderr) == (["1"], ["lost"]) and seconds < SECONDS


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["UsageError('why')", "MemoryError('why')"])
def test_a_usage_error_of_threads_is_one_line_and_code_2(error):
    assert_one_line(run_alone(f"def program(comm):\n    raise {error}\nlaunch(program, threads=3)"), "error: why\n")


def test_threads_are_called_as_the_user_started_them():
    body = "launch(lambda comm: DeviceMesh(comm, dp=2), threads=3)"
    assert_one_line(run_alone(body), "dp = 2, but mp.launch(main, threads=3) started 3 ranks")
    assert_one_line(run_alone("launch(print, threads=0)"), "mp.launch(main, threads=0) needs at least 1 rank, not 0")


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("here"), 2), (SystemExit(3), 3), (SystemExit("why"), "why"), (KeyboardInterrupt(), 130)],
)
def test_a_rank_exits_though_its_abort_returns(error, code, monkeypatch):
    """Another rank's abort came first: the second one returns, and the program must not go on."""

    class SecondOfTwo:
        rank, size = 1, 2

    def program(comm):
        raise error

    codes = []
    monkeypatch.setattr(sys.modules["minipar.comm.launch"], "world", SecondOfTwo)
    monkeypatch.setattr("minipar.comm.ending.everyone_fails", lambda comm: False)
    monkeypatch.setattr("minipar.comm.mpi.abort", codes.append)
    with pytest.raises(SystemExit) as leaving:
        launch(program)
    assert leaving.value.code == code and codes == [code if isinstance(code, int) else 1]


def test_threads_under_mpirun_are_rejected():
    result = run_mpi(2, HEADER + "launch(print, threads=4)", timeout=SECONDS)
    assert_one_line(result, "launch(threads=4) runs its ranks in one process, but mpirun started 2")


NOT_FOUR_RANKS = "mpirun started 4 ranks, but the MPI library sees 1"  # by the variables of MPICH's mpirun
if mpirun_is_open_mpi():
    NOT_FOUR_RANKS = "mpirun is MPICH's, but mpi4py loads Open MPI"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["torchrun started 2 ranks", "start with mpirun -n 2 python"]),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, ["srun started 4 ranks", "start with mpirun -n 4 python"]),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, [NOT_FOUR_RANKS]),
        ({"PMI_SIZE": "4", "PMI_RANK": "99"}, [NOT_FOUR_RANKS]),
        ({"PMI_SIZE": "x"}, ["PMI_SIZE=x: expected a number of ranks"]),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "77"}, ["PMI_FD=77", "unset PMI_FD"]),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "MPI4PY_MPIABI": "mpich"},
            ["mpirun is Open MPI's, but mpi4py loads MPICH", "MPI4PY_MPIABI=openmpi"],
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI4PY_MPIABI": "openmpi"},
            ["mpirun is MPICH's, but mpi4py loads Open MPI", "MPI4PY_MPIABI=mpich"],
        ),
    ],
)
def test_ranks_that_mpi_does_not_know_are_rejected(environment, facts):
    assert_one_line(run_alone("main(print)", environment), *facts)


def test_one_process_of_torchrun_is_a_world_of_one():
    assert run_alone("main(lambda comm: print(comm.size))", {"WORLD_SIZE": "1"}).stdout == "1\n"


def test_mpirun_has_the_last_word_on_the_number_of_ranks():
    result, _ = run(1, "main(lambda comm: print(comm.size))", env={"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "8"})
    assert (result.returncode, result.stdout) == (0, "1\n")


# ---- the process -----------------------------------------------------------------------------------------------------

THREADS = (
    "from threadpoolctl import threadpool_info\ndef threads(): return {p['num_threads'] for p in threadpool_info()}\n"
)


def test_importing_minipar_changes_nothing_in_the_process():
    state = "(dict(os.environ), threads(), sys.excepthook)"
    body = f"import os, numpy\n{THREADS}before = {state}\nimport minipar.train.trainer\nprint({state} == before)"
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + body], capture_output=True, text=True, timeout=SECONDS, cwd=ROOT
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("entry", ["world()", "launch(lambda comm: None)"])
def test_a_rank_has_one_blas_thread(entry):
    assert run_alone(f"{THREADS}{entry}; print(threads())").stdout == "{1}\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_alone_leaves_as_any_python_program(code):
    """It has nobody to wait for it: its errors and its exits stay Python's own."""
    done = run_alone(
        f"import os, sys; world(); print(sys.excepthook is sys.__excepthook__, flush=True); os._exit({code})"
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "True\n", "")


def test_the_users_number_of_blas_threads_has_priority():
    assert run_alone(f"{THREADS}world(); print(threads())", {"OPENBLAS_NUM_THREADS": "2"}).stdout == "{2}\n"


def test_run_local_has_one_blas_thread_and_restores_the_others():
    body = "before = threads(); print(run_local(2, lambda comm: threads()), threads() == before)"
    assert run_alone(THREADS + body).stdout == "[{1}, {1}] True\n"


def test_a_rank_has_the_same_bits_whoever_loaded_numpy_first():
    product = "a = np.random.default_rng(0).standard_normal((700, 700)); print((a @ a).tobytes().hex()[:4000])"
    late, early = run_alone(f"world(); {product}"), run_alone(product, {"OPENBLAS_NUM_THREADS": "1"})
    assert late.stdout == early.stdout != ""


def test_an_error_shows_control_characters_escaped():
    line = error_line(UsageError("no file a\x1b[31mb\nhere, caf\u00e9"))
    assert line == r"minipar: error: no file a\x1b[31mb here, café"
