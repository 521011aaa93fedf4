"""Pictures of what layouts cost: what is drawn is what was given."""

import pytest

from visualize import plot_bubbles, plot_fit, plot_wires
from visualize.plan import MEMORY

PARTS = dict.fromkeys(MEMORY, 0.0) | {"parameters": 10e9, "activations": 50e9}


def test_memory_bars_stack_their_parts_and_a_long_one_is_cut_and_says_how_long():
    figure = plot_fit({"one": {"small": PARTS, "large": PARTS | {"activations": 300e9}}}, 80e9, 200e9)
    axes = figure.axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_width()]
    assert bars == [(0, 10), (10, 50), (0, 10), (10, 190)]
    assert [text.get_text().split()[0] for text in axes.texts] == ["60", "310"]
    assert [text.get_weight() for text in axes.texts] == ["normal", "bold"]  # bold: more than there is
    assert list(axes.lines[0].get_xdata()) == [80, 80]


def test_wires_show_each_axis_where_it_takes_time():
    points = {1: {"compute": 4.0, "tp": 0.0, "dp": 1.0}, 2: {"compute": 4.0, "tp": 0.5, "dp": 0.5}}
    axes = plot_wires({"a": ("tp", points), "b": ("dp", points)}).axes[0]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn["computation"] == ([1, 2], [4, 4])
    assert drawn["tp"] == ([2], [0.5]) and drawn["dp"] == ([1, 2], [1, 0.5]) and drawn["pp"] == ([], [])


def test_bubbles_are_curves_from_zero_up():
    axes = plot_bubbles({"a": ("m", {"1f1b": {8: 0.4, 16: 0.3}, "zb-h1": {8: 0.2}})}).axes[0]
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.lines[:2]}
    assert curves == {"1f1b": [0.4, 0.3], "zb-h1": [0.2]}
    assert axes.get_ylim()[0] == 0 and axes.get_xscale() == "log"
    assert axes.get_ylim()[1] == pytest.approx(0.41, abs=0.05)
