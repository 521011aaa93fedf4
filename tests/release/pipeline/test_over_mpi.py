"""Claims about pipelines under mpirun: each schedule's gradients, and what ends where sends block until received."""

import pytest
from launcher import ROOT, run_mpi

ENVIRONMENT = {"MINIPAR_TIMEOUT": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}"}

SCHEDULES = """
from minipar.comm.launch import launch
from minipar.parallel.pipeline.schedules import make
from pipeline_cases import execute_rank, one_device

def program(comm):
    for name, m, layers in (("1f1b", 5, 5), ("interleaved-1f1b", 4, 9), ("zb-h1", 3, 6), ("zbv", 6, 8),
                            ("dualpipev", 8, 8)):
        run = execute_rank(comm, make(name, comm.size, m), layers, recompute=name == "1f1b")
        expected = one_device(layers, m)
        mine = {leaf: g for leaf, g in run.gradients.items() if g is not None}
        wrong = [leaf for leaf, g in mine.items() if g.tobytes() != expected[leaf].tobytes()]
        assert not wrong, (name, comm.rank, wrong)
        names = comm.all_gather_bytes(",".join(mine).encode())
        assert sorted(",".join(n.decode() for n in names).split(",")) == sorted(expected), name
    if comm.rank == 0:
        print("every claim holds")

launch(program)
"""

ONE_STEP = """
import sys
from one_at_a_time import OneAtATime, walk
from schedule_cases import schedule
from minipar.comm import world

walk(OneAtATime(world(), sys.argv[3]), schedule(*sys.argv[1:3]), int(sys.argv[4]))
print("ended")
"""
SEND_FIRST = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


def test_every_gradient_has_one_devices_bits():
    result = run_mpi(4, SCHEDULES)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "every claim holds\n"


CASES = [("pair", 1 << 17, 0), ("direction", 1 << 17, 2), ("pair", 1, 2)]


@pytest.mark.parametrize(("channel", "elements", "ends"), CASES)
def test_the_deadline_ends_what_the_checker_refuses(channel, elements, ends, tmp_path):
    """If messages are large: MPI copies small ones aside, so that a toy model passes."""
    program = tmp_path / "step.py"
    program.write_text(ONE_STEP)
    job = run_mpi(2, [str(program), *SEND_FIRST, channel, str(elements)], env=ENVIRONMENT)
    assert job.stdout.count("ended") == ends and (job.returncode != 0) == (ends == 0), job.stderr
