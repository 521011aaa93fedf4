"""DeviceMesh: rank order, its axes, and sizes that do not fit; traffic by axis."""

import numpy as np
import pytest

from minipar.comm import DeviceMesh, run_local, serial
from minipar.errors import UsageError


def test_tp_is_fastest_then_cp_then_dp_then_pp():
    """`dp_cp` has the ranks of both axes in their order."""

    def program(comm):
        mesh = DeviceMesh(comm, tp=2, cp=3, dp=2, pp=2)
        assert mesh.rank_at() == comm.rank == ((mesh.pp.rank * 2 + mesh.dp.rank) * 3 + mesh.cp.rank) * 2 + mesh.tp.rank
        assert mesh.dp_cp.rank == mesh.dp.rank * 3 + mesh.cp.rank and mesh.dp_cp.axis == "dp"
        assert DeviceMesh(comm, dp=24).dp_cp.ranks == comm.ranks
        return mesh.coordinates, [axis.ranks for axis in (mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.dp_cp)]

    placed = run_local(24, program)
    of_rank_0 = [[0, 1], [0, 2, 4], [0, 6], [0, 12], [0, 2, 4, 6, 8, 10]]
    of_rank_21 = [[20, 21], [19, 21, 23], [15, 21], [9, 21], [13, 15, 17, 19, 21, 23]]
    assert placed[0] == ({"tp": 0, "cp": 0, "dp": 0, "pp": 0}, of_rank_0)
    assert placed[21] == ({"tp": 1, "cp": 1, "dp": 1, "pp": 1}, of_rank_21)


def test_each_axis_has_its_own_ranks_in_any_order_of_axes():
    class PipelineFastest(DeviceMesh):
        AXES = ("pp", "cp", "dp", "tp")

    def program(comm):
        mesh = PipelineFastest(comm, tp=2, dp=3, pp=2)
        return mesh.tp.ranks, mesh.dp.ranks, mesh.pp.ranks

    assert run_local(12, program)[0] == ([0, 6], [0, 2, 4], [0, 1])


def test_a_mesh_of_some_ranks_knows_their_world_ranks():
    """Messages are priced by world ranks. Groups have names of their own, the same on all of their members."""

    def program(comm):
        mesh = DeviceMesh(comm.new_group(range(comm.rank % 2, comm.size, 2), "half"), tp=2)
        axes = [mesh.tp, mesh.dp, DeviceMesh(comm, tp=2).tp, DeviceMesh(comm, tp=2).tp]
        return [(tuple(axis.ranks), axis.name) for axis in axes]

    rows = run_local(8, program)
    assert [ranks for ranks, _ in rows[5]] == [(5, 7), (1, 5), (4, 5), (4, 5)]
    known = {group for row in rows for group in row}
    assert len(known) == 4 * 4 == len({name for _, name in known})


def test_dp_takes_what_tp_and_pp_leave():
    assert run_local(8, lambda comm: DeviceMesh(comm, tp=2, pp=2).shape)[0] == {"tp": 2, "cp": 1, "dp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("sizes", "equation"),
    [
        ({"dp": 2, "tp": 2, "pp": 3}, r"dp\*tp\*pp = 2\*2\*3 = 12,.* 8 ranks"),
        ({"dp": 2, "pp": 3}, r"^dp\*pp = 2\*3 = 6,.* 8 ranks"),
        ({"dp": 1}, r"^dp = 1,.* 8 ranks"),
        ({"tp": 3}, r"^tp = 3,.* 8 ranks"),
        ({"tp": 3, "pp": 2}, r"^tp\*pp = 3\*2 = 6,.* 8 ranks"),
        ({"dp": 0}, "dp = 0"),
    ],
)
def test_sizes_that_do_not_fit_show_what_was_given(sizes, equation):
    with pytest.raises(UsageError, match=equation):
        run_local(8, lambda comm: DeviceMesh(comm, **sizes))


@pytest.mark.parametrize(("sizes", "equation"), [({"tp": 3}, "tp = 3"), ({"dp": 2, "tp": 3}, r"dp\*tp = 2\*3 = 6")])
def test_a_mesh_on_one_process_says_how_to_start_several(sizes, equation):
    with pytest.raises(UsageError, match=f"^{equation}.*mpirun -n"):
        DeviceMesh(serial(), **sizes)


def test_traffic_is_counted_by_operation_and_axis_on_one_account():
    def program(comm):
        mesh = DeviceMesh(comm, dp=2, tp=3)
        comm.traffic.reset()
        mesh.tp.all_reduce(np.zeros(30), algorithm="ring")
        mesh.dp.all_reduce(np.zeros(30), algorithm="ring")
        mesh.dp.barrier()
        if comm.rank < 3:
            mesh.dp.isend(np.zeros(5), 1).wait()
        else:
            mesh.dp.irecv(np.zeros(5), 0).wait()
        return comm.traffic.counts, comm.traffic.bytes("all_reduce"), comm.traffic.messages(axis="dp")

    table, total, dp_messages = run_local(6, program)[0]
    assert table == {
        ("all_reduce", "tp"): [4, 4 * 80],
        ("all_reduce", "dp"): [2, 2 * 120],
        ("barrier", "dp"): [1, 0],
        ("send", "dp"): [1, 40],
    }
    assert total == 4 * 80 + 2 * 120
    assert dp_messages == 4


@pytest.mark.parametrize("ep", [3, 8])
def test_the_ranks_of_ep_divide_those_of_dp_and_cp(ep):
    with pytest.raises(UsageError, match=rf"ep.* = 4/{ep} "):
        run_local(4, lambda comm: DeviceMesh(comm, dp=2, cp=2, ep=ep))
