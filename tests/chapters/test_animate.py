"""Animations: what moves is what a real run has sent, or what a schedule has in another place."""

import matplotlib.pyplot as plt
import pytest
from launcher import ROOT
from matplotlib.colors import to_hex
from PIL import Image

from chapters.support import animate_schedules
from chapters.support.animate import GALLERY, animate, place_of, record, states
from chapters.support.ch05 import animate_units
from chapters.support.ch11 import animate_ring
from minipar.comm import messages, wire_bytes
from minipar.parallel.pipeline.actions import simulate
from minipar.parallel.pipeline.schedules import make
from visualize.style import COLOURS, picture


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
    moving = [patch for patch in figure.axes[0].patches if patch.get_zorder() >= 4]
    ends = [place_of(rank, 0, 2)[1] for rank in range(2)]
    assert len(moving) == 2 * 2 and all(ends[1] < patch.get_y() < ends[0] for patch in moving)
    assert max(patch.get_x() for patch in moving[:2]) > max(patch.get_x() for patch in moving[2:])  # beside one another
    animation._func(9)  # arrived
    assert not [patch for patch in figure.axes[0].patches if patch.get_zorder() >= 4]
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


@pytest.mark.parametrize("name", [*GALLERY, "zero_bubble", "zero3_units", "ring_attention"])
def test_the_gallery_has_the_animations(name):
    assert Image.open(ROOT / "visualize" / "gallery" / f"{name}.gif").n_frames > 5


# ---- ring attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_blocks_travel_to_the_right_and_later_keys_are_skipped(ranks):
    journey = animate_ring.record(ranks=ranks)
    assert journey.owners == tuple(tuple((rank - step) % ranks for rank in range(ranks)) for step in range(ranks))
    assert journey.seen == tuple(tuple(owner <= rank for owner in range(ranks)) for rank in range(ranks))


def test_a_ring_that_forgets_a_merge_looks_different():
    def forgets(comm, q, kv):
        out, lse = animate_ring.library_ring(comm, q, kv)
        if comm.rank == 2:
            out[:, 0] = 0  # nothing of the values of rank 0
        return out, lse

    right, wrong = animate_ring.record_both(animate_ring.library_ring), animate_ring.record(forgets)
    assert wrong.owners == right.owners and wrong.seen[2] == (False, True, True, False) != right.seen[2]
    with pytest.raises(AssertionError):
        animate_ring.record_both(forgets)


def test_a_travelling_block_is_drawn_between_two_ranks():
    journey = animate_ring.record(ranks=3)

    def moving(step, share):
        axes = picture(4, 3).subplots()
        animate_ring.draw_step(axes, journey, step, share)
        return sorted(patch.get_y() for patch in axes.patches if patch.get_zorder() == 6)

    assert moving(0, 0.25) == [-1.5, -1.25, -0.25]  # the first one returns from rank 2 to rank 0
    assert moving(0, 1.0) == [] and moving(2, 0.25) == []  # arrived; the last step sends nothing
    panels = animate_ring.still(journey).axes
    assert [axes.get_title("left") for axes in panels] == ["step 0", "step 1", "step 2", ""]


# ---- stage 3 ---------------------------------------------------------------------------------------------------------


def test_units_are_gathered_used_and_freed_one_after_the_other():
    events = animate_units.record()
    forward = [(kind, unit) for unit in (0, 1) for kind in ("gather", "forward", "free")]
    last = [(kind, 2) for kind in ("gather", "forward", "backward", "reduce", "free")]
    backward = [(kind, unit) for unit in (1, 0) for kind in ("gather", "backward", "reduce", "free")]
    assert [(event.kind, event.unit) for event in events] == forward + last + backward
    for event in events:
        assert event.whole == tuple(event.kind != "free" and unit == event.unit for unit in range(3))


def filled(number, share):
    """The filled chunks of parameters and of gradients that are drawn in their places, of all ranks and units."""
    axes = picture(4, 3).subplots()
    animate_units.draw_moment(axes, animate_units.record(), number, share)
    still = [patch for patch in axes.patches if patch.get_zorder() == 1]
    counts = [
        sum(to_hex(patch.get_facecolor()).upper() == COLOURS[kind] for patch in still)
        for kind in ("parameters", "gradients")
    ]
    return counts, len([patch for patch in axes.patches if patch.get_zorder() == 5])


def test_a_rank_is_drawn_with_what_it_holds():
    own = 3 * 4  # a chunk of each of three units on each of four ranks
    assert filled(0, 0.5) == ([own, 0], 12)  # each chunk on its way to three other ranks
    assert filled(0, 1.0) == ([own + 12, 0], 0)  # unit 0 is whole
    assert filled(2, 1.0) == ([own, 0], 0)  # and freed
    assert filled(8, 1.0) == ([own + 12, 16], 0)  # backward of unit 2: a whole gradient on each rank
    assert filled(9, 0.5) == ([own + 12, 16], 12)  # each rank sends three chunks of it
    assert filled(9, 1.0) == ([own + 12, 4], 0)  # one chunk of the sum is left on each
    assert filled(18, 1.0) == ([own, own], 0)


def test_the_still_shows_all_events_of_a_unit():
    panels = animate_units.still(animate_units.record()).axes
    titles = [axes.get_title("left") for axes in panels]
    assert titles == ["gather", "forward", "free", "", "gather", "backward", "reduce-scatter", "free"]
