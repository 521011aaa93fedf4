"""Pictures of a model, its memory and its buckets: what is drawn is what was given."""

import pytest
from matplotlib.colors import to_hex

from visualize.memory import plot_memory
from visualize.model import plot_graph, plot_shares
from visualize.overlap import plot_bucket_sizes
from visualize.style import BLUE, GREY, VERMILION


def test_the_graph_shows_every_edge_and_marks_long_and_backward_ones():
    figure = plot_graph(["a", "b", "c", "d"], [(1, 0), (3, 0), (1, 2)])
    assert [to_hex(patch.get_edgecolor()).upper() for patch in figure.axes[0].patches] == [GREY, BLUE, VERMILION]
    assert [text.get_text().split()[0] for text in figure.axes[0].get_yticklabels()] == ["a", "b", "c", "d"]


def test_shares_fill_each_bar():
    figure = plot_shares({"parameters": {"wte": 1, "blocks": 3}, "flops": {"blocks": 10}})
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths[:4] == [25.0, 75.0, 0.0, 100.0]


def test_memory_lines_are_the_moments_held_and_the_legend_names_the_peak():
    mib = 2**20
    figure = plot_memory({"plain": [("start", 0, 0), ("loss", 4 * mib, 5 * mib), ("end", mib, 6 * mib)]}, turn="loss")
    held, between, turn = figure.axes[0].lines
    assert list(held.get_ydata()) == [0, 4, 1] and list(between.get_ydata()) == [5, 6]
    assert list(turn.get_xdata()) == [1, 1]
    assert "peak 6.0 MiB" in held.get_label()


def test_bucket_sizes_lie_between_the_two_levels_and_are_numbered():
    rows = [
        {"bucket_bytes": 4096, "seconds": 0.003, "buckets": 1},
        {"bucket_bytes": 1024, "seconds": 0.002, "buckets": 4},
    ]
    axes = plot_bucket_sizes(rows, naive=0.004, computation=0.001).axes[0]
    naive, points, computation = axes.lines
    assert list(points.get_xdata()) == [1024, 4096] and list(points.get_ydata()) == pytest.approx([2, 3])
    assert naive.get_ydata()[0] == pytest.approx(4) and computation.get_ydata()[0] == pytest.approx(1)
    assert [text.get_text() for text in axes.texts] == ["4", "1"]
