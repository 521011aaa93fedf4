"""Claims about `--reduction tree`: all layouts have the bits of one device, after 20 steps, and resumed in another.

tests/release/train/test_tree.py has 76 layouts.
"""

import numpy as np
import pytest
import training
from combinations import TEXT, config_of, equals_one_device, reference
from training import run_until
from tree_cases import tree_flags

from minipar.more.tree import exact_norm
from minipar.more.tree import tree_sums as tree

LAYOUTS = [
    ("gpt2", "--dp 8 --zero-stage 1 --zero-replicas 2"),
    ("gpt2", "--dp 2 --pp 2 --zero-stage 3 --schedule zb-h1"),
    ("gpt2", "--dp 2 --tp 2 --pp 2 --schedule zb-h1 --zero-stage 3 --steps 7"),
    ("gpt2", "--tp 8 --sequence-parallel --steps 6"),
    ("llama", "--dp 4 --tp 2 --zero-stage 2 --sequence-parallel --steps 6"),
    ("llama", "--tp 4 --schedule gpipe --pp 2 --recompute full --steps 6"),
    ("llama in float64", "--pp 8 --schedule 1f1b --layers 8 --steps 6"),
    ("gpt2 with dropout", "--dp 8 --zero-stage 3 --steps 6"),
    ("gpt2 with dropout", "--dp 2 --tp 4 --zero-stage 3 --dropout 0 --steps 6"),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_a_layout_has_the_bits_of_one_device(model, layout):
    assert equals_one_device(tree_flags(model, layout), exact=True) == []


def test_one_device_really_trains_and_clips():
    _, reports = reference(config_of(tree_flags("gpt2", "")))
    assert reports[-1][0] < reports[0][0] - 0.02
    assert reports[0][1] > 0.5  # --clip-grad


def test_whole_products_have_other_bits():
    whole = config_of(f"{tree_flags('gpt2', '')} --reduction ordered --microbatches 8")
    assert reference(whole)[1] != reference(config_of(tree_flags("gpt2", "")))[1]


def test_a_run_goes_on_in_any_layout(tmp_path):
    reports = []
    resume = ""
    for stop, layout in ((8, "--dp 2 --tp 2 --zero-stage 3"), (13, "--pp 4 --schedule zb-h1"), (20, "--dp 4")):
        state, steps = run_until(TEXT, config_of(f"{tree_flags('gpt2', layout)} {resume}"), tmp_path, stop)
        reports += steps
        resume = f"--resume {tmp_path}"
    states, expected = reference(config_of(tree_flags("gpt2", "")))
    assert training.bits(state) == training.bits(states[-1])
    assert reports == expected


def test_a_leaf_is_one_sample_unless_microbatches_are_given():
    assert config_of(tree_flags("gpt2", "--dp 2")).microbatches == 4
    assert config_of(tree_flags("gpt2", "")).microbatches == 8
    assert config_of(tree_flags("gpt2", "--dp 2 --microbatches 2")).microbatches == 2


def test_subtrees_may_come_in_any_order():
    terms = np.random.Generator(np.random.Philox(1)).standard_normal((8, 5)).astype(np.float32)
    for seed in range(20):
        total = tree.TreeSum()
        for number in np.random.Generator(np.random.Philox(seed)).permutation(8):
            total.add(int(number), terms[number])
        assert total.total().tobytes() == tree.tree_sum(terms).tobytes()
    left_to_right = sum(terms[1:], start=terms[0])
    assert left_to_right.tobytes() != tree.tree_sum(terms).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_norm_rounds_nothing_that_has_an_order(dtype):
    random = np.random.Generator(np.random.Philox(3))
    values = (random.standard_normal(1000) * 10.0 ** random.uniform(-8, 8, 1000)).astype(dtype)
    whole = exact_norm.exact_square_sum([values], [])
    for cuts in ([1], [500], [7, 8, 900]):
        assert exact_norm.exact_square_sum(np.split(random.permutation(values), cuts), []) == whole
    assert whole == pytest.approx(float((values.astype(np.float64) ** 2).sum()), rel=1e-14)
