"""Pictures of layouts: what is drawn is what was given."""

import pytest

from visualize import plot_layouts, plot_placements


def test_layouts_lie_on_one_curve_and_their_differences_below_the_bound():
    runs = {"dp 2": ([5.0, 4.0], [1e-15, 2e-15]), "tp 2": ([5.0, 4.0], [3e-14, 4e-14])}
    figure = plot_layouts(runs, [5.0, 4.0], [1e-12, 6e-12])
    top, bottom = figure.axes
    assert [list(line.get_ydata()) for line in top.lines] == [[5.0, 4.0]] * 3
    assert [list(line.get_ydata()) for line in bottom.lines[:3]] == [[1e-15, 2e-15], [3e-14, 4e-14], [1e-12, 6e-12]]
    sizes = [line.get_markersize() for line in top.lines[1:]]
    assert sizes == sorted(set(sizes), reverse=True)  # one inside the other
    assert [text.get_text() for text in top.get_legend().get_texts()] == ["one device", "dp 2", "tp 2"]


def test_a_placement_is_the_ideal_and_what_its_axis_adds():
    figure = plot_placements(0.1, {"Ethernet": {"tp": 0.2, "pp": 0.11}}, {"tp": "of tp", "pp": "of pp"})
    bars = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert [number for bar in bars for number in bar] == pytest.approx([0, 100, 100, 100, 0, 100, 100, 10])
    assert [text.get_text() for text in figure.axes[0].texts] == ["200 ms, +100%", "110 ms, +10%"]
