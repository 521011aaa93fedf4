"""Claims about the mappings of tensor and sequence parallelism: each is what it says on the ranks' arrays put together,
its backward is the adjoint of its forward, and it sends what its table says.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minipar.autograd import Tensor
from minipar.comm import run_local, wire_bytes
from minipar.parallel.tensor.layers import Border
from minipar.parallel.tensor.mappings import TensorGroup, all_gather, copy_to, reduce_from, reduce_scatter

SIZES = [1, 2, 3, 8]
REDUCTIONS = ["ring", "ordered"]
GATHER = {"ring": "ring", "ordered": "pairwise"}


def copies(arrays, dim):
    """The same on every rank already."""
    return arrays


def summed(arrays, dim):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return [total] * len(arrays)


def parts(arrays, dim):
    return [np.split(array, len(arrays), axis=dim)[rank] for rank, array in enumerate(arrays)]


def joined(arrays, dim):
    return [np.concatenate(arrays, axis=dim)] * len(arrays)


def summed_parts(arrays, dim):
    return parts(summed(arrays, dim), dim)


@dataclass(frozen=True)
class Mapping:
    """A mapping's definition: all ranks' inputs to all ranks' outputs, and likewise back.

    `alike`: input, output are one array that every rank has (an inner product counts it once), not one for each rank.
    `split`: input, output are a rank's part. `sends`: (operation, how many) forward and backward.
    """

    apply: Any
    forward: Any
    backward: Any
    alike: tuple[bool, bool]
    split: tuple[bool, bool]
    sends: tuple[str | None, str | None]


# fmt: off
MAPPINGS = {
    "copy_to": Mapping(lambda x, group, dim: copy_to(x, group), copies, summed,
        alike=(True, False), split=(False, False), sends=(None, "all_reduce")),
    "reduce_from": Mapping(lambda x, group, dim: reduce_from(x, group), summed, copies,
        alike=(False, True), split=(False, False), sends=("all_reduce", None)),
    "all_gather": Mapping(all_gather, joined, summed_parts,
        alike=(False, False), split=(True, False), sends=("all_gather", "reduce_scatter")),
    "reduce_scatter": Mapping(reduce_scatter, summed_parts, joined,
        alike=(False, False), split=(False, True), sends=("reduce_scatter", "all_gather")),
}
# fmt: on


def arrays(size, seed, dim, alike, split, whole):
    """One array for each rank, of the whole's shape or of a part's; the same one for each where they are alike."""
    random = np.random.Generator(np.random.Philox(seed))
    shape = list(whole)
    if split:
        shape[dim] //= size
    if alike:
        return [random.standard_normal(shape)] * size
    return [random.standard_normal(shape) for _ in range(size)]


def run(apply, size, inputs, gradients, dim, reduction):
    """Each rank's (output, input gradient, bytes by operation in forward, in backward)."""

    def rank(comm):
        group = TensorGroup(comm, reduction)
        given, gradient = inputs[comm.rank].copy(), gradients[comm.rank].copy()
        x = Tensor(given, requires_grad=True)
        y = apply(x, group, dim)
        forward = {op: nbytes for (op, _), (_, nbytes) in comm.traffic.counts.items()}
        comm.traffic.reset()
        y.backward(gradient)
        backward = {op: nbytes for (op, _), (_, nbytes) in comm.traffic.counts.items()}
        assert np.array_equal(given, inputs[comm.rank]), "forward wrote into its input"
        assert np.array_equal(gradient, gradients[comm.rank]), "backward wrote into its gradient"
        return y.data, x.grad, forward, backward

    return run_local(size, rank)


def case(name, size, dim, reduction, whole=None):
    mapping = MAPPINGS[name]
    if whole is None:
        whole = [3, 5, 4]
        whole[dim] = 2 * size
    inputs = arrays(size, 1, dim, mapping.alike[0], mapping.split[0], whole)
    gradients = arrays(size, 2, dim, mapping.alike[1], mapping.split[1], whole)
    return mapping, inputs, gradients, run(mapping.apply, size, inputs, gradients, dim, reduction)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MAPPINGS)
def test_forward_and_backward_are_what_the_definition_says(name, size, dim):
    """In rank order to the bit; in a ring within rounding."""
    for reduction in REDUCTIONS:
        mapping, inputs, gradients, results = case(name, size, dim, reduction)
        expected = zip(mapping.forward(inputs, dim), mapping.backward(gradients, dim), strict=True)
        for (y, dx, *_), (expected_y, expected_dx) in zip(results, expected, strict=True):
            assert y.shape == expected_y.shape and dx.shape == expected_dx.shape
            if reduction == "ordered":
                assert np.array_equal(y, expected_y) and np.array_equal(dx, expected_dx)
            else:
                np.testing.assert_allclose(y, expected_y, rtol=1e-14, atol=1e-14)
                np.testing.assert_allclose(dx, expected_dx, rtol=1e-14, atol=1e-14)


