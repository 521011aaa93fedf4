"""Pictures of tensor parallelism: what is drawn is what was given."""

import pytest
from matplotlib.colors import to_hex

from visualize.tensor import RANKS, plot_activations, plot_cuts, plot_links


def test_cuts_cover_each_matrix_and_go_round_the_ranks_in_every_group():
    columns, rows = ("qkv", 4, 12, 1, 3), ("proj", 4, 4, 0, 1)
    figure = plot_cuts([columns, rows], ranks=2)
    patches = figure.axes[0].patches
    assert [to_hex(patch.get_facecolor()).upper() for patch in patches] == [RANKS[i % 2] for i in range(8)]
    areas = [patch.get_width() * patch.get_height() for patch in patches]
    assert sum(areas[:6]) == pytest.approx(48) and sum(areas[6:]) == pytest.approx(16)
    assert patches[0].get_height() == 4 and patches[6].get_width() == 4  # whole columns, whole rows
    assert [text.get_text() for text in figure.axes[0].texts] == ["qkv", "proj"]


def test_activation_bars_stack_their_parts_and_the_paper_is_a_mark():
    figure = plot_activations({"t = 1": {"whole": 10, "split": 24}, "t = 2": {"whole": 10, "split": 12}}, {"t = 2": 22})
    axes = figure.axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches[:4]] == [(0, 10), (10, 24), (0, 10), (10, 12)]
    (mark,) = axes.lines
    assert list(mark.get_xdata()) == [22] and list(mark.get_ydata()) == [1]
    assert [text.get_text() for text in axes.texts] == ["34.0", "22.0"]


def test_links_show_points_on_curves_and_a_crossing_inside_the_picture_only():
    curve = {1: 0.010, 2: 0.008, 4: 0.007}
    links = {
        "slow": {"points": {1: 0.010, 2: 0.008}, "curve": curve, "crossing": 1.9},
        "fast": {"points": {1: 0.010}, "curve": curve, "crossing": 30},
    }
    axes = plot_links(links, {1: 0.010, 2: 0.005, 4: 0.0025}).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["slow"] == pytest.approx([10, 8, 7]) and drawn["computation"] == pytest.approx([10, 5, 2.5])
    crossings = [line for line in axes.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crossings] == [[1.9]]
