"""Figures of single chapters: what is drawn is what was given."""

import pytest
from matplotlib.colors import to_hex

from chapters.support.figures_data_parallel import draw_life_of_buckets, plot_bucket_sizes
from chapters.support.figures_gpt import plot_graph, plot_memory, plot_shares
from chapters.support.figures_mesh import plot_layouts, plot_placements
from chapters.support.figures_tensor import RANKS, plot_activations, plot_cuts, plot_links
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


def test_a_bucket_is_sent_when_full_and_after_the_one_before():
    figure = draw_life_of_buckets([("c", 2, 0), ("b", 1, 1), ("a", 1, 1)], sending=[3, 2])
    boxes = {}
    for patch in figure.axes[0].patches:
        if hasattr(patch, "get_width") and abs(patch.get_height()) == pytest.approx(0.8):
            boxes.setdefault(round(patch.get_y() + 0.4), []).append((patch.get_x(), patch.get_width()))
    assert boxes == {0: [(0, 2), (2, 1), (3, 1)], 1: [(0, 2), (2, 2)], 2: [(2, 3), (5, 2)], 3: [(4, 3)]}
    (counted,) = [patch for patch in figure.axes[0].patches if patch.get_height() == pytest.approx(-0.4)]
    assert (counted.get_x(), counted.get_width()) == (3, 1)  # one of the two gradients of bucket 1


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


def test_cuts_cover_each_matrix_in_the_ranks_order():
    columns, rows = ("qkv", 4, 12, 1, 3), ("proj", 4, 4, 0, 1)
    figure = plot_cuts([columns, rows], ranks=2)
    patches = figure.axes[0].patches
    assert [to_hex(patch.get_facecolor()).upper() for patch in patches] == [RANKS[i % 2] for i in range(8)]
    areas = [patch.get_width() * patch.get_height() for patch in patches]
    assert sum(areas[:6]) == pytest.approx(48) and sum(areas[6:]) == pytest.approx(16)
    assert patches[0].get_height() == 4 and patches[6].get_width() == 4  # whole columns, whole rows
    assert [text.get_text() for text in figure.axes[0].texts] == ["qkv", "proj"]


def test_activation_bars_stack_and_the_paper_is_a_mark():
    figure = plot_activations({"t = 1": {"whole": 10, "split": 24}, "t = 2": {"whole": 10, "split": 12}}, {"t = 2": 22})
    axes = figure.axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches[:4]] == [(0, 10), (10, 24), (0, 10), (10, 12)]
    (mark,) = axes.lines
    assert list(mark.get_xdata()) == [22] and list(mark.get_ydata()) == [1]
    assert [text.get_text() for text in axes.texts] == ["34.0", "22.0"]


def test_links_show_points_curves_and_a_crossing_inside():
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
