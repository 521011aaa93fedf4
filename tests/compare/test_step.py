"""Claims about one step of two records, from norms and projections that the tests write down."""

import math
from dataclasses import replace

import numpy as np
import pytest

from minipar.compare.causes import CLIPPED, MEANS, OTHER
from minipar.compare.step_comparison import StepComparison

pytestmark = pytest.mark.usefixtures("warnings_are_errors")


def arrays(gradients, updates=None, loss=5.0, grad_norm=1.0):
    """Return a step whose parameters have these projections, and their absolute values as norms."""
    made = {"loss": np.array(loss), "grad_norm": np.array(grad_norm)}
    for name, projections in gradients.items():
        projections = np.array(projections, float)
        made[f"gradient/{name}"] = np.array([np.abs(projections), projections])
        own = np.array((updates or {}).get(name, projections), float)
        made[f"update/{name}"] = np.array([np.abs(own), own])
    return made


def step_of(a, b, eps=1e-12, limit=1e-6, update_limit=None):
    shapes = {key.partition("/")[2]: (values.shape[1],) for key, values in a.items() if key.startswith("gradient/")}
    return StepComparison(a, b, shapes, {}, eps, limit, update_limit)


def differences(*given, **options):
    found = step_of(*given, **options).differences()
    return [(each.quantity, each.ratio, each.group, each.parameters) for each in found]


def test_what_is_zero_in_both_runs_is_equal():
    zero = arrays({"w": [0.0, 0.0]}, grad_norm=0.0)
    assert differences(zero, zero) == []
    assert step_of(zero, zero).norm_ratios() == {"w": None}


def test_an_update_that_a_lacks_has_an_infinite_ratio():
    """No parameter has a gradient here, and only B's weights decay."""
    a, b = (arrays({"w": [0.0, 0.0]}, {"w": update}) for update in ([0.0, 0.0], [0.5, 0.25]))
    assert differences(a, b) == [("update", math.inf, "all parameters", ("w",))]
    assert differences(b, a) == [("update", 0.0, "all parameters", ("w",))]


def test_a_difference_of_just_the_limit_is_rounding():
    a, b = (arrays({"w": [1.0, 2.0]}, loss=loss) for loss in (1.0, 2.0))
    assert differences(a, b, limit=0.5) == []
    assert differences(a, b, limit=0.499) == [("loss", 2.0, "1 in A, 2 in B", ())]


def test_a_loss_of_zero_is_missing_in_a():
    a, b = (arrays({"w": [1.0, 2.0]}, loss=loss) for loss in (0.0, 2.5))
    assert differences(a, b) == [("loss", math.inf, "0 in A, 2.5 in B", ())]


def test_opposite_values_near_the_largest_float_are_compared():
    a, b = (arrays({"w": [sign * 1.5e308, sign]}) for sign in (1, -1))
    assert step_of(a, b).norm_ratios() == {"w": 1.0}
    assert [each[:2] for each in differences(a, b)] == [("gradient", -1.0)]


@pytest.mark.parametrize(("off", "part"), [(5e-4, True), (1.5e-3, False)])
def test_strips_of_one_part_have_one_factor_to_a_thousandth(off, part):
    a, b = arrays({"w": [1.0, 2.0, 3.0, 4.0]}), arrays({"w": [1.0, 2.0, 6.0, 8.0 * (1 + off)]})
    found = (2.0, "2 of 4 strips (2 to 3) along dim 0 of ") if part else (None, "")
    ratio, name = step_of(a, b).ratio("gradient", "w")
    assert (ratio, name) == (pytest.approx(found[0]), found[1])


# ---- gradients that are little more than rounding --------------------------------------------------------------------


def noisy(tiny, *others):
    """Return gradients of which rounding may be a thousandth of the largest."""
    return arrays({"tiny": [0.0, tiny], **{f"p{i}": [value, value] for i, value in enumerate(others)}})


@pytest.mark.parametrize(("tiny", "uncertain"), [(0.09, True), (0.11, False)])
def test_a_ratio_is_certain_where_rounding_is_a_hundredth(tiny, uncertain):
    """It is so in either run: the smaller of the two gradients does not count."""
    for a, b in ((tiny, 0.0), (0.0, tiny)):
        assert step_of(noisy(a, 1.0), noisy(b, 1.0), eps=1e-4)._is_uncertain("gradient", "tiny") == uncertain


