"""Units of a model: operations and bytes on a GPU that does one of either in a second; tensor-parallel sums."""

from dataclasses import astuple, replace

import pytest
from planning import a100s, layout

from minipar.plan.cluster import Assumptions, Cluster, ComputeTime, Gpu, gather_seconds
from minipar.plan.compute import unit_times
from minipar.plan.gpu_time import gpu_compute
from minipar.plan.model import find_model

ONE = Gpu(peak=1.0, memory=1.0, memory_bandwidth=1.0, inside=1.0, between=1.0)
EXACT = Assumptions(products=1.0, half_work=0.0, copies=1.0)
GPT3 = find_model("gpt3-175b")
S, H, T, V = 2048, 12288, 8, 51200
B = 2  # samples


def computed(assumptions=EXACT, tp=T, **given):
    one = layout(dp=4, tp=tp, pp=2, microbatch=B, **given)
    return gpu_compute(GPT3, one, S, 1e9, Cluster(ONE, one.gpus, assumptions=assumptions))


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


def test_flash_attention_recomputes_scores_and_moves_none():
    stored, flash = computed(), computed(attention="flash")
    scores = 5 * GPT3.heads * S * S * B / T
    assert stored.forward - flash.forward == pytest.approx(2 * scores, rel=1e-9)
    again = 2 * B * S * S * H / T  # the first of the core's two products
    assert flash.backward_input - stored.backward_input == pytest.approx(again - 4 * scores, rel=1e-9)
    assert flash.backward_weight == stored.backward_weight


@pytest.mark.parametrize("tp", [1, 8])
def test_each_product_costs_the_half_work_once(tp):
    """However large it is, and on however many ranks: half_work operations more are half the rate at that size."""
    plain, small = computed(tp=tp), computed(replace(EXACT, half_work=1e15), tp=tp)
    more = [b - a for a, b in zip(astuple(plain), astuple(small), strict=True)]
    assert more == pytest.approx([4e15, 4e15, 4e15, 0, 1e15, 1e15, 1e15, 0, 0, 0], rel=1e-6)
    selective = [computed(a, tp=tp, recompute="selective") for a in (EXACT, replace(EXACT, half_work=1e15))]
    assert selective[1].recompute - selective[0].recompute == pytest.approx(2e15, rel=1e-6)


def test_flash_attention_has_a_speed_of_its_own():
    """Its FLOPs are the core's, and in backward two and a half times as many. Stored scores are products."""
    core = 4 * B * S * S * H / T
    card = replace(ONE, products=1.0, attention=0.25)
    plain, own = Assumptions(products=1.0, half_work=0.0), Assumptions(half_work=0.0)
    for attention, times in (("flash", 3), ("stored", 0)):
        one = layout(dp=4, tp=T, pp=2, microbatch=B, attention=attention)
        same, slow = (gpu_compute(GPT3, one, S, 1e9, Cluster(card, one.gpus, assumptions=a)) for a in (plain, own))
        assert slow.forward - same.forward == pytest.approx(times * core, rel=1e-9)
        assert slow.backward_input - same.backward_input == pytest.approx(2.5 * times * core, rel=1e-9)
        assert slow.backward_weight == same.backward_weight


def test_a_data_sheets_values_are_not_reached():
    slow, fast = computed(Assumptions(products=0.5, half_work=0.0, copies=0.25)), computed()
    assert slow.backward_weight == 2 * fast.backward_weight and slow.update == 4 * fast.update


def test_sums_over_tp_that_hide_behind_weight_gradients():
    """Four all-reduces a layer and microbatch: forward's two are waited for, backward's two hide, at a price. With
    sequence parallelism backward's are two pairs, and of each the all-gather is waited for.
    """
    cluster = a100s(64)
    assert GPT3.column_shares == (3 / 12, 4 / 12)  # 3 h^2 and 4 h^2 of 12 h^2
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
    # As far as there is a weight gradient to hide behind.
    slow = replace(cluster, assumptions=replace(cluster.assumptions, alpha_inside=1.0, contention=0.0))
    layer = unit_times(GPT3, layout(tp=8, pp=8), slow, 2048).layer
    gather = gather_seconds(slow, 2048 * GPT3.hidden * 2, 1, 8)
    assert layer.tp == pytest.approx(8 * gather - 7 / 12 * layer.backward_weight)
