"""Claims about what rounding explains: each bound by its value, each sample of one device, and what is counted."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from minipar.train import rounding
from minipar.train.rounding import EPSILON, GradientCheck, compute, described, distances, put, quantities, same_bits

EPS = 2.0**-52


class Device:
    """One device whose gradients are functions of its parameters and of the loss scale. It notes each scale."""

    def __init__(self, gradients, dtype="float64", loads=None, tp=1, cp=1):
        self.config = SimpleNamespace(run=SimpleNamespace(dtype=dtype))
        self.layout = SimpleNamespace(tp=tp, cp=cp)
        self.scaler = SimpleNamespace(scale=1.0)
        self.moes = [] if loads is None else [SimpleNamespace(load=np.array(loads), dropped=5)]
        parameters = [np.array([1.0, -2.0]), np.array([[4.0]])]
        made = [SimpleNamespace(data=data.astype(dtype), dtype=np.dtype(dtype)) for data in parameters]
        self.optimizer = SimpleNamespace(parameters=made)
        self.gradients = gradients
        self.scales = []

    def compute_gradient(self, step):
        self.scales.append(self.scaler.scale)
        return 3.0 + step

    def state_dict(self, gradients):
        assert gradients is True
        values = [p.data for p in self.optimizer.parameters]
        return {name: np.array(make(values, self.scales[-1])) for name, make in self.gradients.items()}


def still(*values):
    """A gradient that depends on nothing."""
    return lambda parameters, scale: np.array(values)


def check_of(device, exact=False, loads=False, sharper=None):
    return GradientCheck(device, exact=exact, loads=loads, sharper=sharper)


def ranks_of(device, **changes):
    """One device's quantities at step 0, with differences added to some gradients."""
    values = compute(device, 0, False)
    device.scales.clear()
    for name, difference in changes.items():
        values[f"gradient of {name}"] = values[f"gradient of {name}"] + np.array(difference)
    return values


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_an_epsilon_is_the_distance_of_1_to_the_next_number():
    assert {name: float(ml_dtypes.finfo(name).eps) for name in EPSILON} == EPSILON


def test_the_factors_are_those_that_are_documented():
    names = ("ROUNDINGS", "MOVES", "MOVED", "MEASURED", "LOADS")
    assert [getattr(rounding, name) for name in names] == [16, 32, 16, 4, 2]


def test_what_needs_no_sample_is_a_multiple_of_epsilon():
    """16 eps of a gradient and one of all of them; in 2 bytes those of float32, and a sixteenth eps of the loss."""
    wide, narrow = check_of(Device({})), check_of(Device({}, "bfloat16"), sharper=Device({}, "float32"))
    for check, eps, of_loss in ((wide, EPS, 16 * EPS), (narrow, 2.0**-23, 2.0**-7 / 16)):
        assert check._allowed("gradient of w", 3.0, 5.0) == eps * (16 * 3.0 + 5.0)
        assert check._allowed("loss", 3.0, 5.0) == of_loss * 3.0
        assert check._allowed("loads", 3.0, 5.0) == 0.0


def test_a_sample_explains_a_multiple_of_itself():
    for tp, cp, times in ((1, 1, 0), (2, 1, 2), (1, 2, 2), (2, 2, 2)):
        assert check_of(Device({}, tp=tp, cp=cp))._times("loads") == times
    assert check_of(Device({}))._times("gradient of w") == check_of(Device({}))._times("loss") == 16
    assert check_of(Device({}, "float16"), sharper=Device({}))._times("gradient of w") == 4


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_move_by_up_to_two_roundings(dtype):
    """They move in either direction, each sample by other random values, and all by the same ones when asked again."""
    check = check_of(Device({}, dtype))
    for sample in (0, 1, 31):
        random = np.random.Generator(np.random.Philox(key=sample))
        for p, moved in zip(check.device.optimizer.parameters, check._moves(sample), strict=True):
            by = 2 * EPSILON[dtype] * random.uniform(-1, 1, p.data.shape)
            assert moved.dtype == dtype and np.array_equal(moved, (p.data * (1 + by)).astype(dtype))


def test_a_sample_leaves_the_parameters_as_they_were():
    device = Device({"w": lambda values, scale: values[0] * scale})
    before = [p.data.copy() for p in device.optimizer.parameters]
    moves = [np.array([5.0, 6.0]), np.array([[7.0]])]
    moved = check_of(device)._moved(device, moves, 2, 0.5)
    assert moved["gradient of w"].tolist() == [2.5, 3.0] and moved["loss"] == 5.0
    assert device.scales == [0.5] and device.scaler.scale == 1.0
    assert all(np.array_equal(p.data, old) for p, old in zip(device.optimizer.parameters, before, strict=True))
    put(device, moves)
    assert [p.data.tolist() for p in device.optimizer.parameters] == [[5.0, 6.0], [[7.0]]]


