"""Ranks that call different operations get an error that says what both of them called."""

import numpy as np
import pytest

from minipar.comm import run_local
from minipar.errors import CommunicationError

# What rank 1 calls, what all others call, and what the error says of the two.
MISTAKES = {
    "dtype of one size": (
        "comm.all_reduce(np.ones(100, np.int64), algorithm='ring')",
        "comm.all_reduce(np.ones(100), algorithm='ring')",
        ("all_reduce of int64", "all_reduce of float64"),
    ),
    "dtype and length of one size": (
        "comm.all_reduce(np.ones(200, np.float32))",
        "comm.all_reduce(np.ones(100))",
        ("all_reduce of float32", "all_reduce of float64"),
    ),
    "number of elements": (
        "comm.reduce_scatter(np.ones(48), algorithm='ring')",
        "comm.reduce_scatter(np.ones(47), algorithm='ring')",  # rank 1's messages may have the same size
        ("elements mod 1024 = 48", "elements mod 1024 = 47"),
    ),
    "counts of an all-to-all": (
        "comm.all_to_all(np.ones(3 * comm.size), counts=([3] * comm.size, [3] * comm.size))",
        "comm.all_to_all(np.ones(2 * comm.size), counts=([2] * comm.size, [2] * comm.size))",
        ("24", "16", "all_to_all of float64"),
    ),
    "operation": ("comm.barrier()", "comm.all_reduce(np.ones(100))", ("barrier", "all_reduce of float64")),
    "order": (
        "comm.all_gather(np.ones(4)); comm.all_reduce(np.ones(100))",
        "comm.all_reduce(np.ones(100)); comm.all_gather(np.ones(4))",
        ("all_gather of float64", "all_reduce of float64"),
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


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("dtype", ["?", "B", "q", "f", "d", "F", "G"])
def test_an_error_names_operation_dtype_and_count(operation, dtype):
    """The number of elements is modulo 1024, and no array is changed."""
    arrays = [np.zeros(5, dtype), np.ones(1031, dtype)]

    with pytest.raises(CommunicationError) as caught:
        run_local(2, lambda comm: getattr(comm, operation)(arrays[comm.rank]))
    name = np.dtype(dtype).name
    for count in (5, 7):
        assert f"{operation} of {name}, elements mod 1024 = {count}, operation 1" in str(caught.value)
    assert not arrays[0].any() and arrays[1].all()