def inner(a, b, alike):
    products = [float((x * y).sum()) for x, y in zip(a, b, strict=True)]
    return products[0] if alike else sum(products)


def adjointness(name, size):
    """<f(x), y> and <x, f^T(y)>, an array that all ranks have counted once."""
    mapping, inputs, gradients, results = case(name, size, 1, "ring")
    outputs, back = [r[0] for r in results], [r[1] for r in results]
    return inner(outputs, gradients, mapping.alike[1]), inner(inputs, back, mapping.alike[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MAPPINGS)
def test_backward_is_the_adjoint_of_forward(name, size):
    forward, backward = adjointness(name, size)
    assert forward == pytest.approx(backward, rel=1e-12)


def wire(op, reduction, n, size, rank):
    algorithm = GATHER[reduction] if op == "all_gather" else reduction
    return wire_bytes(op, algorithm, n, 8, size, rank)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MAPPINGS)
def test_the_bytes_are_those_of_the_table(name, size, reduction):
    mapping, inputs, _, results = case(name, size, 1, reduction)
    n = inputs[0].size * (size if mapping.split[0] else 1)
    for rank, (_, _, *sent) in enumerate(results):
        for op, counted in zip(mapping.sends, sent, strict=True):
            expected = 0 if op is None else wire(op, reduction, n, size, rank)
            assert sum(counted.values()) == counted.get(op, 0) == expected
            # The table's formula, which needs chunks of equal length: t divides n here.
            assert expected * size == (0 if op is None else 8 * n * (size - 1) * (2 if op == "all_reduce" else 1))


@pytest.mark.parametrize("name", ["copy_to", "reduce_from"])
@pytest.mark.parametrize(
    ("size", "reduction", "whole"), [(2, "ring", (1, 1, 7)), (8, "ring", (1, 1, 1)), (5, "ordered", (3, 1, 11))]
)
def test_whole_arrays_may_have_any_size(name, size, reduction, whole):
    mapping, inputs, gradients, results = case(name, size, 1, reduction, whole)
    for rank, (y, dx, *sent) in enumerate(results):
        np.testing.assert_allclose(y, mapping.forward(inputs, 1)[rank], rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(dx, mapping.backward(gradients, 1)[rank], rtol=1e-14, atol=1e-14)
        assert sum(sum(counted.values()) for counted in sent) == wire("all_reduce", reduction, y.size, size, rank)


@pytest.mark.parametrize(("size", "reduction"), [(1, "ring"), (3, "ring"), (2, "ordered")])
def test_enter_and_leave_are_these_mappings(size, reduction):
    """A border's enter and leave are what the layers use, with and without sequence parallelism."""
    part, whole = (2, 4, 3), (2, 4 * size, 3)
    pairs = [
        (lambda x, group, dim: Border(group, True).enter(x), all_gather, part, whole),
        (lambda x, group, dim: Border(group).enter(x), lambda x, group, dim: copy_to(x, group), whole, whole),
        (lambda x, group, dim: Border(group, True).leave(x), reduce_scatter, whole, part),
        (lambda x, group, dim: Border(group).leave(x), lambda x, group, dim: reduce_from(x, group), whole, whole),
    ]
    random = np.random.Generator(np.random.Philox(6))
    for one, two, given, returned in pairs:
        inputs, gradients = ([random.standard_normal(shape) for _ in range(size)] for shape in (given, returned))
        a, b = (run(each, size, inputs, gradients, 1, reduction) for each in (one, two))
        for (y, dx, *sent), (other_y, other_dx, *other_sent) in zip(a, b, strict=True):
            np.testing.assert_allclose(y, other_y, rtol=1e-14, atol=1e-14)
            np.testing.assert_allclose(dx, other_dx, rtol=1e-14, atol=1e-14)
            assert sum(sum(s.values()) for s in sent) <= sum(sum(s.values()) for s in other_sent)


def test_a_sequence_that_does_not_divide_is_an_error_and_no_hang():
    def rank(comm):
        return reduce_scatter(Tensor(np.zeros((2, 5, 3))), TensorGroup(comm), 1)

    with pytest.raises(ValueError):
        run_local(3, rank)
