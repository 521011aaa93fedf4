"""Claims about the causes that `minipar.compare` names for mistakes without a constant factor, in a loop of replicas.

The loop is a user's own: plain arrays, a network of one hidden layer, and `minipar.record` on "rank 0".
"""

import re

import numpy as np
import pytest

from minipar.compare.causes import CLIPPED, MEANS, OTHER
from minipar.compare.differences import as_text, compare
from minipar.record import Record

LR, CLIP = 0.05, 0.3
SHAPES = {"up.weight": (12, 30), "up.bias": (30,), "down.weight": (30, 7), "down.bias": (7,)}


def losses_and_gradients(parameters, x, y):
    """Return the mean of the squared errors over the samples, and its gradients."""
    hidden = np.tanh(x @ parameters["up.weight"] + parameters["up.bias"])
    error = hidden @ parameters["down.weight"] + parameters["down.bias"] - y
    by_output = 2 * error / len(x)
    by_hidden = by_output @ parameters["down.weight"].T * (1 - hidden**2)
    gradients = {
        "up.weight": x.T @ by_hidden,
        "up.bias": by_hidden.sum(axis=0),
        "down.weight": hidden.T @ by_output,
        "down.bias": by_output.sum(axis=0),
    }
    return (error**2).sum() / len(x), gradients


def norm(gradients):
    return float(np.sqrt(sum((gradient**2).sum() for gradient in gradients.values())))


def clipped(gradients):
    factor = min(1.0, CLIP / norm(gradients))
    return {name: factor * gradient for name, gradient in gradients.items()}


class Loop:
    """Replicas that hold `counts` samples each; subclasses make a mistake."""

    def __init__(self, counts=(40, 20), dtype="float64"):
        self.counts, self.dtype = counts, dtype

    def weights(self):
        return np.array(self.counts) / sum(self.counts)

    def each(self, gradients):
        """Return what a rank sends."""
        return gradients

    def total(self, gradients):
        """Return what the sum over the ranks becomes before it is recorded."""
        return gradients

    def recorded(self, ranks, total):
        """Return the gradients and the norm that rank 0 records."""
        return total, norm(total)

    def loss(self, losses):
        return float(self.weights() @ losses)

    def train(self, directory, steps=4):
        random = np.random.default_rng(3)
        parameters = {name: 0.3 * random.normal(size=shape) for name, shape in SHAPES.items()}
        parameters = {name: values.astype(self.dtype) for name, values in parameters.items()}
        record = Record(directory, parameters, dtype=self.dtype, dp=len(self.counts))
        for step in range(steps):
            x = np.random.default_rng([4, step]).normal(size=(sum(self.counts), 12)).astype(self.dtype)
            y = (1 + x[:, :7] + x[:, 5:]).astype(self.dtype)
            places = np.split(np.arange(len(x)), np.cumsum(self.counts)[:-1])
            ranks = [losses_and_gradients(parameters, x[place], y[place]) for place in places]
            sent = [self.each(gradients) for _, gradients in ranks]
            total = {}
            for name in SHAPES:
                total[name] = sum(weight * one[name] for weight, one in zip(self.weights(), sent, strict=True))
                total[name] = total[name].astype(self.dtype)
            total = self.total(total)
            gradients, size = self.recorded(ranks, total)
            parameters = {name: (parameters[name] - LR * total[name]).astype(self.dtype) for name in SHAPES}
            record.step(step, self.loss([loss for loss, _ in ranks]), size, gradients, parameters)


class MeansOfMeans(Loop):
    """Each rank's mean counts alike, whatever the number of its samples."""

    def weights(self):
        return np.full(len(self.counts), 1 / len(self.counts))


class ClippedOnEachRank(Loop):
    """Each rank clips, then the ranks are summed, and the result is recorded with the norm that the clipping gave."""

    def each(self, gradients):
        return clipped(gradients)

    def recorded(self, ranks, total):
        return total, norm(ranks[0][1])


