"""The planner's answers after a change of one assumption."""

import pytest

from chapters.support.ch10 import sensitivity
from chapters.support.ch10.three_models import BATCH, LENGTH, SMALL
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.model import find_model
from minipar.plan.search import plan

(QUESTION,) = (question for question, (name, _) in sensitivity.QUESTIONS.items() if name == SMALL)


@pytest.fixture(scope="module")
def best():
    return plan(find_model(SMALL), Cluster(GPUS["a100"], 1024), BATCH[SMALL], LENGTH[SMALL], sensitivity.ASK, top=3)


@pytest.fixture(scope="module")
def near():
    return sensitivity.numbered(QUESTION, sensitivity.near(QUESTION))


def test_the_best_candidate_is_the_planners_choice(best, near):
    layout = sensitivity.best_plan(QUESTION, near, Cluster(GPUS["a100"], 1024)).layout
    assert layout == best.plans[0].layout


def test_slower_products_cost_time_and_slower_messages_little(near):
    products, *_ = sensitivity.changed_constant(QUESTION, near, "products", "-20 %")
    latency, another, regret, _ = sensitivity.changed_constant(QUESTION, near, "alpha_inside", "-20 %")
    assert 0.05 < products < 0.25 and -0.05 < latency <= 0 and not another and regret == 0


def test_less_memory_can_rule_a_layout_out(near):
    moved, another, regret, _ = sensitivity.changed_constant(QUESTION, near, "memory_used", "-20 %")
    assert moved == 0 and (not another or regret is None or regret >= 0)
