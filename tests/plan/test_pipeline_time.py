"""A pipeline's closed forms are the simulator's times, and a long step is a short one extended."""

from itertools import product

import pytest
from planning import layout

from minipar.plan.pipeline_time import StageTime, closed_form, simulate_exactly, simulated

CLOSED = ("naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
SHAPES = [(1, 1, 1), (1, 1.2, 0.8), (1.0, 2.1, 0.9)]  # F, I, W; the last with full recompute
CASES = list(product([2, 3, 8], [1, 2, 8, 24], SHAPES, [0, 0.3], [0, 0.02]))


def pipeline(name, p, m, v=1):
    return layout(pp=p, microbatches=m, schedule=name, virtual_stages=v)


def stages(one, rank, head=0, hop=0):
    """Equal ranks (F, I, W), each of its v stages with a v-th, and a hop on each way; the last with the head's too."""
    v = one.stages_per_rank
    f, i, w = rank
    times = [StageTime(f / v + hop, i / v + hop, w / v)] * (one.pp * v - 1)
    return (*times, StageTime(f / v + hop + head, i / v + hop + head, w / v + head))


def exactly(one, times, hop=0.0):
    return simulate_exactly(one.schedule, one.pp, one.microbatches, one.virtual_stages, times, hop)


@pytest.mark.parametrize("name", CLOSED)
def test_the_closed_form_is_the_simulators_makespan(name):
    """1F1B, interleaved, GPipe, naive: equal. ZB-H1, from p microbatches on: never below it, nor 8 % above."""
    tried = 0
    for p, m, (f, i, w), head, hop in CASES:
        for v in (2, 3) if name == "interleaved-1f1b" else (1,):
            if (name == "interleaved-1f1b" and m % p) or (name == "zb-h1" and m < p):
                continue
            tried += 1
            one = pipeline(name, p, m, v)
            closed = closed_form(one, StageTime(f + v * hop, i + v * hop, w), StageTime(head, head, head))
            ratio = closed / exactly(one, stages(one, (f, i, w), head, hop)).makespan
            assert (1 - 1e-9 < ratio < 1.08) if name == "zb-h1" else ratio == pytest.approx(1, abs=1e-9), (p, m, v)
    assert tried > 80


@pytest.mark.parametrize("hop", [0, 0.01])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv"])
def test_a_long_step_is_simulated_short_and_extended(name, hop):
    for p, m in ((2, 31), (3, 24), (4, 32), (4, 64)):
        if name == "interleaved-1f1b" and m % p:
            continue
        one = pipeline(name, p, m, 2 if name == "interleaved-1f1b" else 1)
        times = stages(one, (1, 1.1, 0.9), 0.1)
        short, whole = simulated(one, times, hop), exactly(one, times, hop)
        assert short.makespan == pytest.approx(whole.makespan, rel=0.02)
        # The time after the last gradients, behind which data parallelism hides, is right too.
        for moments in ("gradients_begin", "ranks_end"):
            left = [[step.makespan - moment for moment in getattr(step, moments)] for step in (short, whole)]
            assert left[0] == pytest.approx(left[1], abs=0.35)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 64)])
def test_the_bubble_of_interleaved_stages_is_the_published_one(p, m):
    looped = pipeline("interleaved-1f1b", p, m, 2)
    total = simulated(looped, stages(looped, (1, 1, 1))).makespan
    assert (total - 3 * m) / total == pytest.approx((p - 1) / (2 * m + p - 1))


def test_the_moments_of_a_step_are_those_found_by_hand():
    """F is 1 and B 2, so that with two ranks and two microbatches of 1F1B the first rank's step is FF--BB-BB."""
    times = (StageTime(1, 1, 1), StageTime(1, 1, 1))
    step = simulate_exactly("1f1b", 2, 2, 1, times, 0.0)
    assert (step.makespan, step.gradients_begin, step.ranks_end) == (9.0, (7.0, 5.0), (9.0, 7.0))
    split = simulate_exactly("zb-h1", 2, 2, 1, times, 0.0)
    assert (split.makespan, split.gradients_begin, split.ranks_end) == (7.0, (6.0, 6.0), (7.0, 7.0))


def test_a_message_that_blocks_no_rank_delays_the_next_stage():
    step = simulate_exactly("gpipe", 2, 3, 1, (StageTime(1, 1, 1), StageTime(1, 2, 2)), 0.5)
    assert (step.makespan, step.gradients_begin, step.ranks_end) == (19.0, (17.0, 12.5), (19.0, 16.5))
