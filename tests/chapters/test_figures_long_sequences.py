"""Figures of chapter 11: what is drawn is what was given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.legend import Legend
from matplotlib.patches import Polygon, Rectangle

from chapters.support.ch11 import figures
from visualize.style import BLUE, MINT, PAPER


def faces(axes, kind=Rectangle):
    return [to_hex(patch.get_facecolor()).upper() for patch in axes.patches if isinstance(patch, kind)]


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("blocks", [1, 5])
def test_every_block_of_a_mask_is_of_one_kind(blocks):
    axes = figures.plot_mask(blocks).axes[0]
    below = blocks * (blocks - 1) // 2
    assert faces(axes).count(MINT) == below and faces(axes).count(PAPER) == blocks**2
    assert faces(axes, Polygon) == [BLUE] * blocks
    words = [text.get_text() for text in axes.figure.findobj(Legend)[0].get_texts()]
    assert words == ["skipped", "full", "diagonal: masked"]


def test_costs_are_drawn_in_mebibytes_and_milliseconds():
    left, right = figures.plot_costs(
        (2, 4), {"one": [(2**20, 0.5), (2**22, 1)], "two": [(2**21, 0.25), (2**21, 2)]}
    ).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[1, 4], [2, 2]]
    assert [list(line.get_ydata()) for line in right.lines] == [[500, 1000], [250, 2000]]


def test_a_ring_ends_at_home_in_backward_alone():
    forward, backward = figures.plot_ring(3).axes
    assert texts(forward) == [f"K V of {(rank - step) % 3}" for rank in range(3) for step in range(3)]
    assert texts(backward)[3::4] == [f"dK dV\nof {rank}" for rank in range(3)]
    assert texts(backward)[2] == "K V of 1\n+ dK dV of 1"


def test_balance_shows_the_share_of_work():
    places = {"contiguous": [(0, 1), (2, 3)]}
    work = np.array([[3, 3], [0, 4]])
    table, steps = figures.plot_balance(places, {"contiguous": work}).axes
    assert faces(table, Polygon) == [figures.RANKS[rank] for rank in (0, 0, 1, 1)]
    assert "71 %" in steps.get_title(loc="left")  # 10 of 2 x 7
    widths = [patch.get_width() for patch in steps.patches]
    assert widths[::2] == [3, 3, 4, 4] and widths[1::2] == [3, 3, 0, 4]


def test_an_all_to_all_turns_rows_into_columns():
    before, after = (np.array(texts(axes)[:9]).reshape(3, 3) for axes in figures.plot_ulysses(3).axes)
    assert (before == after.T).all() and list(before[:, 0]) == ["rank 0", "rank 1", "rank 2"]


def test_a_crossover_plots_what_it_is_given():
    figure = figures.plot_crossover(
        [1, 8], range(2, 5), lambda c, group: {"ring": c, "all-gather": group, "ulysses": c * group}
    )
    lines = [[list(line.get_ydata()) for line in axes.lines] for axes in figure.axes]
    assert lines == [[[2, 3, 4], [1, 1, 1], [2, 3, 4]], [[2, 3, 4], [8, 8, 8], [16, 24, 32]]]


def test_running_sums_are_drawn_with_their_quotients():
    left, middle, right = figures.plot_running([[1.0, 1.0, 3.0], [2.0, 2.0, 4.0]], output=2.0, lse=2.5).axes
    assert [list(line.get_ydata()) for line in middle.lines] == [[1.0, 2.0], [3.0, 4.0]]
    assert list(left.lines[1].get_ydata()) == [1.0, 2.0 + np.log(2.0)]
    assert list(right.lines[0].get_ydata()) == [3.0, 2.0]


def test_losses_of_runs_are_drawn_with_their_names():
    (axes,) = figures.plot_losses({"right": [3.0, 2.0], "wrong": [3.0, 4.0]}).axes
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {"right": [3, 2], "wrong": [3, 4]}


def test_attention_is_half_of_the_operations_at_12_hidden_sizes():
    left, right = figures.plot_attention_share(np.array([12, 24]), (1, 2), layers=1).axes
    assert left.lines[0].get_ydata()[0] == left.lines[2].get_ydata()[1] == 50
    assert [line.get_label() for line in right.lines[:3]] == ["all activations", "recomputed", "one layer"]
