"""Animated collectives: what moves is what a real run has sent."""

import matplotlib.pyplot as plt
import pytest
from launcher import ROOT
from PIL import Image

from chapters.support.animate import GALLERY, animate, record, states
from minipar.comm import messages, wire_bytes


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


def test_the_gallery_has_the_animations():
    for name in GALLERY:
        assert Image.open(ROOT / "visualize" / "gallery" / f"{name}.gif").n_frames > 5
