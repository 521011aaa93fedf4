"""Chapter 12's question to the planner: what is fixed stays fixed, and costs time."""

from chapters.support.ch12.plan import plan_mixtral


def test_the_best_layout_shares_experts_in_a_host():
    best, alone = plan_mixtral(), plan_mixtral(ep=1)
    assert (best.layout.ep, alone.layout.ep) == (8, 1)
    assert best.time.total < alone.time.total and alone.volume.ep == alone.time.ep == 0
