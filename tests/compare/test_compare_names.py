"""Claims about what `minipar.compare` makes of the facts of both runs, what it names, and what counts as noise."""

import math

import numpy as np
import pytest

from minipar.compare.causes import causes, describe, name_strips
from minipar.compare.differences import compare
from minipar.record import Record, measure

SHAPES = {"up.weight": (12, 30), "up.bias": (30,), "down.weight": (30, 7), "down.bias": (7,)}

# ---- the facts of both runs ------------------------------------------------------------------------------------------


FACTS = {"dp": 3, "cp": 5, "ep": 7, "tp": 4, "pp": 2, "microbatches": 8, "tokens": 512}


def one_step(directory, factor=1.0, dtype="float64", **facts):
    random = np.random.default_rng(5)
    parameters = {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    gradients = {name: (factor * random.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()}
    Record(directory, parameters, dtype=dtype, **facts).step(0, 1.0, 1.0, gradients, parameters)


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("runs", ["A", "B", "AB"])
def test_a_cause_follows_from_the_facts_of_either_run(runs, name, tmp_path):
    for run in "AB":
        facts = {name: FACTS[name]} if run in runs else {}
        one_step(tmp_path / run, FACTS[name] if run == "B" else 1.0, **facts)
    (found,) = compare(tmp_path / "A", tmp_path / "B").differences
    assert [cause.partition(":")[0] for cause in found.causes] == [f"{FACTS[name]} = {name}"]


@pytest.mark.parametrize(
    ("quantity", "ratio", "difference", "words"),
    [
        ("gradient", 4, 0.0, "4 = dp: "),
        ("gradient", 1 / 4, 0.0, "1/4 = 1/dp: "),
        ("gradient", -1, 0.0, "a wrong sign"),
        ("grad_norm", 2, 0.0, "the root of 4 = dp: "),
        ("grad_norm", 1 / 2, 0.0, "the root of 1/4 = 1/dp: "),
        ("loss", 1.3, math.log(4), "B - A = log 4 = log dp: "),
    ],
)
def test_a_cause_fits_to_a_thousandth(quantity, ratio, difference, words):
    for off in (8e-4, 1.9e-3, -8e-4, -1.9e-3):
        near = 1 + (off / 2 if quantity == "grad_norm" else off)
        found = causes(quantity, ratio * near, {"dp": [1, 4]}, difference * (1 + off))
        assert any(cause.startswith(words) for cause in found) == (abs(off) < 1e-3)


def test_two_sizes_of_one_axis_both_count(tmp_path):
    for factor in (3, 4):
        one_step(tmp_path / f"A{factor}", dp=3)
        one_step(tmp_path / f"B{factor}", factor, dp=4)
        (found,) = compare(tmp_path / f"A{factor}", tmp_path / f"B{factor}").differences
        assert [cause.partition(":")[0] for cause in found.causes] == [f"{factor} = dp"]


@pytest.mark.parametrize(("coarse", "bound"), [("float32", 1000 * 2**-23), ("float16", 0.01), ("bfloat16", 0.01)])
@pytest.mark.parametrize("run", "AB")
def test_the_coarser_dtype_of_the_two_sets_the_bound(run, coarse, bound, tmp_path):
    """A relative difference below the bound is rounding, one above it is not, whichever run is the coarser one."""
    for factor, equal in ((1 + 0.8 * bound, True), (1 + 1.3 * bound, False)):
        for name in "AB":
            directory = tmp_path / f"{name}{equal}"
            one_step(directory, factor if name == "B" else 1.0)
            text = (directory / "run.json").read_text()
            (directory / "run.json").write_text(text.replace("float64", coarse if name == run else "float64"))
        assert compare(tmp_path / f"A{equal}", tmp_path / f"B{equal}").equal == equal


# ---- what is named ---------------------------------------------------------------------------------------------------

MODEL = ["wte.weight", *(f"h.{i}.{name}" for i in range(4) for name in ("ln_1.weight", "fc.weight", "fc.bias")), "ln_f"]
NAMED = [
    (MODEL, "all parameters"),
    (["h.1.ln_1.weight"], "h.1.ln_1.weight"),
    (MODEL[4:7], "block 1"),
    ([*MODEL[4:7], "ln_f"], "block 1 and ln_f"),
    (["wte.weight", *MODEL[4:10]], "blocks 1 to 2 and wte.weight"),
    (MODEL[2::3][:4], "fc.weight of every block"),
    ([*MODEL[2::3][:4], *MODEL[1::3][:4]], "fc.weight, ln_1.weight of every block"),
    (["h.0.fc.weight", "h.1.fc.bias", "ln_f"], "h.0.fc.weight, h.1.fc.bias, ln_f"),
    (MODEL[5:9], "h.1.fc.weight to h.2.fc.weight"),
    (["h.0.fc.weight", "h.1.fc.bias", "h.2.fc.bias", "ln_f"], "some from h.0.fc.weight to ln_f"),
    ([name for name in MODEL if "bias" not in name], "all parameters but the biases"),
]


@pytest.mark.parametrize(("names", "words"), NAMED, ids=[words for _, words in NAMED])
def test_a_group_of_parameters_has_the_shortest_name(names, words):
    assert describe(names, MODEL) == words


@pytest.mark.parametrize(
    ("count", "strips", "tps", "words"),
    [
        (4, [2, 3], [1, 2], "tp rank 1's part (of 2) of "),
        (4, [2, 3], [1, 4], "2 of 4 strips (2 to 3) along dim 0 of "),  # two ranks' parts
        (4, [3], [2], "1 of 4 strips (3 to 3) along dim 0 of "),  # half of a rank's
        (4, [0, 3], [2], "2 of 4 strips (0 to 3) along dim 0 of "),  # a half of each
        (5, [0, 1], [2], "2 of 5 strips (0 to 1) along dim 0 of "),  # 2 does not divide 5
        (5, [4], [1], "1 of 5 strips (4 to 4) along dim 0 of "),
        (4, [0, 1, 2, 3], [1], "4 of 4 strips (0 to 3) along dim 0 of "),
        (12, [0, 1, 4, 5, 8, 9], [2], "tp rank 0's part (of 2) of "),  # of q, of k and of v
        (8, [0, 1], [3, 4], "tp rank 0's part (of 4) of "),
    ],
)
def test_strips_are_a_ranks_part_or_are_counted(count, strips, tps, words):
    assert name_strips([i in strips for i in range(count)], 0, tps) == words


@pytest.mark.parametrize(
    ("dtype", "noise", "more"),
    [("float64", 64 * 2**-52, 0.507), ("float32", 64 * 2**-23, 0.507), ("bfloat16", 1e-3, 0.6)],
)
def test_a_gradient_below_the_noise_is_no_difference(dtype, noise, more, tmp_path):
    """The noise is 64 epsilons, or a thousandth, of the largest gradient that either run has."""
    for size, equal in ((0.499, True), (more, False)):
        for run, sign in (("A", 1), ("B", -1)):
            parameters = {"large": np.ones(1), "tiny": np.ones(1)}
            gradients = {"large": np.ones(1), "tiny": np.array([sign * size * noise])}
            largest = np.abs(measure("large", gradients["large"])).max()
            gradients["tiny"] *= largest / np.abs(measure("tiny", np.ones(1))[1]).max()
            Record(tmp_path / f"{run}{size}", parameters, dtype=dtype).step(0, 1.0, 1.0, gradients, parameters)
        assert compare(tmp_path / f"A{size}", tmp_path / f"B{size}").equal == equal


@pytest.mark.parametrize("quantity", ["gradient", "loss"])
@pytest.mark.parametrize(("growth", "advised"), [(9, True), (10.7, False)])
def test_ten_times_the_limit_may_have_grown_from_rounding(growth, advised, quantity, tmp_path):
    limit = 1000 * 2**-23
    for run in "AB":
        gradient, loss = np.ones(24), 5.0
        record = Record(tmp_path / run, {"w": np.zeros(24)}, dtype="float32")
        record.step(0, loss, 1.0, {"w": gradient}, {"w": np.zeros(24)})
        measured = np.abs(measure("w", gradient))
        if run == "B" and quantity == "loss":
            loss *= 1 + growth * 2 * limit
        elif run == "B":
            gradient[int(measured[1].argmin())] += growth * 2 * limit * measured.max()
        record.step(1, loss, 1.0, {"w": gradient}, {"w": np.zeros(24)})
    finding = compare(tmp_path / "A", tmp_path / "B")
    assert (finding.step, finding.may_be_rounding) == (1, advised)
