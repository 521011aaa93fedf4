"""Claims about the norm without rounding: whoever holds the elements, the sum of their squares is the exact one."""

from fractions import Fraction

import numpy as np
import pytest

from minipar.errors import UsageError
from minipar.nn import Parameter
from minipar.parallel import exact_norm
from minipar.parallel.exact_norm import check_size, clip_grad_norm, exact_square_sum
from minipar.parallel.hybrid import HybridComm
from minipar.parallel.placement import ParameterShard, Placement, Shard


class ManyRanks:
    """An axis of as many ranks, all of which hold the same gradients; it notes what is asked of it."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.asked = []

    def all_reduce(self, x, op="sum", algorithm="auto"):
        self.asked.append((op, algorithm, x.dtype.name, x.size))
        if op == "sum":
            x *= self.ranks


class Replica(HybridComm):
    """One replica of the shards, whose ranks add up the squares."""

    def __init__(self, inside):
        self.inside = inside


def placed(kind, gradient, placement):
    """Return a parameter or a shard of one, with this gradient."""
    p = Parameter(np.zeros(len(gradient)))
    p.placement = Placement("p", p.shape, placement)
    if kind is ParameterShard:
        p = ParameterShard(p, p.data, range(p.size))
    p.grad = np.array(gradient)
    return p


def exact(values):
    """Return the sum of the squares, rounded once."""
    return float(sum(Fraction(float(value)) ** 2 for value in values))


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0, 0.5], [3.0, 1.0], [2.0**-40, 3 * 2.0**-40], [2.0**300, 1.0]])
def test_few_squares_add_up_exactly(values):
    assert exact_square_sum([np.array(values)], []) == exact(values)


def test_gradients_without_elements_add_nothing():
    """A rank may hold an empty shard."""
    assert exact_square_sum([np.zeros(0), np.array([3.0, 4.0]), np.zeros(0)], []) == 25.0
    assert exact_square_sum([np.zeros(0)], []) == exact_square_sum([], []) == 0.0


def test_sums_of_many_ranks_are_added_as_integers():
    """Sums in float64 would be rounded once more."""
    axis = ManyRanks(2**28 - 1)
    random = np.random.Generator(np.random.Philox(6))
    for _ in range(50):
        values = random.integers(1, 2**26, 3) / 2.0**26  # the square of each is a float64
        squares = sum(Fraction(float(value)) ** 2 for value in values)
        assert exact_square_sum([values], [axis]) == float((2**28 - 1) * squares)
    assert axis.asked[:2] == [("max", "ordered", "float64", 1), ("sum", "ordered", "int64", 2)]


def test_an_axis_is_asked_for_no_sum_of_zeros():
    axis = ManyRanks(2)
    assert exact_square_sum([np.zeros(3)], [axis]) == 0.0
    assert axis.asked == [("max", "ordered", "float64", 1)]


def test_the_order_of_long_integers_changes_no_bit(monkeypatch):
    """Integers that are longer than the library's show with a few elements what its own show with millions."""
    monkeypatch.setattr(exact_norm, "BITS", 60)
    random = np.random.Generator(np.random.Philox(7))
    for _ in range(50):
        values = random.integers(1, 2**26, 7) / 2.0**26  # the square of each is a float64
        assert exact_square_sum([values], []) == exact(values)


def test_the_most_squares_whose_sums_fit_are_two_to_the_31():
    check_size(2**31)
    with pytest.raises(UsageError) as caught:
        check_size(2**31 + 1)
    assert str(caught.value) == (
        'reduction "tree" with 2147483649 parameters: the norm adds integers of 32 bits in 64 bits, '
        "of at most 2147483648 squares; use another reduction"
    )


@pytest.mark.parametrize(("kind", "over_dp"), [(Parameter, False), (ParameterShard, True)])
@pytest.mark.parametrize("replicas", [False, True])
def test_the_axes_add_what_their_ranks_hold(kind, over_dp, replicas):
    """Over dp, or one replica of the shards, only shards are added; copies of a part count on the first rank alone."""
    dp, tp, pp = ManyRanks(2), ManyRanks(3), ManyRanks(5)
    first = placed(kind, [3.0, 4.0], Shard(0, 3, 0, 6, copies=2, copy=0))
    second = placed(kind, [30.0, 40.0], Shard(0, 3, 0, 6, copies=2, copy=1))
    norm = clip_grad_norm([first, second], 1.0, Replica(dp) if replicas else dp, tp, pp)
    assert norm == np.sqrt(25.0 * 3 * 5 * (2 if over_dp else 1))
    np.testing.assert_allclose(second.grad, np.array([30.0, 40.0]) / norm, rtol=1e-6)
    asked = [("max", "ordered", "float64", 1), ("sum", "ordered", "int64", 2)]
    assert (dp.asked, tp.asked, pp.asked) == (asked if over_dp else [], asked, asked)
