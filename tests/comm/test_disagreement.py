"""Ranks that call different operations get an error that says what both of them called."""

import numpy as np
import pytest

from minipar.comm import ALGORITHMS, run_local
from minipar.comm.operation import (
    ALGORITHM_NAMES,
    OPERATIONS,
    USER_TAGS,
    Operation,
    TagFields,
    from_tag,
    meaning,
    to_tag,
)
from minipar.errors import CommunicationError

# What rank 1 calls, what all others call, and what the error says of the two.
MISTAKES = {
    "dtype of one size": (
        "comm.all_reduce(np.ones(100, np.int64), algorithm='ring')",
        "comm.all_reduce(np.ones(100), algorithm='ring')",
        ("all_reduce sum of int64", "all_reduce sum of float64"),
    ),
    "dtype and length of one size": (
        "comm.all_reduce(np.ones(200, np.float32))",
        "comm.all_reduce(np.ones(100))",
        ("all_reduce sum of float32", "all_reduce sum of float64"),
    ),
    "reduction": (
        "comm.all_reduce(np.ones(100), op='max')",
        "comm.all_reduce(np.ones(100), op='sum')",
        ("all_reduce max of float64", "all_reduce sum of float64"),
    ),
    "number of elements": (
        "comm.reduce_scatter(np.ones(48), algorithm='ring')",
        "comm.reduce_scatter(np.ones(47), algorithm='ring')",  # rank 1's messages may have the same size
        ("number of elements",),
    ),
    "counts of an all-to-all": (
        "comm.all_to_all(np.ones(3 * comm.size), counts=([3] * comm.size, [3] * comm.size))",
        "comm.all_to_all(np.ones(2 * comm.size), counts=([2] * comm.size, [2] * comm.size))",
        ("24", "16", "counts"),
    ),
    "operation": ("comm.barrier()", "comm.all_reduce(np.ones(100))", ("barrier", "all_reduce sum of float64")),
    "algorithm": (
        "comm.all_reduce(np.ones(100), algorithm='ordered')",
        "comm.all_reduce(np.ones(100), algorithm='ring')",
        ("(ordered, operation 1)", "(ring, operation 1)"),
    ),
    "order": (
        "comm.all_gather(np.ones(4)); comm.all_reduce(np.ones(100))",
        "comm.all_reduce(np.ones(100)); comm.all_gather(np.ones(4))",
        ("all_gather of float64", "all_reduce sum of float64"),
    ),
    "an operation that one rank leaves out": (
        "comm.broadcast(np.ones(5))",
        "comm.broadcast(np.ones(5)); comm.broadcast(np.ones(5))",
        ("rank 1 has returned",),
    ),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_ranks_that_disagree_learn_what_both_called(mistake, ranks):
    one, others, facts = MISTAKES[mistake]
    with pytest.raises(CommunicationError) as caught:
        run_local(ranks, lambda comm: exec(one if comm.rank == 1 else others, {"np": np, "comm": comm}))
    assert all(fact in str(caught.value) for fact in facts), caught.value


def test_every_algorithm_has_a_place_in_the_tag():
    for op, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            x = np.zeros(300, "f4")
            tag = to_tag(Operation(op, algorithm, input=x, output=x), 44)
            assert USER_TAGS <= tag < 2**27 and meaning(tag).startswith(f"{op} ")
            assert f"of float32 ({algorithm}, operation 44)" in meaning(tag)
            assert from_tag(tag) == TagFields(op, algorithm, False, "float32", elements=300 % 128, number=44)
    assert len(OPERATIONS) <= 8 and len(ALGORITHM_NAMES) <= 8


@pytest.mark.parametrize(
    ("dtype", "count"), [("?", 0), ("B", 1), ("q", 127), ("f", 128), ("d", 129), ("F", 1000), ("G", 5)]
)
def test_a_tag_says_which_call_it_was_modulo_128(dtype, count):
    """Whatever the number of elements or of operations is, it changes no other part of the call."""
    for number, elements in ((count, 5), (5, count)):
        x = np.zeros(elements, dtype)
        tag = to_tag(Operation("all_reduce", "ordered", input=x, output=x, combine=np.maximum), number)
        assert USER_TAGS <= tag < 2**27
        call = TagFields("all_reduce", "ordered", True, x.dtype.name, elements % 128, number % 128)
        assert from_tag(tag) == call
