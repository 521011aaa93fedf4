"""Figures of chapter 12: what is drawn is what was given."""

import numpy as np
from matplotlib.colors import to_hex

from chapters.support.ch12 import figures


def test_a_choice_is_drawn_for_each_expert_and_the_slope():
    logits, weights, slopes = np.array([0.0, 1.0]), np.array([[0.2, 0.8], [0.6, 0.4]]), np.array([0.0, 0.3])
    left, right = figures.plot_choice(logits, weights, slopes, moved=1).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[0.2, 0.6], [0.8, 0.4]]
    assert list(right.lines[0].get_ydata()) == [0.0, 0.3]
    assert right.get_xlabel() == "logit of expert 1"


def test_dispatched_rows_lie_with_their_experts():
    chosen = [np.array([[3, 0], [1, 2]]), np.array([[2, 0]])]  # two ranks, four experts
    first, last, second, third = figures.plot_dispatch(chosen, 4).axes  # down on the left, up on the right
    panels = (first, second, third, last)
    texts = [[text.get_text() for text in axes.texts if text.get_text()] for axes in panels]  # an arrow has no text
    assert texts[0] == ["a3", "a0", "b1", "b2", "c2", "c0"]
    assert texts[1] == ["a0", "b1", "b2", "a3", "c0", "c2"]
    assert texts[2] == ["a0", "b1", "c0", "b2", "a3", "c2"]
    assert texts[3] == ["a0", "c0", "b1", "b2", "c2", "a3"]
    for axes, rows in zip(panels, texts, strict=True):
        colours = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
        assert colours == [figures.RANKS[int(row[1]) // 2] for row in rows]


def test_bytes_of_ep_and_dp_are_marked_where_they_cross():
    lines = {"ep": [1, 2], "dp": [3, 3], "zero": [4, 4]}
    (axes,) = figures.plot_ep_or_dp([10, 20], lines, [15.0]).axes
    assert [list(line.get_ydata()) for line in axes.lines[:3]] == list(lines.values())
    assert axes.texts[0].get_text() == "15" and axes.texts[0].get_position()[0] == 15


def test_mistakes_are_drawn_beside_the_right_run():
    runs = {"right": {"losses": [3, 2], "norms": [1, 1]}, "wrong": {"losses": [3, 1], "norms": [1, 2]}}
    left, right = figures.plot_mistakes(runs).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[3, 2], [3, 1]]
    assert [list(line.get_ydata()) for line in right.lines] == [[1, 1], [1, 2]]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["right", "wrong"]


def test_balance_shows_each_experts_share_of_the_rows():
    runs = {"one": np.array([[6, 2], [8, 0], [8, 0], [6, 2]]), "two": np.full((4, 2), 3)}
    left, right = figures.plot_balance(runs).axes
    for axes, first in ((left, [75, 100, 100, 75]), (right, [50] * 4)):
        lower, upper = (collection.get_paths()[0].vertices[:, 1] for collection in axes.collections)
        assert lower.max() == max(first) and upper.max() == 100 and upper.min() == min(first)
    assert left.get_title(loc="left") == "one\nbusiest: 1.5 x the mean"


def test_the_names_of_eight_experts_are_inside_the_picture():
    figure = figures.plot_balance({name: np.ones((4, 8)) for name in ("left alone", "loss", "bias")})
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == 8 and box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_an_exchange_stands_beside_the_uniform_one():
    (axes,) = figures.plot_exchange({"without": [30, 10], "aux": [20, 22]}, 21.0).axes
    assert [patch.get_height() for patch in axes.patches] == [30, 10, 20, 22]
    assert list(axes.lines[0].get_ydata()) == [21.0, 21.0]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(names) == ["aux", "uniform routing", "without"]


def test_every_sum_of_a_gradient_covers_each_token_once():
    for axes, own in zip(figures.draw_sums(4, 2).axes, (1, 2), strict=True):
        colours = np.array([to_hex(patch.get_facecolor()).upper() for patch in axes.patches]).reshape(4, 4)
        for kind in range(own):
            assert ((colours == figures.RANKS[kind]).sum(axis=0) == 1).all()


def test_rows_beyond_the_capacity_are_drawn_as_dropped():
    left, right = figures.plot_capacity(np.array([1, 4]), 3, [1.0, 2.0], {"a run": [10.0, 0.0]}).axes
    heights = [[bar.get_height() for bar in bars] for bars in left.containers]
    assert heights == [[2, 0], [1, 3], [0, 1]]  # padded, kept, dropped
    assert list(right.lines[0].get_ydata()) == [10.0, 0.0]