def test_an_uncertain_ratio_that_nothing_explains_is_named():
    a, b = noisy(0.03, 1.0), noisy(0.09, 1.0)
    assert differences(a, b, eps=1e-4) == [("gradient", pytest.approx(3.0), "tiny", ("tiny",))]


def test_parameters_of_a_group_are_in_the_models_order():
    a, b = noisy(0.03, 1.0, 0.5), noisy(0.09, 3.02, 0.5)
    assert differences(a, b, eps=1e-4) == [("gradient", pytest.approx(3.02), "tiny, p0", ("tiny", "p0"))]


# ---- causes without a ratio ------------------------------------------------------------------------------------------


def causes_of(r, cosine, loss=5.0):
    """Return the causes named for a gradient that has this cosine with A's, and to which r times A's is nearest."""
    sine = math.sqrt(1 - cosine**2)
    b = arrays({"w": [r, r * sine / cosine]}, loss=loss, grad_norm=0.0)
    found = step_of(arrays({"w": [1.0, 0.0]}), b).of_gradients(None)
    return found[0].causes


@pytest.mark.parametrize(
    ("r", "cosine", "loss", "expected"),
    [
        (0.9, 0.81, 5.0, (CLIPPED, MEANS, OTHER)),
        (1.1, 0.81, 5.0, (MEANS, OTHER)),
        (0.9, 0.81, 5.1, (MEANS, OTHER)),
        (0.9, 0.79, 5.0, (OTHER,)),
        (-0.9, 0.81, 5.0, (OTHER,)),
    ],
)
def test_a_sum_of_the_same_parts_points_almost_where_a_does(r, cosine, loss, expected):
    assert causes_of(r, cosine, loss) == expected


@pytest.mark.parametrize(("part", "fits"), [(0.95, True), (1.05, False), (-0.95, True), (-1.05, False)])
def test_a_sum_fits_within_the_limit_and_twice_the_noise(part, fits):
    """The largest of the three is 4, and noise 64 epsilons of it."""
    eps, limit = 1e-6, 1e-4
    bound = 4 * limit + 2 * 64 * eps * 4
    other, rest = arrays({"w": [1.0, 3.0]}), arrays({"w": [0.0, 2.5]})
    whole = arrays({"w": [0.5, 4.0 + part * bound]})
    step = step_of(whole, rest, eps=eps * 4 / (4.0 + part * bound), limit=limit)
    assert step._is_sum("w", whole, rest, 0.5, other) == fits


@pytest.mark.parametrize(("c", "times"), [(1.0, ""), (0.5, "0.5 times "), (0.015, "0.015 times ")])
@pytest.mark.parametrize("run", "AB")
def test_what_is_left_of_the_step_before_is_a_part_of_it(run, c, times):
    before, right = arrays({"w": [1.0, 3.0], "v": [5.0, 1.0]}), arrays({"w": [2.0, -1.0], "v": [1.0, 1.0]})
    wrong = {
        name: right[f"gradient/{name}"][1] + c * before[f"gradient/{name}"][1] * (name == "w") for name in ("w", "v")
    }
    runs = {"A": right, "B": right, run: arrays(wrong)}
    step = step_of(runs["A"], runs["B"])
    (found,) = step.differences(replace(step, a=before, b=before))
    cause = f"{times}the gradient of the step before is still in {run}'s: no zero_grad between the steps"
    assert (found.ratio, found.parameters, found.causes) == (None, ("w",), (cause,))
    skipped = replace(step, a=before | {"grad_norm": np.inf}, b=before | {"grad_norm": np.inf})
    assert not skipped.skipped, "its parameters were updated"
    unchanged = {f"update/{name}": np.zeros((2, 2)) for name in ("w", "v")}
    skipped = replace(skipped, a=skipped.a | unchanged, b=skipped.b | unchanged)
    assert skipped.skipped and step.differences(skipped)[0].causes != (cause,)
