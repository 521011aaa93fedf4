"""Schedules whose messages take time: a rank that waits for one is not drawn as merely idle."""

import math
from fractions import Fraction

import pytest
from picture_cases import timeline

from chapters.support.ch08.in_order import simulate_in_order
from chapters.support.ch08.receives import early_receives
from minipar.parallel.pipeline.actions import Durations
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize import plot_schedule
from visualize.message_time import awaited_messages


def dotted(axes) -> list[tuple[float, float, int]]:
    """(start, end, rank) of every box that is drawn as waiting for a message."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths() if collection.get_hatch() == "...." else ():
            (x0, y0), (x1, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((round(x0, 6), round(x1, 6), math.floor(y0)))
    return sorted(found)


def test_a_message_that_is_waited_for_is_drawn():
    """Rank 1 waits for one activation; the other comes while it computes. B takes 2, a message 1/2."""
    line = timeline("1f1b", 2, 2, comm=Fraction(1, 2))
    # Rank 1: F0 from 1.5 to 2.5, B0 to 4.5, F1 to 5.5, B1 to 7.5. Rank 0: F0, F1 until 2, B0 from 5 on, B1 from 8 on.
    assert awaited_messages(line) == [[(4.5, 5), (7.5, 8)], [(1, 1.5)]]
    assert dotted(plot_schedule(line).axes[0]) == [(1, 1.5, 1), (4.5, 5, 0), (7.5, 8, 0)]
    assert dotted(plot_schedule(timeline("1f1b", 2, 2)).axes[0]) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_awaited_messages_are_idle_time_before_an_action(name):
    line = timeline(name, 4, 8, comm=Fraction(1, 3))
    for row, spans in zip(line.ranks, awaited_messages(line), strict=True):
        starts, busy = {slot.start for slot in row}, [(slot.start, slot.end) for slot in row]
        assert all(0 < end - start <= Fraction(1, 3) for start, end in spans)
        assert {end for _, end in spans} <= starts, "what a rank waits for comes just before what needs it"
        assert not any(a < end and start < b for start, end in spans for a, b in busy)
    assert any(awaited_messages(line))
    assert not any(awaited_messages(timeline(name, 4, 8)))


def test_a_message_that_waits_in_its_channel_is_on_its_way():
    """0F1 is done at 2, but its message waits until 4: 4RECV_F0 is before it in rank 0's channel."""
    line = simulate_in_order(early_receives(make("interleaved-1f1b", 4, 8)), Durations(), "rank")
    assert awaited_messages(line)[1][:2] == [(2, 4), (5, 7)]
