"""Claims about pipelines under mpirun: each schedule's gradients."""

from launcher import run_mpi

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


def test_every_gradient_has_one_devices_bits():
    result = run_mpi(4, SCHEDULES)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "every claim holds\n"
