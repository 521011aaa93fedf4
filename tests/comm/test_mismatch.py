"""The whole text of the error of a rank to which another message comes than it expects."""

import numpy as np

from minipar.comm.operation import Operation, to_tag
from minipar.comm.transport import Message

REMEDY = "every rank must call the same operations in the same order, with the same shape and dtype"


class Owner:
    """An operation, as messages name it."""

    def title(self):
        return "rank 0, an operation"


def tag(name, algorithm, elements, combine=None):
    x = np.zeros(elements)
    return to_tag(Operation(name, algorithm, input=x, output=x, combine=combine), 1)


def says(expected, arrived, sent):
    """Return the error of a receive of 40 bytes with one tag, to which another message comes."""
    return str(Message(Owner(), "receive from", 1, 40, expected).mismatch(arrived, sent))


FIVE = tag("all_reduce", "ring", 5, np.add)
SIX = tag("all_reduce", "ring", 6, np.add)
SUM = "all_reduce sum of float64 (ring, operation 1)"


def test_a_message_says_who_waits_and_for_what():
    waits = f"rank 0, an operation: receive from rank 1 (40 bytes, {SUM})"
    assert Message(Owner(), "receive from", 1, 40, FIVE).describe() == waits


def test_the_same_call_with_another_size_names_both_sizes():
    assert says(FIVE, 48, FIVE) == (
        f"rank 0, an operation: rank 1 sent 48 bytes ({SUM}), but 40 were expected; {REMEDY}"
    )
    assert says(3, "more than 40", 3) == (
        f"rank 0, an operation: rank 1 sent more than 40 bytes (tag 3), but 40 were expected; {REMEDY}"
    )


def test_the_same_call_of_another_number_of_elements_says_so():
    assert says(FIVE, 48, SIX) == (
        f"rank 0, an operation: rank 1 called {SUM}, with another number of elements, but this rank {SUM} "
        f"(48 bytes arrived, 40 expected); {REMEDY}"
    )


def test_another_call_names_both():
    barrier = "barrier of float64 (dissemination, operation 1)"
    assert says(FIVE, 0, tag("barrier", "dissemination", 0)) == (
        f"rank 0, an operation: rank 1 called {barrier}, but this rank {SUM} (0 bytes arrived, 40 expected); {REMEDY}"
    )


def test_only_an_all_to_all_with_itself_is_told_of_counts():
    exchange = tag("all_to_all", "pairwise", 5)
    called = "all_to_all of float64 (pairwise, operation 1)"
    counts = ", or with counts of which each rank receives what the others send it"
    assert says(exchange, 48, exchange) == (
        f"rank 0, an operation: rank 1 sent 48 bytes ({called}), but 40 were expected; {REMEDY}{counts}"
    )
    assert says(FIVE, 40, exchange) == (
        f"rank 0, an operation: rank 1 called {called}, but this rank {SUM} (40 bytes arrived, 40 expected); {REMEDY}"
    )
