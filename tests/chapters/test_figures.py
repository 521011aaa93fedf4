"""Figures of single chapters: what is drawn is what was given."""

from dataclasses import dataclass

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from chapters.support.ch01.figures import plot_backward, plot_small_graph, plot_steps, plot_three_paths
from chapters.support.ch02.figures import block_operations, plot_attention, plot_block, plot_memory, plot_shares, shares
from chapters.support.ch04.figures import draw_life_of_buckets, plot_bucket_sizes
from chapters.support.ch09.layout_figures import plot_grid, plot_layouts, plot_pieces, plot_placements
from minipar.nn import GPT, GPTConfig
from visualize.style import YELLOW


@dataclass(eq=False)
class Result:
    """A tensor after backward, as chapter 1's engine leaves it."""

    number: int
    data: float
    grad: float
    inputs: tuple = ()
    rules: tuple = ()


def test_backward_shows_contributions_order_and_uses():
    x, w = Result(0, 2.0, 48.0), Result(1, 3.0, 28.0)
    a = Result(2, 6.0, 14.0, (x, w), (lambda g: g * 3, lambda g: g * 2))
    b = Result(3, 8.0, 6.0, (a, x), (lambda g: g, lambda g: g))
    c = Result(4, 48.0, 1.0, (a, b), (lambda g: g * 8, lambda g: g * 6))
    figure = plot_backward({"c": c, "b": b, "x": x, "a": a, "w": w})
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[:6] == ["42", "28", "6", "6", "8", "6"]
    boxes = [text for text in texts if ":" in text]
    assert [box.split(":")[0] for box in boxes] == ["2", "3", "4", "0", "1"]
    assert [text for text in texts if text.startswith("visited")] == ["visited 3rd", "visited 2nd", "visited 1st"]
    completions = ["complete after 2 contributions", "complete after 1 contribution"]
    assert [text for text in texts if text.startswith("complete")] == completions
    assert texts.count("value 48") == texts.count("gradient 48") == 1


def test_the_first_graph_has_the_gradients_of_the_formula():
    texts = [text.get_text() for text in plot_small_graph().axes[0].texts]
    w, x = 3, 2
    assert f"gradient {2 * x * w**2 + 2 * x * w}" in texts
    assert f"gradient {2 * x**2 * w + x**2}" in texts


def test_the_error_of_a_step_is_drawn_with_its_two_causes():
    steps = [1e-8, 1e-6, 1e-4, 1e-2]
    measured, truncation, rounding, *_ = plot_steps(steps, [1e-8, 1e-10, 1e-8, 1e-4]).axes[0].lines
    assert list(measured.get_xdata()) == steps
    assert list(truncation.get_ydata()) == pytest.approx([1e-8, 1e-4])
    assert list(rounding.get_ydata()) == pytest.approx([1e-8, 1e-10])


def test_three_paths_add_up_to_the_marks():
    paths = {"directly": [1.0, 2.0], "through rho": [0.5, -1.0], "through the mean": [-1.0, -1.0]}
    graph, bars = plot_three_paths(paths).axes
    assert list(bars.lines[0].get_ydata()) == [0.5, 0.0]
    assert [bar.get_height() for bar in bars.patches] == [1.0, 2.0, 0.5, -1.0, -1.0, -1.0]
    assert len(graph.patches) == 2 * len(paths) + 1, "two ways for each path, and where the gradient comes from"


def test_a_block_keeps_what_its_bars_show():
    operations = block_operations(B=2, T=3, h=8, a=4)
    assert sum(operation.kept for operation in operations) == 20 * 6 * 8 + 4 * 2 * 3**2 + 2 * 6
    axes = plot_block(operations, skips=[(0, 4), (5, 9)]).axes[0]
    assert [text.get_text() for text in axes.texts[:3]] == ["ln_1", "(B, T, h)", operations[0].keeps]
    bars = [patch.get_width() for patch in axes.patches if patch.get_facecolor() == to_rgba(YELLOW)]
    kept = [operation.kept for operation in operations if operation.kept]
    assert bars == pytest.approx([bars[0] / kept[0] * elements for elements in kept])
    assert len(axes.lines) == 2


def test_attention_is_drawn_as_it_is():
    probabilities, gradients = np.array([[1.0, 0.0], [0.25, 0.75]]), np.array([[0.0, 0.0], [-0.5, 0.5]])
    left, right = plot_attention(probabilities, gradients).axes[:2]
    assert (left.images[0].get_array() == probabilities).all()
    assert (right.images[0].get_array() == gradients).all() and right.images[0].get_clim() == (-0.5, 0.5)


def test_shares_are_those_of_the_whole_model():
    config = GPTConfig(vocab_size=11, n_positions=7, n_embd=8, n_layer=3, n_head=2)
    parameters, operations = shares(config, length=5)
    assert sum(parameters.values()) == sum(p.size for p in GPT(config).parameters())
    assert sum(operations.values()) == config.forward_flops(1, 5)


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
    assert [text.get_text() for text in figure.axes[0].texts] == ["200 ms, +100 %", "110 ms, +10 %"]


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
