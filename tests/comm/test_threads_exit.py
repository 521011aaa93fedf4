"""Claims about sys.exit() on a rank that is a thread: it ends that rank as it would end a process."""

import subprocess
import sys

import numpy as np
import pytest

from minipar.comm import run_local
from minipar.errors import CommunicationError


def leave(code, ranks):
    """A program that these ranks leave with this code, while the others go on to a barrier."""

    def program(comm):
        if comm.rank in ranks:
            sys.exit(code)
        comm.barrier()

    return program


@pytest.mark.parametrize("code", [0, None])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_exits_has_returned_for_those_that_wait(size, code):
    with pytest.raises(CommunicationError, match="rank 1 has returned"):
        run_local(size, leave(code, {1}))


def test_ranks_that_nobody_waits_for_may_exit():
    def program(comm):
        if comm.rank > 0:
            sys.exit()
        return "done"

    assert run_local(3, program) == ["done", None, None]


@pytest.mark.parametrize("code", [0, None, 3, "why"])
def test_an_exit_of_every_rank_is_an_exit_of_the_program(code, capsys):
    with pytest.raises(SystemExit) as leaving:
        run_local(3, leave(code, {0, 1, 2}))
    assert leaving.value.code == (code or 0)
    assert capsys.readouterr().err == ""


def test_an_exit_with_an_error_on_one_rank_names_it(capsys):
    with pytest.raises(SystemExit) as leaving:
        run_local(3, leave(3, {1}))
    assert leaving.value.code == 3
    assert capsys.readouterr().err == "minipar: rank 1 exits with 3, and not every rank does\n"


def test_an_exit_with_an_error_counts_though_nobody_waits(capsys):
    with pytest.raises(SystemExit) as leaving:
        run_local(2, lambda comm: sys.exit(4) if comm.rank == 1 else None)
    assert leaving.value.code == 4
    assert "rank 1 exits with 4" in capsys.readouterr().err


def test_another_ranks_exception_is_not_hidden_by_an_exit():
    def program(comm):
        if comm.rank == 1:
            sys.exit(3)
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run_local(2, program)


def test_what_a_rank_has_sent_before_its_exit_arrives():
    def program(comm):
        if comm.rank == 1:
            comm.isend(np.full(1, 7.0), 0).wait()
            sys.exit(0)
        return comm.irecv(np.zeros(1), 1).wait().item()

    assert run_local(2, program) == [7.0, None]


def test_a_program_that_a_rank_leaves_ends_with_an_error():
    program = (
        "import sys, minipar as mp\n"
        "def main(world):\n"
        "    if world.rank == 1: sys.exit(0)\n"
        "    world.barrier()\n"
        "mp.launch(main, threads=4)\n"
    )
    job = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert job.returncode == 1 and "rank 1 has returned" in job.stderr
