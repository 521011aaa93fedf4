"""Pictures of schedules whose messages take time: a rank that waits for one is not drawn as merely idle."""

import math
from fractions import Fraction

import pytest
from picture_parts import timeline

from chapters.support.ch08.receives import early_receives
from minipar.parallel.pipeline.actions import Durations
from minipar.parallel.pipeline.in_order import simulate_in_order
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize import plot_schedule
from visualize.message_time import awaited_messages
from visualize.schedule import sizes_text


def hatched(axes, hatch) -> list[tuple[float, float, int]]:
    """(start, end, rank) of every box with a hatching."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths() if collection.get_hatch() == hatch else ():
            (x0, y0), (x1, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((round(x0, 6), round(x1, 6), math.floor(y0)))
    return sorted(found)


def test_a_message_that_is_waited_for_is_drawn():
    """Rank 1 waits for one activation; the other comes while it computes. B takes 2, a message 1/2."""
    line = timeline("1f1b", 2, 2, comm=Fraction(1, 2))
    figure = plot_schedule(line)
    # Rank 1: F0 from 1.5 to 2.5, B0 to 4.5, F1 to 5.5, B1 to 7.5. Rank 0: F0, F1 until 2, B0 from 5 on, B1 from 8 on.
    assert awaited_messages(line) == [[(4.5, 5), (7.5, 8)], [(1, 1.5)]]
    assert hatched(figure.axes[0], "....") == [(1, 1.5, 1), (4.5, 5, 0), (7.5, 8, 0)]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["F forward", "B backward", "idle", "idle, a message is on its way"]


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
    assert hatched(plot_schedule(line).axes[0], "....")[0] == (2, 4, 1)


def test_the_time_of_a_message_is_in_the_caption():
    line = timeline("1f1b", 4, 8, comm=Fraction(1, 2))
    assert plot_schedule(line).texts[0].get_text().endswith("F = 1, B = 2, a message between ranks = 0.5")
    v = timeline("zbv", 4, 8, comm=Fraction(1, 4))
    assert sizes_text([v]).endswith("F = I = W = 2 for all layers of a rank, a message between ranks = 0.25")
    for without in (timeline(), timeline("1f1b", 1, 4)):
        figure = plot_schedule(without)
        assert "message" not in figure.texts[0].get_text() and hatched(figure.axes[0], "....") == []
        assert not any("message" in text.get_text() for text in figure.legends[0].get_texts())