class ClippedOnEachRankNormAfter(ClippedOnEachRank):
    """The same, but the norm is that of the sum."""

    def recorded(self, ranks, total):
        return total, norm(total)


class RecordedBeforeTheSum(ClippedOnEachRank):
    """The same, but each rank's own gradient is recorded, before it is clipped."""

    def recorded(self, ranks, total):
        return ranks[0][1], norm(ranks[0][1])


class NoZeroGrad(Loop):
    """A loop in which p.grad is never set to zero."""

    kept = None

    def total(self, gradients):
        if self.kept is not None:
            gradients = {name: gradients[name] + self.kept[name] for name in gradients}
        self.kept = gradients
        return gradients


class ClipsAfterwards(Loop):
    """The right loop beside NoZeroGradClipped: the sum is clipped in place, after its norm was recorded."""

    def train(self, directory, steps=4):
        self.copies = []
        super().train(directory, steps)

    def total(self, gradients):
        self.copies.append(gradients)
        return clipped(gradients)

    def recorded(self, ranks, total):
        return self.copies[-1], norm(self.copies[-1])


class NoZeroGradClipped(ClipsAfterwards):
    """A loop in which p.grad is never set to zero, but is clipped in place after each backward."""

    kept = None

    def total(self, gradients):
        if self.kept is not None:
            gradients = {name: gradients[name] + self.kept[name] for name in gradients}
        self.kept = super().total(gradients)
        return self.kept


class OtherData(Loop):
    """The ranks' gradients are of other samples, in an order of their own."""

    seed = 9

    def each(self, gradients):
        random = np.random.default_rng(self.seed)
        return {name: random.permuted(gradient.ravel()).reshape(gradient.shape) for name, gradient in gradients.items()}


RIGHT = {NoZeroGradClipped: ClipsAfterwards}
STEPS = {NoZeroGrad: 1, NoZeroGradClipped: 1}
LEFT = "the gradient of the step before is still in B's: no zero_grad between the steps"


def found_of(kind, tmp_path, **settings):
    RIGHT.get(kind, Loop)(**settings).train(tmp_path / "A")
    kind(**settings).train(tmp_path / "B")
    finding = compare(tmp_path / "A", tmp_path / "B")
    found = finding.differences[0]
    assert (found.quantity, found.ratio, found.group) == ("gradient", None, "all parameters"), as_text(finding)
    assert finding.step == STEPS.get(kind, 0)
    return found.causes


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("counts", [(40, 20), (60, 30, 10), (50, 30, 30, 10)])
def test_means_of_unequal_counts_are_named(counts, dtype, tmp_path):
    assert found_of(MeansOfMeans, tmp_path, counts=counts, dtype=dtype) == (MEANS, OTHER)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("counts", [(40, 20), (30, 30, 30), (20, 20, 20, 20)])
def test_clipping_on_each_rank_is_named_and_proven(counts, dtype, tmp_path):
    first = found_of(ClippedOnEachRank, tmp_path, counts=counts, dtype=dtype)[0]
    proof = r" \(B's grad_norm is [\d.]+, but the norm of its recorded gradients is 0.2\d+\)"
    assert re.fullmatch(CLIPPED + proof, first)


@pytest.mark.parametrize(("times", "said"), [(1.005, False), (1.02, True)])
def test_another_norm_than_that_of_the_gradients_is_said(times, said, tmp_path):
    class Later(ClippedOnEachRankNormAfter):
        def recorded(self, ranks, total):
            return total, times * norm(total)

    first = found_of(Later, tmp_path)[0]
    assert first.startswith(CLIPPED) and ("the norm of its recorded gradients" in first) == said


def test_clipping_is_named_if_the_norm_is_taken_later(tmp_path):
    assert found_of(ClippedOnEachRankNormAfter, tmp_path)[0] == CLIPPED


