"""Animations: what moves is what a real run has sent, or what a schedule has in another place."""

import matplotlib.pyplot as plt
import pytest
from launcher import ROOT
from PIL import Image

from chapters.support import animate_schedules
from chapters.support.animate import GALLERY, animate, record, states
from minipar.comm import messages, wire_bytes
from minipar.parallel.pipeline.actions import simulate
from minipar.parallel.pipeline.schedules import make


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(("op", "algorithm"), [case[:2] for case in GALLERY.values()])
def test_recorded_messages_are_those_of_the_closed_forms(op, algorithm, ranks):
    log = record(op, algorithm, ranks)
    for rank in range(ranks):
        own = [message for message in log if message.source == rank]
        assert len(own) == messages(op, algorithm, ranks, rank)
        assert sum(len(message.chunks) for message in own) == wire_bytes(op, algorithm, ranks, 1, ranks, rank)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_the_end_every_contribution_is_where_it_belongs(ranks):
    everyone = (1 << ranks) - 1
    for op, algorithm, _ in GALLERY.values():
        last = states(record(op, algorithm, ranks), ranks)[-1]
        for rank in range(ranks):
            assert last[rank][rank] == everyone
            assert op == "reduce_scatter" or last[rank] == [everyone] * ranks


def test_a_message_is_drawn_between_its_ranks():
    figure, animation = animate("all_reduce", "recursive_doubling", "title", ranks=2)
    animation._func(2)  # on the way
    moving = [patch for patch in figure.axes[0].patches if patch.get_zorder() == 4]
    assert len(moving) == 2 * 2 and all(-1 < patch.get_y() < 0 for patch in moving)
    animation._func(7)  # arrived
    assert not [patch for patch in figure.axes[0].patches if patch.get_zorder() == 4]
    assert "round 1 of 1" in figure.axes[0].get_title()
    animation._draw_was_started = True
    plt.close(figure)


def test_1f1b_turns_into_zb_h1_in_three_states():
    first, second, last = animate_schedules.states()
    assert [state.idle for state in (first, second, last)] == [36, 27, 18]
    assert first.times.keys() == second.times.keys() == last.times.keys()
    times = animate_schedules.DURATIONS
    for state, name in ((first, "1f1b"), (last, "zb-h1")):
        for rank, row in enumerate(simulate(make(name, 4, 7), times).ranks):
            for slot in row:
                starts_with = {"B": "I"}.get(slot.action.kind, slot.action.kind)
                assert state.times[starts_with, slot.action.microbatch, rank][0] == slot.start
    for state in (first, second, last):
        lengths = {
            kind: {end - start for (k, _, _), (start, end) in state.times.items() if k == kind} for kind in "FIW"
        }
        assert lengths == {"F": {4}, "I": {5}, "W": {3}}


def test_boxes_move_from_one_schedule_to_the_next():
    first, second, last = animate_schedules.states()
    figure, animation = animate_schedules.animate_zero_bubble()
    axes = figure.axes[0]
    half = animate_schedules.STANDING + animate_schedules.MOVING

    def starts(frame):
        animation._func(frame)
        return sorted(round(patch.get_x() - 0.1, 9) for patch in axes.patches)

    for frame, state in ((0, first), (half, second), (2 * half, last)):
        assert starts(frame) == sorted(start for start, _ in state.times.values())
        assert f"idle for {state.idle:g}" in axes.get_title(loc="left")
    share = animate_schedules.MOVING / (animate_schedules.MOVING + 1)  # of the way, one frame before the end
    way = [(start, second.times[place][0]) for place, (start, _) in first.times.items()]
    assert starts(half - 1) == pytest.approx(sorted(start + share * (end - start) for start, end in way))
    animation._draw_was_started = True
    plt.close(figure)


def test_the_gallery_has_the_animations():
    for name in (*GALLERY, "zero_bubble"):
        assert Image.open(ROOT / "visualize" / "gallery" / f"{name}.gif").n_frames > 5
