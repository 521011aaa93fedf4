"""Figures of chapter 3: what is drawn is what was given."""

import numpy as np
import pytest

from chapters.support.ch03.figures import plot_blocks, plot_crossover

FIRST = np.array([[1, 1], [2, 2]])  # two ranks, two chunks: each rank brings its own bit
SECOND = np.array([[3, 1], [2, 3]])


def texts(axes):
    return [text.get_text() for text in axes.texts]


def frames(axes):
    """List the (chunk, rank) of the framed blocks."""
    patches = [patch for patch in axes.patches if not patch.get_fill()]
    return [(round(patch.get_x() + 0.43), round(patch.get_y() + 0.43)) for patch in patches]


def test_blocks_name_their_ranks_and_changes_are_framed():
    first, second = plot_blocks([[("at first", FIRST), ("step 1", SECOND)]]).axes
    assert texts(first) == ["0", "0", "1", "1"] and texts(second) == ["Σ", "0", "1", "Σ"]
    assert frames(first) == [] and frames(second) == [(0, 0), (1, 1)]
    assert [label.get_text() for label in first.get_yticklabels()] == ["rank 0", "rank 1"]


def test_a_row_of_blocks_continues_or_begins_anew():
    rows = [("at first", FIRST), ("step 1", SECOND)], [("step 1", SECOND), ("step 2", FIRST)]
    axes = plot_blocks(rows).axes
    assert [len(frames(panel)) for panel in axes] == [0, 2, 0, 2]
    anew = plot_blocks([rows[0], rows[0]]).axes
    assert [len(frames(panel)) for panel in anew] == [0, 2, 0, 2]


def test_the_crossover_shows_points_formulas_and_crossings():
    times = {("ring", 1024): 0.002, ("ring", 4096): 0.003, ("tree", 1024): 0.001, ("tree", 4096): 0.004}
    formulas = {"ring": lambda n: n / n * 0.002, "tree": lambda n: n * 1e-6}
    axes = plot_crossover(times, formulas, {"tree overtakes ring": 2000.0}).axes[0]
    ring, points, tree, more, crossing = axes.lines
    assert list(points.get_xdata()) == [1024, 4096] and list(points.get_ydata()) == pytest.approx([2, 3])
    assert list(more.get_ydata()) == pytest.approx([1, 4])
    assert set(ring.get_ydata()) == {2.0} and tree.get_ydata()[0] == pytest.approx(1.024)
    assert list(crossing.get_xdata()) == [2000.0, 2000.0] and texts(axes) == ["tree\novertakes ring"]