def test_a_ranks_own_gradient_is_a_missing_sum(tmp_path):
    found = found_of(RecordedBeforeTheSum, tmp_path)
    assert "a sum over ranks that is missing" in found[-1] and CLIPPED not in found[0]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_forgotten_zero_grad_is_named(dtype, tmp_path):
    assert found_of(NoZeroGrad, tmp_path, dtype=dtype) == (LEFT,)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_forgotten_zero_grad_is_named_after_clipping(dtype, tmp_path):
    (cause,) = found_of(NoZeroGradClipped, tmp_path, dtype=dtype)
    assert cause.endswith(f" times {LEFT}") and 0 < float(cause.split()[0]) < 1


def test_a_forgotten_zero_grad_in_a_is_named(tmp_path):
    Loop().train(tmp_path / "B")
    NoZeroGrad().train(tmp_path / "A")
    found = compare(tmp_path / "A", tmp_path / "B").differences[0]
    assert found.causes == (LEFT.replace("B's", "A's"),)


@pytest.mark.parametrize("factor", [0.008, 1.01])
def test_another_multiple_of_the_step_before_is_no_zero_grad(factor, tmp_path):
    """A forgotten zero_grad leaves the whole gradient, or less after clipping, but not as little as a hundredth."""

    class Momentum(NoZeroGrad):
        def total(self, gradients):
            before = self.kept
            self.kept = gradients
            if before is None:
                return gradients
            return {name: gradients[name] + factor * before[name] for name in gradients}

    Loop().train(tmp_path / "A")
    Momentum().train(tmp_path / "B")
    found = compare(tmp_path / "A", tmp_path / "B").differences[0]
    assert not any("the step before" in cause for cause in found.causes)


def test_zero_grad_of_some_parameters_names_these(tmp_path):
    class SomeAreKept(NoZeroGrad):
        def total(self, gradients):
            added = super().total(gradients)
            return {name: added[name] if "weight" in name else gradients[name] for name in gradients}

    Loop().train(tmp_path / "A")
    SomeAreKept().train(tmp_path / "B")
    found = compare(tmp_path / "A", tmp_path / "B").differences[0]
    assert found.causes == (LEFT,) and found.parameters == ("up.weight", "down.weight")


@pytest.mark.parametrize("run", "AB")
def test_a_gradient_of_two_steps_ago_is_no_zero_grad(run, tmp_path):
    """The step before was recorded in one of the runs only."""

    class OfStepZero(NoZeroGrad):
        calls = 0

        def total(self, gradients):
            self.calls += 1
            if self.calls == 1:
                self.first = gradients
            if self.calls == 3:
                gradients = {name: gradients[name] + self.first[name] for name in gradients}
            return gradients

    Loop().train(tmp_path / "A")
    OfStepZero().train(tmp_path / "B")
    (tmp_path / run / "step-1.npz").unlink()
    finding = compare(tmp_path / "A", tmp_path / "B")
    assert finding.step == 2 and LEFT not in finding.differences[0].causes


def test_what_spares_a_parameter_is_neither_clipped_nor_averaged(tmp_path):
    class WithoutOneBias(ClippedOnEachRankNormAfter):
        def each(self, gradients):
            return super().each(gradients) | {"down.bias": gradients["down.bias"]}

    Loop().train(tmp_path / "A")
    WithoutOneBias().train(tmp_path / "B")
    found = compare(tmp_path / "A", tmp_path / "B").differences[0]
    assert found.group == "up.weight, up.bias, down.weight" and found.causes == (OTHER,)