def test_rounding_to_2_bytes_is_measured_first_where_the_run_is():
    """The first sample is the difference of both devices; the next ones move both, and scale the narrow one's loss."""
    device = Device({"w": lambda values, scale: values[0].astype("float64") + 1}, "bfloat16")
    sharper = Device({"w": lambda values, scale: values[0].astype("float64")}, "float32")
    check = check_of(device, sharper=sharper)
    values = compute(device, 0, False)
    device.scales.clear()
    assert check._noise(0, 0, values, 0.75) == {"loss": 0.0, "gradient of w": 2.0**0.5}
    device.scales.clear()
    sharper.scales.clear()
    assert check._noise(0, 1, values, 0.75)["gradient of w"] == pytest.approx(2.0**0.5)
    assert (device.scales, sharper.scales) == ([0.75], [1.0])


def test_a_step_is_computed_with_the_scale_times_a_factor():
    device = Device({"w": lambda values, scale: [scale]}, loads=[1, 2])
    device.scaler.scale = 8.0
    assert compute(device, 1, False).keys() == {"loss", "gradient of w"}
    values = compute(device, 1, True, 0.25)
    assert (values["loss"], values["gradient of w"], values["loads"].tolist()) == (4.0, [2.0], [[1, 2, 5]])
    assert device.scales == [8.0, 2.0] and device.scaler.scale == 8.0


def test_distances_are_of_finite_values_alone():
    a = quantities(1.0, {"w": np.array([3.0, 4.0], "float32")}, np.zeros(0))
    b = quantities(3.0, {"w": np.array([0.0, 0.0], "float32")}, np.zeros(0))
    bad = quantities(1.0, {"w": np.array([np.inf, 0.0])}, np.zeros(0))
    assert distances(a, b) == {"loss": 2.0, "gradient of w": 5.0}
    assert distances(a, bad) == distances(bad, a) == distances(bad, bad) == {}


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_another_list_of_gradients_is_named():
    device = Device({"a": still(1.0), "b": still(1.0)})
    ranks = ranks_of(device)
    del ranks["gradient of b"]
    expected = "only the ranks, or only one device, have gradient of b"
    assert check_of(device).problem(0, ranks) == expected
    assert check_of(Device({"a": still(1.0)})).problem(0, ranks_of(device)) == expected


def test_the_largest_difference_is_relative_to_its_gradient():
    """It is relative to |w| + |all| / 16, and the first step that has it is named. The loss is no gradient."""
    device = Device({"w": still(3.0, 4.0), "v": still(12.0, 0.0)})
    check = check_of(device)
    for step, difference in enumerate((8 * EPS, 32 * EPS, 32 * EPS, 16 * EPS)):
        ranks = ranks_of(device, v=[difference, 0.0])
        ranks["loss"] = np.array(3.0 + step)
        assert check.problem(step, ranks) == ""
    assert check.largest == 32 * EPS / (12 + 13 / 16) and check.largest_in == "v, step 2"
    assert (check.compared, check.rounded, check.explained) == (12, 4, 0)
    text = f"{32 * EPS / (12 + 13 / 16):.2g} of their norm (v, step 2), bound 3.6e-15"
    assert check.found() == text


def test_an_exact_run_counts_and_names_what_has_other_bits():
    device = Device({"a": still(1.0), "b": still(1.0), "c": still(1.0)})
    check = check_of(device, exact=True)
    assert check.problem(0, ranks_of(device)) == "" and check.compared == 4
    promised = "not bit for bit one device's, as --reduction ordered promises"
    assert check.problem(0, ranks_of(device, b=[EPS])) == f"gradient of b is {promised}"
    assert check.problem(0, ranks_of(device, a=[EPS], c=[EPS])) == f"gradient of a and 1 more are {promised}"
    assert check.compared == 12 and check.rounded == 0


def test_a_zero_of_another_sign_needs_no_explanation():
    device = Device({"w": still(0.0)})
    ranks = ranks_of(device)
    ranks["gradient of w"] = -ranks["gradient of w"]
    check = check_of(device)
    assert check.problem(0, ranks) == ""
    assert (check.rounded, check.explained, check.largest_in, device.scales) == (1, 0, "", [1.0])


