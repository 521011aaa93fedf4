"""The planner against the program on more ranks and in more layouts than tests/plan/test_runs.py has."""

import numpy as np
import pytest
from plan.one_thread import OneThread
from plan.test_runs import EXPERTS, GPT, LLAMA, ROUTED, TIMED, compared, measured, planned

from minipar.comm import DeviceMesh, ModelClock, Network
from minipar.plan.cluster import AlphaBeta, fetch_seconds, gather_seconds, model_clock_cluster
from minipar.plan.rank_bytes import memory, volume

LARGE = [
    "--dp 64 --zero-stage 3 --microbatches 2 --layers 3",
    "--dp 8 --tp 4 --pp 2 --zero-stage 1 --sequence-parallel --layers 4",
    "--dp 8 --tp 2 --pp 4 --microbatches 8",
    "--dp 4 --tp 4 --pp 4 --zero-stage 2 --sequence-parallel --recompute full",
    "--dp 2 --tp 4 --pp 8 --zero-stage 1 --microbatches 8 --layers 16 --schedule interleaved-1f1b --virtual-stages 2",
    "--dp 8 --pp 8 --microbatches 8 --schedule zb-h1",
    "--dp 8 --tp 4 --pp 4 --zero-stage 1 --sequence-parallel --layers 4",
]


@pytest.mark.parametrize("flags", LARGE)
def test_64_ranks_and_more_take_the_predicted_time(flags):
    measured, predicted = compared(1e9, f"{GPT} {flags}")
    assert predicted == pytest.approx(measured, rel=0.05)


STEPS = [
    (1e-9, 1e10, f"{GPT}"),
    (1e-3, 1e10, f"{GPT} --dp 16"),
    (1e-3, 1e10, f"{GPT} --dp 16 --zero-stage 1"),
    (1e-3, 1e10, f"{GPT} --dp 16 --zero-stage 3"),
    (1e-3, 1e10, f"{GPT} --dp 16 --zero-stage 1 --zero-replicas 2"),
    (1e-3, 1e10, f"{GPT} --dp 16 --zero-stage 3 --zero-replicas 4 --microbatches 1"),
    (1e-3, 1e10, f"{GPT} --dp 8 --tp 2 --zero-stage 3 --zero-replicas 2"),
    (5e-2, 1e10, f"{GPT} --dp 4 --pp 4 --zero-stage 2 --zero-replicas 2"),
    (1e-4, 1e10, f"{GPT} --tp 4 --sequence-parallel --recompute full"),
    (1e-2, 1e10, f"{GPT} --tp 2 --vocab-size 1000"),
    (1e-3, 1e10, f"{GPT} --pp 4 --microbatches 8"),
    (1e-3, 1e10, f"{GPT} --pp 3 --vocab-size 500"),
    (5e-3, 1e10, f"{GPT} --pp 4 --schedule zb-h2 --microbatches 8"),
    (5e-2, 1e10, f"{GPT} --tp 2 --pp 4 --schedule zb-h1 --microbatches 8"),
    (1e-2, 1e10, f"{GPT} --dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel --schedule zb-h1"),
    (1e-2, 1e10, f"{GPT} --dp 2 --pp 4 --zero-stage 2"),
    (5e-2, 1e10, f"{GPT} --dp 4 --pp 4 --zero-stage 1"),  # some neighbours of this pipeline share a host
    (3e-4, 3e11, f"{TIMED} --cp 2 --recompute full"),
    (3e-4, 3e11, f"{TIMED} --dp 2 --cp 2 --zero-stage 3"),
    (3e-4, 1e9, f"{TIMED} --cp 2 --pp 2 --microbatches 4"),
    (2e-2, 1e10, f"{ROUTED} --dp 2 --cp 2 --ep 4"),
    (2e-2, 3e11, f"{ROUTED} --dp 2 --ep 2 --recompute full"),
    (2e-2, 1e10, f"{ROUTED} --dp 4 --tp 2 --ep 2 --sequence-parallel"),
]


@pytest.mark.parametrize(("bound", "flops", "flags"), STEPS)
def test_a_step_takes_the_predicted_time(bound, flops, flags):
    measured, predicted = compared(flops, flags)
    assert predicted == pytest.approx(measured, rel=bound)


RUNS = [
    "--cp 4 --context-parallel ulysses",
    f"--cp 4 --seq-len 256 --global-batch 4 {LLAMA}",
    "--cp 2 --tp 2 --sequence-parallel --zero-stage 1",
    f"--dp 4 --ep 2 --zero-stage 3 {EXPERTS}",
    f"--dp 4 --ep 2 --zero-stage 2 --microbatches 2 --seq-len 256 --global-batch 8 {EXPERTS}",
    f"--dp 2 --pp 2 --ep 2 --microbatches 4 --schedule zb-h1 --zero-stage 1 {EXPERTS}",
    f"--dp 2 --cp 2 --tp 2 --ep 4 --sequence-parallel --zero-stage 3 {EXPERTS}",
]


@pytest.mark.parametrize("flags", RUNS)
def test_bytes_over_cp_and_ep_and_the_peak_are_a_runs(flags):
    sent, peak = measured(flags)
    predicted = volume(*planned(flags))
    assert [(rank["cp"], rank["ep"]) for rank in sent] == [(predicted.cp, predicted.ep)] * len(sent)
    assert memory(*planned(flags)).total == pytest.approx(peak, rel=0.10)


INSIDE, BETWEEN = AlphaBeta(3e-6, 1 / 200e9), AlphaBeta(14e-6, 1 / 20e9)
NETWORK = Network(INSIDE.alpha, INSIDE.beta, Network(BETWEEN.alpha, BETWEEN.beta), per_host=8)


def test_collectives_of_512_ranks_take_what_the_planner_says():
    """64 hosts of 8: a sum inside each host, gradients between hosts, parameters back; seconds for seconds."""
    world = OneThread(512, ModelClock, NETWORK)
    meshes = [DeviceMesh(comm, tp=8) for comm in world.ranks]
    cluster = model_clock_cluster(512, 1e12, INSIDE, BETWEEN, per_host=8)
    n = 512 * 8
    arrays = [np.ones(n, np.float32) for _ in world.ranks]
    parts = [np.ones(n // 64, np.float32) for _ in world.ranks]
    rows = list(zip(meshes, arrays, parts, strict=True))
    moments = [
        world.take_turns([mesh.tp.all_reduce(x, algorithm="ring", async_op=True) for mesh, x, _ in rows]),
        world.take_turns([mesh.dp.all_reduce(x, algorithm="ring", async_op=True) for mesh, x, _ in rows]),
        world.take_turns(
            [mesh.dp.all_gather(part, out=x, algorithm="pairwise", async_op=True) for mesh, x, part in rows]
        ),
    ]
    seconds = [
        2 * gather_seconds(cluster, 4 * n, 1, 8),
        2 * gather_seconds(cluster, 4 * n, 8, 64),
        fetch_seconds(cluster, 4 * n, 8, 64),
    ]
    assert np.diff([0.0, *moments]) == pytest.approx(seconds, rel=1e-9)
    assert all((x == 1).all() for x in arrays)