@pytest.mark.parametrize("seed", range(6))
def test_other_data_are_not_called_clipped_or_averaged(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(OtherData, "seed", seed)
    assert found_of(OtherData, tmp_path) == (OTHER,)


def test_other_data_later_on_are_no_forgotten_zero_grad(tmp_path):
    class FromStepOne(OtherData):
        calls = 0

        def each(self, gradients):
            self.calls += 1
            return gradients if self.calls <= 2 else super().each(gradients)

    Loop().train(tmp_path / "A")
    FromStepOne().train(tmp_path / "B")
    finding = compare(tmp_path / "A", tmp_path / "B")
    assert finding.step == 1 and finding.differences[0].causes == (OTHER,)


def test_a_parameter_near_rounding_is_no_group_of_its_own(tmp_path):
    """Any ratio fits a gradient that is little more than rounding: it belongs to the group that explains it."""

    def train(directory, factor, tiny):
        random = np.random.default_rng(5)
        names = ["h.0.ln_1.weight", *(f"h.{i}.mlp.weight" for i in range(5))]
        parameters = {name: random.normal(size=(8, 6)) for name in names}
        record = Record(directory, parameters, dtype="float32")
        gradients = {name: random.normal(size=(8, 6)) for name in names}
        gradients["h.0.ln_1.weight"] *= 1e-4  # of which 64 epsilons of the largest are 8 %
        for name in names[1:]:
            gradients[name] = gradients[name] * factor
        gradients["h.0.ln_1.weight"] *= tiny
        record.step(0, 1.0, 1.0, gradients, parameters)

    train(tmp_path / "A", 1.0, 1.0)
    train(tmp_path / "other", random_weights(), 0.30596)
    found = compare(tmp_path / "A", tmp_path / "other").differences
    assert [(each.ratio, each.group) for each in found] == [(None, "all parameters")]
    train(tmp_path / "three", 3.0, 3.02)
    found = compare(tmp_path / "A", tmp_path / "three").differences
    assert [(each.ratio, each.group) for each in found] == [(pytest.approx(3), "all parameters")]


def test_a_parameter_near_rounding_joins_the_largest_group(tmp_path):
    """Ratios of 3.1 and of 3 both explain its gradient."""
    factors = {"one": 3.1, "two": 3.0, "three": 3.0, "tiny": 3.05}
    noise = 64 * 2**-23  # of the largest gradient
    for run in "AB":
        random = np.random.default_rng(5)
        gradients = {name: random.normal(size=(8, 6)) for name in factors}
        gradients["tiny"] *= 20 * noise
        if run == "B":
            gradients = {name: factors[name] * values for name, values in gradients.items()}
        parameters = {name: np.zeros((8, 6)) for name in factors}
        Record(tmp_path / run, parameters, dtype="float32").step(0, 1.0, 1.0, gradients, parameters)
    found = compare(tmp_path / "A", tmp_path / "B").differences
    assert [each.parameters for each in found] == [("two", "three", "tiny"), ("one",)]


def random_weights():
    return np.random.default_rng(6).normal(size=(8, 6))


def test_known_causes_come_first_and_then_most_parameters(tmp_path):
    def train(directory, factors):
        random = np.random.default_rng(5)
        parameters = {f"p{i}": random.normal(size=(8, 6)) for i in range(6)}
        record = Record(directory, parameters)
        gradients = {f"p{i}": factor * random.normal(size=(8, 6)) for i, factor in enumerate(factors)}
        record.step(0, 1.0, 1.0, gradients, parameters)

    train(tmp_path / "A", [1] * 6)
    train(tmp_path / "B", [2, 3, 3, random_weights(), random_weights(), random_weights()])
    found = compare(tmp_path / "A", tmp_path / "B").differences
    assert [(each.ratio, len(each.parameters)) for each in found] == [(None, 3), (pytest.approx(3), 2), (2, 1)]
    train(tmp_path / "C", [0, -1, -1, random_weights(), random_weights(), 7])
    found = compare(tmp_path / "A", tmp_path / "C").differences
    seen = [(each.ratio, len(each.parameters)) for each in found]
    assert seen == [(pytest.approx(-1), 2), (0, 1), (None, 2), (pytest.approx(7), 1)]
