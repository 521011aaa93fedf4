"""Chapter 3's counting and watching sees what happens, and notices what goes wrong."""

import numpy as np
import pytest

from chapters.support.ch03.watch import count_calls, timeline, watch_blocks
from minipar.comm import ALGORITHMS, Network, run_local


def test_every_call_of_every_algorithm_is_counted():
    every = run_local(3, lambda comm: count_calls(comm, 7))
    for rows in every:
        assert len(rows) == sum(len(names) for op, names in ALGORITHMS.items() if op != "barrier")
        assert all((row["messages"], row["bytes"]) == (row["expected_messages"], row["expected"]) for row in rows)
    ring = [row["bytes"] for rows in every for row in rows if row["op"] == "all_reduce, ring"]
    assert sum(ring) == 2 * 2 * 7 * 8


def test_watched_blocks_are_the_arrays_after_each_step():
    def exchange_all(comm, x, after_step):
        for step in range(2):
            comm.all_reduce(x[step : step + 1], algorithm="ring")
            after_step()

    panels = watch_blocks(2, exchange_all, "at first", "one", "two")
    assert [title for title, _ in panels] == ["at first", "one", "two"]
    arrays = [array.tolist() for _, array in panels]
    assert arrays == [[[1, 1], [2, 2]], [[3, 1], [3, 2]], [[3, 3], [3, 3]]]
    with pytest.raises(ValueError, match="zip"):
        watch_blocks(2, exchange_all, "at first", "a title too few")


def test_a_timeline_begins_at_zero_and_keeps_the_values():
    def program(comm, nbytes):
        comm.all_reduce(np.zeros(nbytes, np.uint8), algorithm="ring")
        return comm.clock.now()

    values, figure = timeline(2, program, 8, network=Network(2.0**-10, 2.0**-20))
    assert values == [2 * (2.0**-10 + 4 * 2.0**-20)] * 2
    assert figure.axes
