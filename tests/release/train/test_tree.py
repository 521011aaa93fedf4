"""Claims about `--reduction tree` in 76 layouts, and in runs that go on in one layout after another."""

import pytest
import training
from combinations import TEXT, config_of, equals_one_device, reference
from training import run_until
from tree_cases import all_layouts, tree_flags


@pytest.mark.parametrize(("model", "layout"), all_layouts())
def test_a_layout_has_the_bits_of_one_device(model, layout):
    assert equals_one_device(tree_flags(model, layout), exact=True) == []


ORDERS = {
    "gpt2": ["--dp 2 --tp 2 --zero-stage 3", "--pp 4 --schedule zb-h1", "", "--dp 8 --zero-stage 1"],
    "llama": ["", "--tp 8 --sequence-parallel", "--dp 4 --zero-stage 2", "--dp 2 --tp 2 --pp 2"],
    "llama in float64": ["--pp 2 --dp 4 --zero-stage 3", "--dp 8", "--tp 4", "--pp 4 --tp 2 --sequence-parallel"],
}


@pytest.mark.parametrize("model", ORDERS)
def test_a_run_goes_on_in_any_layout(tmp_path, model):
    reports = []
    resume = ""
    for number, layout in enumerate(ORDERS[model]):
        stop = 5 * (number + 1)
        state, steps = run_until(TEXT, config_of(f"{tree_flags(model, layout)} {resume}"), tmp_path, stop)
        reports += steps
        resume = f"--resume {tmp_path}"
    states, expected = reference(config_of(tree_flags(model, "")))
    assert training.bits(state) == training.bits(states[-1])
    assert reports == expected
