"""Claims about what operations refuse: targets of another shape, and ids that no vocabulary has."""

import numpy as np
import pytest

from minipar.autograd import Tensor, cross_entropy_sum
from minipar.autograd.guards import check_ids
from minipar.errors import UsageError

LOGITS = Tensor(np.arange(30.0).reshape(2, 3, 5))
TARGETS = np.array([[0, 4, 2], [2, 2, 1]])


@pytest.mark.parametrize("shape", [(3, 2), (2,), (3,), (1, 6), (6, 1), (5,), (7,), (2, 3, 1), ()])
def test_targets_of_another_shape_are_refused(shape):
    with pytest.raises(
        UsageError, match=r"targets of shape .* for logits of \(2, 3\) tokens: expected \(2, 3\), .*\(6,\)"
    ):
        cross_entropy_sum(LOGITS, np.zeros(shape, int))


def test_flat_targets_are_those_of_the_rows_in_order():
    loss = cross_entropy_sum(LOGITS, TARGETS).item()
    assert cross_entropy_sum(LOGITS, TARGETS.reshape(-1)).item() == loss
    assert cross_entropy_sum(LOGITS, TARGETS.T.copy().T).item() == loss


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[0, 1], [5, 7]], r"id 5 at \[1, 0\] is not below vocab_size 5 of a test$"),
        ([[0, -1], [9, 0]], r"id -1 at \[0, 1\] is negative: ids are 0 to 4 of a test$"),
        ([[0.0]], "ids of dtype float64: expected integers"),
    ],
)
def test_the_first_wrong_id_is_named(ids, says):
    with pytest.raises(UsageError, match=says):
        check_ids(np.array(ids), 5, "id", " of a test")


def test_an_ignored_id_is_no_wrong_one():
    check_ids(np.array([0, 4, -100]), 5, "id", ignored=-100)
    check_ids(np.array([4, 0], np.uint8), 5, "id")
    check_ids(np.zeros(0, int), 5, "id")
    with pytest.raises(UsageError, match="id -100 at .1. is negative: ids are 0 to 4$"):
        check_ids(np.array([0, -100]), 5, "id")
    with pytest.raises(UsageError, match="id -99 at .1. is negative: ids are 0 to 4, or -100 to be ignored"):
        check_ids(np.array([0, -99, -100]), 5, "id", ignored=-100)


def logits_of(columns):
    """Return logits that are said to be a part of as many columns."""
    logits = Tensor(LOGITS.data, requires_grad=True) * 1.0
    logits.node.all_columns = columns
    return logits


@pytest.mark.parametrize("columns", [None, 5])
def test_logits_of_the_whole_vocabulary_are_taken(columns):
    assert cross_entropy_sum(logits_of(columns), TARGETS).item() == cross_entropy_sum(LOGITS, TARGETS).item()


def test_logits_of_a_part_of_the_vocabulary_are_refused():
    logits = logits_of(10)
    with pytest.raises(UsageError, match=r"^the logits are this rank's 5 of 10 columns: write mp.vocab_parallel_cross"):
        cross_entropy_sum(logits, TARGETS)
