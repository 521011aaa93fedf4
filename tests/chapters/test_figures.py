"""Figures of single chapters: what is drawn is what was given."""

import pytest
from matplotlib.colors import to_hex

from chapters.support.figures_data_parallel import plot_bucket_sizes
from chapters.support.figures_gpt import plot_graph, plot_memory, plot_shares
from chapters.support.figures_mesh import plot_grid, plot_layouts, plot_pieces, plot_placements
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
    figure = plot_placements(0.1, {("tp", "Ethernet"): 0.2, ("pp", "Ethernet"): 0.11})
    bars = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert [number for bar in bars for number in bar] == pytest.approx([0, 100, 100, 100, 0, 100, 100, 10])
    assert [text.get_text() for text in figure.axes[0].texts] == ["200 ms, +100%", "110 ms, +10%"]


def test_the_grid_joins_ranks_along_each_axis_inside_hosts():
    figure = plot_grid({"pp": 2, "dp": 2, "tp": 4}, per_host=8)
    axes = figure.axes[0]
    texts = {text.get_text(): text.get_position() for text in axes.texts}
    assert "0 1 1" in texts and texts["5"][0] == texts["0 1 1"][0]  # rank 5 and its coordinates in one box
    centres = {(round(x, 3), round(y - 0.09, 3)): int(name) for name, (x, y) in texts.items() if name.isdigit()}
    assert sorted(centres.values()) == list(range(16))
    joined = [
        tuple(centres[round(float(x), 3), round(float(y), 3)] for x, y in zip(*line.get_data(), strict=True))
        for line in axes.lines
    ]
    apart = [b - a for a, b in joined]
    assert {stride: apart.count(stride) for stride in set(apart)} == {1: 12, 4: 8, 8: 8}
    assert (5, 6) in joined and (1, 5) in joined and (5, 13) in joined and (3, 4) not in joined
    hosts = [patch.get_bbox() for patch in axes.patches if patch.get_label().startswith("host")]
    inside = [sorted(r for spot, r in centres.items() if host.contains(*spot)) for host in hosts]
    assert inside == [list(range(8)), list(range(8, 16))]
    with pytest.raises(ValueError, match="whole rows"):
        plot_grid({"pp": 1, "dp": 2, "tp": 4}, per_host=6)


def test_pieces_are_drawn_where_they_lie_in_the_matrix():
    files = {
        0: {"part": 0, "parts": 2, "start": 0, "stop": 3},
        1: {"part": 1, "parts": 2, "start": 0, "stop": 6},
        2: {"part": 0, "parts": 2, "start": 3, "stop": 6},
    }
    left, right = plot_pieces(files, (3, 4)).axes
    owners = {(p.get_x(), p.get_y()): p.get_label() for p in left.patches}
    ranks = [[owners[column, row].removeprefix("rank ") for column in range(4)] for row in range(3)]
    assert ranks == [list("0011"), list("0211"), list("2211")]
    numbers = {text.get_position(): text.get_text() for text in left.texts}
    assert [numbers[column + 0.5, 1.5] for column in range(4)] == ["2", "3", "2", "3"]
    assert "rank 2: part 0 of 2, elements 3:6" in [text.get_text() for text in right.texts]
    assert [patch.get_label() for patch in right.patches].count("rank 1") == 6
