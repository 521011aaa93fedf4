"""Mistakes without a constant factor are named by their cause, and other mistakes are not given that name.

The loop is a user's own: plain arrays, a network of one hidden layer, and `minipar.compare.record` on "rank 0".
"""

import re

import numpy as np
import pytest

from minipar.compare.causes import CLIPPED, MEANS, OTHER
from minipar.compare.differences import compare
from minipar.compare.record import Record

LR, CLIP = 0.05, 0.3
SHAPES = {"up.weight": (12, 30), "up.bias": (30,), "down.weight": (30, 7), "down.bias": (7,)}


def loss_and_gradients(parameters, x, y):
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


def unchanged(gradients, before=None):
    return gradients


def added(gradients, before):
    """Return what p.grad holds if it was not set to zero."""
    return {name: gradients[name] + before.get(name, 0) for name in gradients}


def train(directory, counts=(40, 20), dtype="float64", weights=None, send=unchanged, total=unchanged, clips=False,
          own=()):  # fmt: skip
    """Train replicas that hold `counts` samples each, and record four steps.

    weights  of the ranks' means in the sum; right are their shares of the samples
    send     what a rank sends of its gradients
    total    what p.grad becomes of the sum, and of what it was in the step before
    clips    whether p.grad is clipped in place after it was recorded
    own      of "gradients" and "norm" those that rank 0 records before the sum
    """
    random = np.random.default_rng(3)
    weights = np.array(counts) / sum(counts) if weights is None else weights
    parameters = {name: (0.3 * random.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()}
    record = Record(directory, parameters, dtype=dtype, dp=len(counts))
    before = {}
    for step in range(4):
        x = np.random.default_rng([4, step]).normal(size=(sum(counts), 12)).astype(dtype)
        y = (1 + x[:, :7] + x[:, 5:]).astype(dtype)
        places = np.split(np.arange(len(x)), np.cumsum(counts)[:-1])
        losses, ranks = zip(*(loss_and_gradients(parameters, x[place], y[place]) for place in places), strict=True)
        sent = [send(gradients) for gradients in ranks]
        summed = {}
        for name in SHAPES:
            summed[name] = sum(weight * one[name] for weight, one in zip(weights, sent, strict=True)).astype(dtype)
        gradients = total(summed, before)
        before = clipped(gradients) if clips else gradients
        parameters = {name: (parameters[name] - LR * before[name]).astype(dtype) for name in SHAPES}
        grad_norm = norm(ranks[0] if "norm" in own else gradients)
        recorded = ranks[0] if "gradients" in own else gradients
        record.step(step, float(weights @ np.array(losses)), grad_norm, recorded, parameters)


def found_of(tmp_path, right=None, step=0, **mistake):
    """Return the first difference of a run with a mistake from the right one: no factor explains it."""
    train(tmp_path / "A", **(right or {}))
    train(tmp_path / "B", **(right or {}), **mistake)
    finding = compare(tmp_path / "A", tmp_path / "B")
    found = finding.differences[0]
    assert (finding.step, found.quantity, found.ratio) == (step, "gradient", None)
    return found


@pytest.mark.parametrize(("counts", "dtype"), [((40, 20), "float64"), ((50, 30, 30, 10), "float32")])
def test_means_of_unequal_counts_are_named(counts, dtype, tmp_path):
    alike = np.full(len(counts), 1 / len(counts))
    assert found_of(tmp_path, {"counts": counts, "dtype": dtype}, weights=alike).causes == (MEANS, OTHER)


@pytest.mark.parametrize(("counts", "dtype"), [((40, 20), "float64"), ((20, 20, 20, 20), "float32")])
def test_clipping_on_each_rank_is_named_and_proven(counts, dtype, tmp_path):
    """By the recorded norm, if it is the one that the clipping gave and not that of the recorded gradients."""
    first = found_of(tmp_path, {"counts": counts, "dtype": dtype}, send=clipped, own=("norm",)).causes[0]
    assert first.startswith(CLIPPED) and re.search(r"is 0\.2\d+\)$", first)


def test_clipping_is_named_if_the_norm_is_taken_later(tmp_path):
    assert found_of(tmp_path, send=clipped).causes[0] == CLIPPED


def test_a_ranks_own_gradient_is_a_missing_sum(tmp_path):
    causes = found_of(tmp_path, send=clipped, own=("gradients", "norm")).causes
    assert causes[-1] == OTHER and not any(cause.startswith(CLIPPED) for cause in causes)


LEFT = "the gradient of the step before is still in B's: no zero_grad between the steps"


def test_a_forgotten_zero_grad_is_named(tmp_path):
    assert found_of(tmp_path, {"dtype": "float32"}, step=1, total=added).causes == (LEFT,)


def test_a_forgotten_zero_grad_is_named_after_clipping(tmp_path):
    (cause,) = found_of(tmp_path, {"clips": True}, step=1, total=added).causes
    assert cause.endswith(f" times {LEFT}") and 0 < float(cause.split()[0]) < 1


def test_zero_grad_of_some_parameters_names_these(tmp_path):
    def some(gradients, before):
        return gradients | {name: added(gradients, before)[name] for name in gradients if "weight" in name}

    found = found_of(tmp_path, step=1, total=some)
    assert found.causes == (LEFT,) and found.parameters == ("up.weight", "down.weight")


@pytest.mark.parametrize("factor", [0.008, 1.01])
def test_another_multiple_of_the_step_before_is_no_zero_grad(factor, tmp_path):
    """A forgotten zero_grad leaves the whole gradient, or less after clipping, but not as little as a hundredth."""
    last = {}

    def momentum(gradients, before):
        kept, last["gradients"] = last.get("gradients", {}), gradients
        return {name: gradients[name] + factor * kept.get(name, 0) for name in gradients}

    assert not any("the step before" in cause for cause in found_of(tmp_path, step=1, total=momentum).causes)


def test_what_spares_a_parameter_is_neither_clipped_nor_averaged(tmp_path):
    def all_but_one(gradients):
        return clipped(gradients) | {"down.bias": gradients["down.bias"]}

    found = found_of(tmp_path, send=all_but_one)
    assert found.parameters == ("up.weight", "up.bias", "down.weight") and found.causes == (OTHER,)


@pytest.mark.parametrize("seed", range(3))
def test_other_data_are_not_called_clipped_or_averaged(seed, tmp_path):
    def permuted(gradients):
        random = np.random.default_rng(seed)
        return {name: random.permuted(values.ravel()).reshape(values.shape) for name, values in gradients.items()}

    assert found_of(tmp_path, send=permuted).causes == (OTHER,)
