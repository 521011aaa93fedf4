"""Units of a model and collectives of a cluster: their seconds in closed form, on the links of the data sheets."""

from dataclasses import astuple, replace

import pytest
from planning import a100s, layout

from minipar.plan.cluster import (
    GB,
    GPUS,
    AlphaBeta,
    Assumptions,
    Cluster,
    ComputeTime,
    Gpu,
    fetch_seconds,
    gather_seconds,
    scalar_seconds,
)
from minipar.plan.compute import unit_times
from minipar.plan.gpu_time import gpu_compute
from minipar.plan.layout import MINIPAR
from minipar.plan.model import find_model

# As data sheets print them: dense 16-bit TFLOP/s, GB, GB/s, GB/s of NVLink both ways, Gb/s of cards for each GPU.
SHEETS = {
    "v100": (125, 32, 900, 300, 4 * 100 / 8),
    "a100": (312, 80, 2039, 600, 200),
    "h100": (989, 80, 3350, 900, 400),
    "h200": (989, 141, 4800, 900, 400),
}


def test_gpus_are_those_of_the_data_sheets():
    assert list(GPUS) == list(SHEETS)
    for name, (flops, memory, bandwidth, nvlink, cards) in SHEETS.items():
        gpu = GPUS[name]
        assert (gpu.peak, gpu.memory, gpu.memory_bandwidth) == (flops * 1e12, memory * 1e9, bandwidth * 1e9)
        assert (gpu.inside, gpu.between) == (nvlink / 2 * 1e9, cards / 8 * 1e9)


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_a_ring_in_one_host_and_between_hosts():
    cluster = a100s(64)
    inside, between, n = cluster.inside, cluster.between, 1e9
    assert between == AlphaBeta(cluster.assumptions.alpha_between, 1 / (25e9 * 0.8))
    assert gather_seconds(cluster, n, 1, 1) == 0
    assert gather_seconds(cluster, n, 1, 8) == pytest.approx(7 * inside.alpha + n * 7 / 8 * inside.beta)
    # One rank of each of eight hosts: every message crosses.
    assert gather_seconds(cluster, n, 8, 8) == pytest.approx(7 * between.alpha + n * 7 / 8 * between.beta)
    # All 64: eight rings, an eighth of the bytes through each network card.
    expected = 56 * inside.alpha + 7 * between.alpha + n / 8 * 63 / 64 * between.beta
    assert gather_seconds(cluster, n, 1, 64) == pytest.approx(expected)
    # Sixteen hosts of two: half of the bytes through each card, or all of them over a link inside that is slower.
    slow = Cluster(replace(GPUS["a100"], inside=30 * GB), 32, 2)
    expected = 16 * slow.inside.alpha + 15 * slow.between.alpha + n * 31 / 32 * slow.inside.beta
    assert gather_seconds(slow, n, 1, 32) == pytest.approx(expected)


def test_minipar_has_one_ring_and_pairwise_gathers():
    cluster, n = replace(a100s(64), framework=MINIPAR), 1e9
    inside, between = cluster.inside, cluster.between
    assert gather_seconds(cluster, n, 1, 64) == pytest.approx(63 * (between.alpha + n / 64 * between.beta))
    near, far = (link.alpha + n / 64 * link.beta for link in (inside, between))
    assert fetch_seconds(cluster, n, 1, 64) == pytest.approx(7 * near + 56 * far)
    scalar = 2 * (7 * inside.alpha + 56 * between.alpha)
    assert scalar_seconds(cluster, 1, 64) == pytest.approx(scalar, rel=1e-12)
    assert scalar_seconds(a100s(64), 1, 64) == pytest.approx(2 * 6 * between.alpha)


# ---- operations and bytes, on a GPU that does one of either in a second ----------------------------------------------

ONE = Gpu(peak=1.0, memory=1.0, memory_bandwidth=1.0, inside=1.0, between=1.0)
EXACT = Assumptions(products=1.0, half_work=0.0, copies=1.0)
GPT3 = find_model("gpt3-175b")
S, H, T, V = 2048, 12288, 8, 51200
B = 2  # samples


def computed(assumptions=EXACT, card=ONE, **given):
    one = layout(dp=4, tp=T, pp=2, microbatch=B, **given)
    return gpu_compute(GPT3, one, S, 1e9, Cluster(card, one.gpus, assumptions=assumptions))


def test_operations_and_bytes_of_a_layer_and_of_the_head():
    """Matrices 24 s h^2, scores and values 4 s^2 h (Narayanan et al. 2021): I takes the scores' twice, W not at all.
    Elementwise work moves what is kept (Korthikanti et al. 2022) twice in forward, four times in backward.
    """
    matrices, core = 24 * B * S * H * H / T, 4 * B * S * S * H / T
    scores = 5 * GPT3.heads * S * S * B / T
    kept = S * B * H * (10 + 24 / T) + scores
    logits, softmax = 2 * B * S * H * V / T, 6 * B * S * V / T
    for recompute, again in (("none", 0), ("selective", core + 2 * scores), ("full", matrices + core + 2 * kept)):
        expected = ComputeTime(
            forward=matrices + core + 2 * kept,
            backward_input=matrices + 2 * core + 4 * kept,
            backward_weight=matrices,
            recompute=again,
            head_forward=logits + 2 * softmax,
            head_backward_input=logits + 4 * softmax,
            head_backward_weight=logits,
            embedding_forward=0.0,
            embedding_backward=0.0,
            update=30 * 1e9,
        )
        assert astuple(computed(recompute=recompute)) == pytest.approx(astuple(expected), rel=1e-12)


def test_sums_over_tp_that_hide_behind_weight_gradients():
    """Four all-reduces a layer and microbatch: forward's two are waited for, backward's two hide, at a price. With
    sequence parallelism backward's are two pairs, and of each the all-gather is waited for.
    """
    cluster = a100s(64)
    gather = gather_seconds(cluster, 2048 * GPT3.hidden * 2, 1, 8)
    contention = cluster.assumptions.contention
    for schedule, sequence, waited in (
        ("1f1b", False, 4 + 4 * contention),
        ("1f1b", True, 4 + 2 + 2 * contention),
        ("zb-h1", False, 8),
        ("zb-h1", True, 8),
    ):
        one = layout(tp=8, pp=8, schedule=schedule, sequence_parallel=sequence)
        assert unit_times(GPT3, one, cluster, 2048).layer.tp == pytest.approx(waited * gather)
    # As far as there is a weight gradient to hide behind: 3 h^2 and 4 h^2 of 12 h^2.
    slow = replace(cluster, assumptions=replace(cluster.assumptions, alpha_inside=1.0, contention=0.0))
    layer = unit_times(GPT3, layout(tp=8, pp=8), slow, 2048).layer
    gather = gather_seconds(slow, 2048 * GPT3.hidden * 2, 1, 8)
    assert layer.tp == pytest.approx(8 * gather - 7 / 12 * layer.backward_weight)
