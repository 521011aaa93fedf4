"""Claims about a timeline's arrows: those that can be followed are drawn, in the lanes of what sends them."""

import numpy as np
import pytest

from minipar.comm import run_local
from minipar.comm.trace import save_chrome_trace, start_trace
from visualize import plot_timeline, read_trace
from visualize.arrows import MOST_ARROWS, Message, tracks_with_arrows

SINGLE = "communication pp, send and receive"


def messages(**counts):
    """So many messages of each track."""
    return [Message(0, 0.0, 1, 1.0, track=track) for track, count in counts.items() for _ in range(count)]


def test_messages_between_single_ranks_alone_are_drawn():
    assert tracks_with_arrows(messages(tp=3, **{SINGLE: 2}, dp=1)) == [SINGLE]
    assert tracks_with_arrows(messages(**{SINGLE: 10 * MOST_ARROWS})) == [SINGLE]


@pytest.mark.parametrize(
    ("counts", "drawn"),
    [
        ({}, []),
        ({"tp": MOST_ARROWS - 5, "dp": 5}, ["dp", "tp"]),
        ({"tp": MOST_ARROWS - 4, "dp": 5}, ["dp"]),
        ({"tp": 10 * MOST_ARROWS}, ["tp"]),
        ({"tp": 100 * MOST_ARROWS, "dp": 10 * MOST_ARROWS, "cp": 20 * MOST_ARROWS}, ["dp"]),
    ],
)
def test_of_collectives_those_with_fewest_messages_are_drawn(counts, drawn):
    assert tracks_with_arrows(messages(**counts)) == drawn


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Three ranks: an all-reduce, and rank 0 sends to rank 2."""
    path = str(tmp_path_factory.mktemp("trace") / "t.json")

    def work(comm):
        start_trace(comm)
        with comm.tracer.region("forward", flops=1e9):
            pass
        comm.all_reduce(np.ones(64))
        if comm.rank == 0:
            comm.isend(np.ones(8), 2).wait()
        if comm.rank == 2:
            comm.irecv(np.empty(8), 0).wait()
        with comm.tracer.region("optimizer", flops=1e9):
            pass
        save_chrome_trace(path, comm)

    run_local(3, work, clock="model")
    return read_trace(path)


def test_an_arrow_is_in_the_lanes_of_its_messages(trace):
    figure = plot_timeline(trace, arrows=True)
    arrows = [text for text in figure.axes[0].texts if text.arrow_patch is not None]
    assert len(arrows) == 1 and "arrows: 1 message of world p2p" in [text.get_text() for text in figure.texts]
    lanes = {text.get_text(): text.xy[1] for text in figure.axes[0].texts[:4] if text.get_text()}
    start, stop = arrows[0].xyann[1], arrows[0].xy[1]
    assert (int(start), int(stop)) == (0, 2)
    assert start % 1 == pytest.approx(lanes["world p2p"] % 1) and stop % 1 == pytest.approx(lanes["world p2p"] % 1)


def test_arrows_are_below_the_numbers_of_the_boxes(trace):
    texts = plot_timeline(trace, arrows=True).axes[0].texts
    assert max(text.zorder for text in texts if text.arrow_patch) < min(t.zorder for t in texts if not t.arrow_patch)


def test_without_arrows_there_are_none_and_no_note(trace):
    figure = plot_timeline(trace)
    assert not any(text.arrow_patch for text in figure.axes[0].texts)
    assert not any("arrows" in text.get_text() for text in figure.texts)