def test_a_gradient_that_one_device_does_not_have_is_named():
    device = Device({"w": still(0.0)})
    text = check_of(device).problem(0, ranks_of(device, w=[0.5]))
    explained = "they differ by 0.5, rounding explains 0"
    assert text == f"gradient of w: norm 0.5 on the ranks, 0 on one device; {explained}"
    device, sharper = Device({"w": still(0.0)}, "bfloat16"), Device({"w": still(0.0)}, "float32")
    check = check_of(device, sharper=sharper)
    assert check.problem(0, ranks_of(device, w=[0.5])) == text and check.largest == 0.5


def test_a_sample_that_is_not_finite_explains_nothing():
    def infinite_if_moved(values, scale):
        return [1.0 if values[0][0] == 1.0 else np.inf]

    device = Device({"w": infinite_if_moved})
    text = check_of(device).problem(0, ranks_of(device, w=[1e-9]))
    explains = EPS * (16 + 1)
    assert text == (
        f"gradient of w: norm 1 on the ranks, 1 on one device; they differ by 1e-09, rounding explains {explains:.3g}"
    )
    assert len(device.scales) == 1 + 32


@pytest.mark.parametrize(("ranks", "scales"), [(1.0, [1.0, 1 - 16 * EPS]), (np.inf, [1.0, 1 + 16 * EPS])])
def test_an_overflow_is_tried_again_16_roundings_away(ranks, scales):
    """A loss scale that is smaller where one device overflows alone, and larger where the ranks do."""
    overflows = np.isfinite(ranks)
    device = Device({"w": lambda values, scale: [np.inf if overflows and scale == 1 else 1.0]})
    check = check_of(device)
    text = check.problem(0, quantities(3.0, {"w": np.array([ranks])}, np.zeros(0)))
    assert device.scales == scales
    assert text == ("" if overflows else "a value is not finite on the ranks, but all are on one device")


def test_samples_of_an_overflow_have_its_scale():
    device = Device({"w": lambda values, scale: [np.inf if scale == 1 else 1.0]})
    text = check_of(device).problem(0, quantities(3.0, {"w": np.array([2.0])}, np.zeros(0)))
    assert text.startswith("gradient of w: norm 2 on the ranks, 1 on one device; they differ by 1")
    assert device.scales == [1.0] + [1 - 16 * EPS] * 33


def test_samples_of_a_finite_step_have_the_runs_scale():
    device = Device({"w": still(1.0)})
    assert check_of(device).problem(0, ranks_of(device, w=[1.0])) != ""
    assert device.scales == [1.0] * 33


# ---- words -----------------------------------------------------------------------------------------------------------


def test_several_things_are_counted():
    assert [described(list("abc")[:count]) for count in (1, 2, 3)] == ["a is", "a and 1 more are", "a and 2 more are"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_worst_is_named_with_the_count_of_others(count):
    """The one that exceeds its own limit most, not the largest difference."""
    names = ["w", "v", "u"][:count]
    device = Device({name: still(10.0**place) for place, name in enumerate(names)})
    ranks = ranks_of(device, **{name: [1e-6 * 2**place] for place, name in enumerate(names)})
    text = check_of(device).problem(0, ranks)
    others = "" if count == 1 else f" (and {count - 1} more)"
    assert text.startswith(f"gradient of w{others}: norm 1 on the ranks, 1 on one device; they differ by 1e-06, ")


def test_bits_are_those_of_shape_dtype_and_bytes():
    one = np.array([1.0, np.nan])
    assert same_bits(one, one.copy()) and same_bits(np.zeros(0), np.zeros(0))
    for other in (one[None], one.view(np.int64), one[:1], np.array([1.0, 2.0])):
        assert not same_bits(one, other)
    assert not same_bits(np.array([0.0]), np.array([-0.0]))
    assert not same_bits(np.zeros((2, 3)), np.zeros((3, 2)))
    assert not same_bits(np.zeros(2, np.float32), np.zeros(2, np.int32))


def test_a_norm_is_that_of_all_elements_in_float64():
    for shape in ((), (1,), (2, 3), (2, 3, 4)):
        array = np.full(shape, 1e30, np.float32)
        assert rounding.norm(array) == pytest.approx(float(np.float32(1e30)) * array.size**0.5, rel=1e-15)
    assert rounding.norm(np.zeros((0, 3))) == 0.0
    assert rounding.distance(np.full((2, 2), 1, "float16"), np.full((2, 2), -60000, "float16")) == 120002.0
