"""Claims about hundreds of ranks in one thread: what they compute, what the clock says, what is refused."""

import numpy as np
import pytest
from one_thread import OneThread

from minipar.comm import DeviceMesh, ModelClock, Network, run_local
from minipar.errors import CommunicationError
from minipar.plan.cluster import AlphaBeta, fetch_seconds, gather_seconds, model_clock_cluster

INSIDE, BETWEEN = AlphaBeta(3e-6, 1 / 200e9), AlphaBeta(14e-6, 1 / 20e9)
NETWORK = Network(INSIDE.alpha, INSIDE.beta, Network(BETWEEN.alpha, BETWEEN.beta), per_host=8)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ["ring", "ordered", "recursive_doubling"])
def test_one_thread_sums_and_ends_when_threads_do(size, algorithm):
    def program(comm):
        x = np.arange(7.0) + comm.rank
        comm.all_reduce(x, algorithm=algorithm)
        return x.tolist(), comm.clock.now()

    threads = run_local(size, program, clock="model", network=NETWORK)
    world = OneThread(size, ModelClock, NETWORK)
    arrays = [np.arange(7.0) + comm.rank for comm in world.ranks]
    works = [
        comm.all_reduce(x, algorithm=algorithm, async_op=True) for comm, x in zip(world.ranks, arrays, strict=True)
    ]
    end = world.take_turns(works)
    assert [(x.tolist(), comm.clock.now()) for x, comm in zip(arrays, world.ranks, strict=True)] == threads
    assert end == max(seconds for _, seconds in threads)


def test_a_rank_that_has_not_begun_is_named():
    world = OneThread(3, ModelClock)
    works = [comm.all_reduce(np.zeros(3), algorithm="ring", async_op=True) for comm in world.ranks[:2]]
    with pytest.raises(CommunicationError, match="no message is on its way: rank 0, all_reduce ring: .* rank 2"):
        world.take_turns(works)


@pytest.mark.long
def test_512_ranks_take_what_the_planner_says():
    """Communication alone, 64 hosts of 8: a sum inside each host, gradients between hosts, parameters back, a sum over
    all; seconds for seconds. (A larger array would take longer to compute, and prove no more.)
    """
    world = OneThread(512, ModelClock, NETWORK)
    meshes = [DeviceMesh(comm, tp=8) for comm in world.ranks]
    cluster = model_clock_cluster(512, 1e12, INSIDE, BETWEEN, per_host=8)
    n = 512 * 8
    arrays = [np.ones(n, np.float32) for _ in world.ranks]
    rows = list(zip(meshes, arrays, strict=True))
    expected, elapsed = [], []

    def phase(seconds, works):
        before = sum(elapsed)
        elapsed.append(world.take_turns(works) - before)
        expected.append(seconds)

    phase(
        2 * gather_seconds(cluster, 4 * n, 1, 8),
        [mesh.tp.all_reduce(x, algorithm="ring", async_op=True) for mesh, x in rows],
    )
    phase(
        2 * gather_seconds(cluster, 4 * n, 8, 64),
        [mesh.dp.all_reduce(x, algorithm="ring", async_op=True) for mesh, x in rows],
    )
    parts = [np.ones(n // 64, np.float32) for _ in world.ranks]
    phase(
        fetch_seconds(cluster, 4 * n, 8, 64),
        [
            mesh.dp.all_gather(part, out=x, algorithm="pairwise", async_op=True)
            for (mesh, x), part in zip(rows, parts, strict=True)
        ],
    )
    assert elapsed == pytest.approx(expected, rel=1e-9)
    assert all((x == 1).all() for x in arrays)
