"""Mistakes of the planning chapter: each is planted and removed again, and the right instrument notices it."""

import pytest

from chapters.support.ch10.alarms import alarms, bytes_of_a_run
from chapters.support.ch10.mistakes import MISTAKES
from minipar.plan.cluster import GPUS
from minipar.plan.layout import Layout
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import memory

NOTICED = {
    "one_in_flight": ["lists"],
    "activations_by_dp": ["layer"],
    "gathers_once": ["run"],
    "recomputation_is_useful": ["print"],
    "bits_as_bytes": [],
}


@pytest.fixture(scope="module")
def sent():
    return bytes_of_a_run()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_noticed_by_its_instrument(name, sent):
    with MISTAKES[name]():
        assert alarms(sent) == NOTICED[name]


def test_no_mistake_remains(sent):
    assert alarms(sent) == []
    assert GPUS["a100"].between == 25e9


def test_a_mistake_reaches_the_planner():
    layout, model = Layout(dp=1, tp=1, pp=4, microbatch=1, microbatches=8), find_model("gpt2")
    right = memory(model, layout, 1024).activations
    with MISTAKES["one_in_flight"]():
        assert memory(model, layout, 1024).activations == right / 4
