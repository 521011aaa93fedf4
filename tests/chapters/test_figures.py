"""Figures of single chapters: what is drawn is what was given."""

import pytest
from matplotlib.colors import to_hex

from chapters.support.figures_data_parallel import plot_bucket_sizes
from chapters.support.figures_gpt import plot_graph, plot_memory, plot_shares
from chapters.support.figures_mesh import plot_layouts, plot_placements
from visualize.style import BLUE, GREY, VERMILION


def test_the_graph_shows_every_edge_and_marks_long_ones():
    figure = plot_graph(["a", "b", "c", "d"], [(1, 0), (3, 0), (1, 2)])
    assert [to_hex(patch.get_edgecolor()).upper() for patch in figure.axes[0].patches] == [GREY, BLUE, VERMILION]
    assert [text.get_text().split()[0] for text in figure.axes[0].get_yticklabels()] == ["a", "b", "c", "d"]


def test_shares_fill_each_bar():
    figure = plot_shares({"parameters": {"wte": 1, "blocks": 3}, "flops": {"blocks": 10}})
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths[:4] == [25.0, 75.0, 0.0, 100.0]


def test_memory_lines_are_the_moments_and_name_the_peak():
    mib = 2**20
    figure = plot_memory({"plain": [("start", 0, 0), ("loss", 4 * mib, 5 * mib), ("end", mib, 6 * mib)]}, turn="loss")
    held, between, turn = figure.axes[0].lines
    assert list(held.get_ydata()) == [0, 4, 1] and list(between.get_ydata()) == [5, 6]
    assert list(turn.get_xdata()) == [1, 1]
    assert "peak 6.0 MiB" in held.get_label()


def test_bucket_sizes_are_between_two_levels_and_numbered():
    rows = [
        {"bucket_bytes": 4096, "seconds": 0.003, "buckets": 1},
        {"bucket_bytes": 1024, "seconds": 0.002, "buckets": 4},
    ]
    axes = plot_bucket_sizes(rows, naive=0.004, computation=0.001).axes[0]
    naive, points, computation = axes.lines
    assert list(points.get_xdata()) == [1024, 4096] and list(points.get_ydata()) == pytest.approx([2, 3])
    assert naive.get_ydata()[0] == pytest.approx(4) and computation.get_ydata()[0] == pytest.approx(1)
    assert [text.get_text() for text in axes.texts] == ["4", "1"]


def test_layouts_share_one_curve_and_differ_below_the_bound():
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
