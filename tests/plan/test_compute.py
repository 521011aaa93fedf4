"""Claims about computation on a GPU: operations and bytes of each part, on one that does one of either in a second."""

from dataclasses import astuple, replace

import pytest

from minipar.plan.compute import Compute, gpu_compute
from minipar.plan.layout import Layout
from minipar.plan.machine import Assumptions, Gpu
from minipar.plan.model import find_model

ONE = Gpu(peak=1.0, memory=1.0, memory_bandwidth=1.0, inside=1.0, between=1.0)
EXACT = Assumptions(products=1.0, half_work=0.0, copies=1.0)
GPT3 = find_model("gpt3-175b")
S, H, T, V = 2048, 12288, 8, 51200
B = 2  # samples


def took(assumptions=EXACT, tp=T, **given):
    return gpu_compute(GPT3, Layout(4, tp, 2, B, 1, **given), S, 1e9, ONE, assumptions)


def test_operations_and_bytes_of_a_layer_and_of_the_head():
    """Matrices 24 s h^2, scores and values 4 s^2 h (Narayanan et al. 2021): I takes the scores' twice, W not at all.
    Elementwise work moves what is kept (Korthikanti et al. 2022) twice in forward, four times in backward.
    """
    matrices, core = 24 * B * S * H * H / T, 4 * B * S * S * H / T
    scores = 5 * GPT3.heads * S * S * B / T
    kept = S * B * H * (10 + 24 / T) + scores
    logits, softmax = 2 * B * S * H * V / T, 6 * B * S * V / T
    for recompute, again in (("none", 0), ("selective", core + 2 * scores), ("full", matrices + core + 2 * kept)):
        expected = Compute(
            forward=matrices + core + 2 * kept,
            backward_input=matrices + 2 * core + 4 * kept,
            backward_weight=matrices,
            again=again,
            head_forward=logits + 2 * softmax,
            head_backward_input=logits + 4 * softmax,
            head_backward_weight=logits,
            embedding_forward=0.0,
            embedding_backward=0.0,
            update=30 * 1e9,
        )
        assert astuple(took(recompute=recompute)) == pytest.approx(astuple(expected), rel=1e-12)


def test_flash_attention_computes_the_scores_again_and_moves_none():
    stored, flash = took(), took(attention="flash")
    scores = 5 * GPT3.heads * S * S * B / T
    assert stored.forward - flash.forward == pytest.approx(2 * scores, rel=1e-9)
    again = 2 * B * S * S * H / T  # the first of the core's two products
    assert flash.backward_input - stored.backward_input == pytest.approx(again - 4 * scores, rel=1e-9)
    assert flash.backward_weight == stored.backward_weight


@pytest.mark.parametrize("tp", [1, 8])
def test_each_product_costs_the_half_work_once(tp):
    """However large it is, and on however many ranks: half_work operations more are half the rate at that size."""
    plain, small = took(tp=tp), took(replace(EXACT, half_work=1e15), tp=tp)
    more = [b - a for a, b in zip(astuple(plain), astuple(small), strict=True)]
    assert more == pytest.approx([4e15, 4e15, 4e15, 0, 1e15, 1e15, 1e15, 0, 0, 0], rel=1e-6)
    again = (took(a, tp=tp, recompute="selective").again for a in (EXACT, replace(EXACT, half_work=1e15)))
    assert -next(again) + next(again) == pytest.approx(2e15, rel=1e-6)


def test_printed_numbers_are_not_reached():
    slow = took(Assumptions(products=0.5, half_work=0.0, copies=0.25))
    fast = took()
    assert slow.backward_weight == 2 * fast.backward_weight and slow.update == 4 * fast.update
