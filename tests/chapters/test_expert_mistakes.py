"""Chapter 12's planted mistakes: each is noticed by what the chapter says, and the right program by nothing."""

import pytest

from chapters.support.ch12 import mistakes


@pytest.fixture(scope="module")
def right():
    return mistakes.examine("nothing broken")


def test_at_first_the_right_program_is_noticed_by_nothing(monkeypatch):
    monkeypatch.setattr(mistakes, "STEPS", 1)
    run = mistakes.examine("nothing broken")
    assert (run["noticed"], run["named"]) == ([], "")


@pytest.mark.long
def test_the_right_program_is_noticed_by_nothing(right):
    assert (right["noticed"], right["named"]) == ([], "")
    assert len(right["losses"]) == mistakes.STEPS and right["losses"][-1] < right["losses"][0]
    assert mistakes.curves_that_differ(right, right) == set()


NAMED = {
    "1. experts times P": "gradient, 2 times: some from model.layers.0.block_sparse_moe.experts",
    "2. norm without experts": "grad_norm, 0.9995 times",
    "3. router not summed": "gradient, no one factor: block_sparse_moe.gate.weight of every block",
    "4. idle experts do not decay": "update, 0 times: some from model.layers.0.block_sparse_moe.experts",
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(NAMED))
def test_a_mistake_is_named_and_its_loss_hides_it(name, right):
    run = mistakes.examine(name)
    assert run["named"].startswith(NAMED[name])
    assert run["noticed"] == ["compare", "one device", *["ranks"] * ("router" in name)]
    assert mistakes.curves_that_differ(run, right) == {"norm"}


def test_a_curve_differs_from_one_percent_on():
    right = {"losses": [1.0, 2.0], "norms": [1.0, 1.0]}
    run = {"losses": [1.0, 2.018], "norms": [1.0, 0.985]}
    assert mistakes.curves_that_differ(run, right) == {"norm"}
