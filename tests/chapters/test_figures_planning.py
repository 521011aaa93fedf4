"""Figures of the planning chapter: what is drawn is what was given."""

import pytest
from matplotlib.colors import to_hex

from chapters.support.ch10.figures import (
    DECISIONS,
    LAST,
    MEANINGS,
    draw_funnel,
    plot_bubbles,
    plot_decisions,
    plot_families,
    plot_fit,
    plot_funnel,
    plot_points,
    plot_scaling,
    plot_spending,
    plot_tornado,
    plot_wires,
)
from chapters.support.ch10.sensitivity import CONSTANTS
from minipar.plan.layout import Layout
from minipar.plan.step_time import StepTime
from visualize.plan import MEMORY, TIME
from visualize.style import BLUE, ORANGE

PARTS = dict.fromkeys(MEMORY, 0.0) | {"parameters": 10e9, "activations": 50e9}
SECONDS = dict.fromkeys(TIME, 0.0) | {"compute": 3.0, "bubble": 1.0}


def test_the_funnel_shows_one_layout_lost_at_each_test():
    layouts = [Layout(dp=d, tp=1, pp=1, microbatch=1, microbatches=1) for d in range(1, 8)]
    times = {one: StepTime(one.dp, 0, 0, 0, 0, 0, exact=False) for one in layouts}
    # dp 1, 2 and 3 are left; dp 4 idles; dp 5, 6 and 7 wait
    left, steps = draw_funnel([*layouts, *layouts], layouts, layouts[:4], layouts[:3], times).axes
    assert [text.get_text() for text in left.texts] == ["14", "7", "4", "3"]
    drawn = [label.get_text().split("\n")[1] for label in steps.get_yticklabels()]
    assert drawn == ["dp 6, tp 1, pp 1", "dp 4, tp 1, pp 1", "dp 1, tp 1, pp 1"]


def test_memory_bars_stack_their_parts_and_long_ones_are_cut():
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


def test_families_are_relative_to_the_fastest_of_each_size():
    axes = plot_families({"ZeRO-3": {64: 30.0, 256: 4.0}, "tp 8": {64: 10.0, 256: 5.0, 1024: 2.0}}).axes[0]
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert curves == {"ZeRO-3": ([64, 256], [3, 1]), "tp 8": ([64, 256, 1024], [1, 1.25, 1])}


def test_scaling_has_a_line_for_each_model_and_a_linear_one():
    axes = plot_scaling({"A100": {"7B": {64: (100.0, 0.5), 256: (300.0, 0.375)}}}).axes[0]
    real, hoped = axes.lines
    assert list(real.get_ydata()) == [100, 300] and list(hoped.get_ydata()) == [100, 400]
    assert [text.get_text() for text in axes.texts] == ["50%", "38%"]


def test_spending_is_in_parts_of_the_whole():
    axes = plot_spending({"7B": {"dp 8": (SECONDS, 0.4)}, "70B": {"tp 8": (SECONDS, 0.5)}}).axes[0]
    heights = [bar.get_height() for bar in axes.patches if bar.get_height()]
    assert heights == pytest.approx([0.75, 0.25] * 2)
    words = [text.get_text() for text in axes.texts]
    assert words == ["7B", "75%", "25%", "40%", "70B", "75%", "25%", "50%"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["dp 8", "tp 8"]


def test_the_funnel_has_a_bar_for_each_test_and_each_layout():
    left, steps = plot_funnel({"all": 40, "fit": 10}, {"dp 8": SECONDS, "tp 8": SECONDS | {"tp": 6.0}}).axes
    assert [bar.get_width() for bar in left.patches] == [40, 10]
    assert [text.get_text() for text in left.texts] == ["40", "10"]
    assert [bar.get_width() for bar in steps.patches if bar.get_width()] == [3, 1, 3, 6, 1]
    assert [text.get_text() for text in steps.texts] == ["4.0 s", "10.0 s"]


def test_decisions_are_drawn_in_order_and_no_text_leaves_its_box():
    figure = plot_decisions()
    figure.draw_without_rendering()
    axes = figure.axes[0]
    lines = [text for one in DECISIONS for text in (one.name, *one.conditions, *one.remedies)]
    drawn = [text.get_text() for text in axes.texts]
    assert [text for text in drawn if text in lines] == lines and drawn[-1] == LAST
    assert drawn.count("yes") == drawn.count("no") == len(DECISIONS)
    boxes = [patch.get_window_extent() for patch in axes.patches]
    for text in axes.texts:
        if text.get_text() in (*lines, LAST):
            extent = text.get_window_extent()
            assert sum(box.x0 < extent.x0 and extent.x1 < box.x1 and box.y0 < extent.y0 < box.y1 for box in boxes) == 1


def test_every_constant_of_the_tornado_has_words():
    assert set(CONSTANTS) <= set(MEANINGS)


def test_points_are_pairs_inside_the_picture():
    time, memory = plot_points({"ms": [(10.0, 12.0), (500.0, 300.0)], "MB": [(3.0, 3.0)]}, 0.2).axes
    assert [list(line) for line in time.lines[1].get_data()] == [[12.0, 300.0], [10.0, 500.0]]
    assert list(memory.lines[1].get_xdata()) == [3.0]
    for axes, least, most in ((time, 10, 500), (memory, 3, 3)):
        assert len(axes.get_xticks()) > 1 and list(axes.get_xticks()) == list(axes.get_yticks())
        assert axes.get_xlim() == axes.get_ylim() and axes.get_xlim()[0] < least and axes.get_xlim()[1] > most


def test_a_tornado_is_sorted_with_stars_where_a_layout_changes():
    effects = {
        "links": {"-20 %": (0.01, False), "+20 %": (-0.01, False)},
        "products": {"-20 %": (0.2, True), "+20 %": (-0.1, False)},
        "cards": {"-20 %": (0.0, False), "+20 %": (0.0, False)},
    }
    left, right = plot_tornado({"one": effects, "two": effects}).axes
    assert [label.get_text() for label in left.get_yticklabels()] == [MEANINGS["products"], MEANINGS["links"]]
    for axes in (left, right):
        assert [bar.get_width() for bar in axes.patches] == [0.2, -0.1, 0.01, -0.01]
        assert [to_hex(bar.get_facecolor()).upper() for bar in axes.patches] == [ORANGE, BLUE] * 2
        stars = [line for line in axes.lines if line.get_marker() == "*"]
        assert len(stars) == 1 and stars[0].get_xdata()[0] > 0.2
