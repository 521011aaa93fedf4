"""What is drawn at the edges: single points, limits of lengths, legends, and axes without marks or grid."""

import math
import warnings
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from picture_cases import bench_rows, chrome, rows, slice_event
from picture_parts import timeline
from picture_text import layouts, of_milliseconds, search

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make
from visualize import (
    gallery,
    parse_trace,
    plot_agreement,
    plot_bench,
    plot_bytes,
    plot_comparison,
    plot_ledger,
    plot_loss,
    plot_schedule,
    plot_schedules,
    plot_timeline,
)
from visualize.arrows import Message, tracks_with_arrows
from visualize.boxes import legend_handles, palette
from visualize.comparison import NOT_FINITE
from visualize.plan import plot_plan
from visualize.schedule import bubble_text, facts, sizes_text
from visualize.style import INK


def words(legend):
    """Return the texts of a legend."""
    return [text.get_text() for text in legend.get_texts()]


def marks(axis) -> set[float]:
    """Return the lengths of the marks at an axis's labels."""
    return {tick.tick1line.get_markersize() for tick in axis.get_major_ticks()}


def grid(axis) -> set[bool]:
    """Return whether lines are drawn at an axis's labels."""
    return {line.get_visible() for line in axis.get_gridlines()}


# ---- loss, memory, bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("losses", "markers"), [([3.0], ["None", "o"]), ([3.0, 2.0], ["None"])], ids=str)
def test_a_single_step_is_a_point_and_two_are_a_line(losses, markers):
    axes = plot_loss({"run": rows(losses)}).axes[0]
    assert [line.get_marker() for line in axes.lines] == markers


def test_a_curve_of_more_than_60_steps_is_smoothed():
    short = plot_loss({"": rows([2.0] * 60)}).axes[0].get_legend()
    assert words(short) == ["every step, 2.000 at first, 2.000 at last"]
    long = plot_loss({"": rows([2.0] * 61)}).axes[0].get_legend()
    assert [text.split(",")[0] for text in words(long)] == [
        "smoothed",
        "thin line: every step; smoothed: the mean of up to 10 steps on either side",
    ]


MOMENTS = [("forward", (4, 4, 8, 0, 0)), ("backward", (4, 4, 8, 0, 1))]


def test_a_formula_is_drawn_in_the_panels_that_it_names():
    figure = plot_ledger({"a": MOMENTS, "b": MOMENTS}, {"b": 16})
    levels = [[line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] for axes in figure.axes]
    assert levels == [[], [16]]


def test_a_legend_of_memory_is_one_row_where_three_panels_are():
    columns = [plot_ledger({str(i): MOMENTS for i in range(n)}).legends[0]._ncols for n in (1, 2, 3)]
    assert columns == [3, 3, 5]
    assert plot_ledger({str(i): MOMENTS for i in range(3)}, {"0": 16}).legends[0]._ncols == 6


def test_memory_that_is_always_empty_has_an_axis():
    axes = plot_ledger({"run": [("forward", (0, 0, 0, 0, 0))]}).axes[0]
    assert axes.get_ylim() == (0, 1.15) and [text.get_text() for text in axes.texts] == ["peak 0 B"]


def test_phases_have_no_marks_and_no_lines():
    axes = plot_ledger({"run": MOMENTS}).axes[0]
    assert marks(axes.xaxis) == {0} and 0 not in marks(axes.yaxis)
    assert grid(axes.xaxis) == {False} and grid(axes.yaxis) == {True}


def test_bytes_stand_right_of_the_bar_and_of_the_formula():
    figure = plot_bytes([{"op": "a", "bytes": 10, "expected": 25}, {"op": "b", "bytes": 30, "expected": 7}])
    axes = figure.axes[0]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("10", (25, 0)), ("30", (30, 1))]
    assert grid(axes.xaxis) == {True} and grid(axes.yaxis) == {False}
    (mark,) = [line for line in figure.legends[0].legend_handles if line.get_label() == "formula"]
    assert words(figure.legends[0]) == ["formula", "counted"] and mark.get_markersize() == 11


def test_a_benchmark_of_mpi_alone_has_no_panel_of_bytes():
    mpi = bench_rows()[2]
    time, wire = plot_bench([mpi, mpi | {"bytes": 1}]).axes
    assert time.axison and not wire.axison and list(time.lines[0].get_xdata()) == [1, 4096]


@pytest.mark.parametrize(("largest", "ticks"), [(3e-5, [1e-7, 1e-6, 1e-5]), (3e-7, [1e-7, 2e-7])])
def test_times_of_a_benchmark_are_named_by_powers_of_ten(largest, ticks):
    """Twice and five times a power are named, too, unless the times are far apart."""
    row = bench_rows()[0]
    shortest = row | {"bytes": 8, "seconds": 9e-8, "mpi_seconds": None}
    longest = row | {"seconds": largest}
    time = plot_bench([shortest, longest]).axes[0]
    low, high = time.get_ylim()
    found = [tick for tick in time.get_yticks() if low <= tick <= high]
    assert found[: len(ticks)] == pytest.approx(ticks)
    time.figure.draw_without_rendering()
    assert not any(label.get_text() for label in time.get_yticklabels(minor=True))


# ---- comparisons and plans -------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_has_a_colour_of_its_own():
    figure = plot_comparison({0: {"a": math.nan, "b": 2.0}, 1: {"a": 0.0, "b": 2.0}})
    pixels = figure.axes[0].images[0]
    first = [round(255 * part) for part in pixels.get_array()[0][0]]
    assert first == [int(NOT_FINITE[i : i + 2], 16) for i in (1, 3, 5)]
    assert words(figure.legends[0]) == ["zero in one run", "not finite"]
    assert pixels.get_interpolation() == "nearest", "no colours between two steps"
    assert figure.axes[1]._colorbar.extend == "both"
    assert figure.axes[0].get_title(loc="left").endswith("they differ from step 0 on")


@pytest.mark.parametrize(("names", "steps", "named"), [(60, 12, (60, 12)), (61, 13, (31, 7))])
def test_sixty_names_and_twelve_steps_are_all_named(names, steps, named):
    """Of more, each second one is named."""
    ratios = dict.fromkeys(map(str, range(names)), 2.0)
    axes = plot_comparison(dict.fromkeys(range(steps), ratios)).axes[0]
    assert (len(axes.get_yticks()), len(axes.get_xticks())) == named


def test_layouts_have_round_numbers_on_their_axes():
    """The axes go from the smallest value to the largest. 2 and 50 are the outermost that are shown."""
    row = layouts()[0] | {"peak_bytes": 2_400_000, "predicted_bytes": 2_400_000}
    memory = plot_agreement([row, row | {"peak_bytes": 8_333_334 * 5}]).axes[1]
    assert list(memory.get_xticks()) == [2, 5, 10, 20, 50] and list(memory.get_xticks(minor=True)) == []
    one = layouts()[0] | {"peak_bytes": 100_000, "predicted_bytes": 1_000_000}
    assert list(plot_agreement([one]).axes[1].get_xticks()) == pytest.approx([0.1, 0.2, 0.5, 1])


@pytest.mark.parametrize(("seconds", "nbytes", "units"), [(1.0, 1e9, ("s", "GB")), (1e-9, 1.0, ("us", "kB"))])
def test_plans_of_one_second_and_one_gigabyte_have_these_units(seconds, nbytes, units):
    """Microseconds and kilobytes are the smallest units."""
    found = search()
    for mesh in found["meshes"]:
        mesh["memory_bytes"] = nbytes
    for plan in found["plans"]:
        plan["seconds"]["total"] = seconds
    time, memory, _ = plot_plan(found).axes
    assert time.get_ylabel() == f"time of a step ({units[0]})"
    assert memory.get_ylabel() == f"memory of the fullest rank ({units[1]})"


def test_a_plans_number_stands_at_its_mesh_in_the_axes_units():
    found = of_milliseconds(search())
    points = plot_plan(found).axes[2]
    places = [(mesh["memory_bytes"] / 1e6, mesh["seconds"] * 1e3) for mesh in found["meshes"]]
    drawn = [tuple(point) for line in points.lines[:2] for point in line.get_xydata()]
    assert sorted(drawn) == [pytest.approx(place) for place in sorted(places)]
    assert [(text.get_text(), text.xy) for text in points.texts] == [
        ("1", pytest.approx(places[0])),
        ("2", pytest.approx(places[1])),
        ("3", pytest.approx(places[2])),
    ]


@pytest.mark.parametrize(("factor", "drawn"), [(6, []), (5, ["50% of a GPU's memory: the limit"])])
def test_a_limit_three_times_as_far_as_the_meshes_is_not_drawn(factor, drawn):
    found = search()
    found["plans"] = found["plans"][:1]
    most = max(mesh["memory_bytes"] for mesh in found["meshes"])
    found["gpu"]["memory"] = factor * most
    found["assumptions"]["memory_used"] = 0.5
    points = plot_plan(found).axes[2]
    assert words(points.get_legend()) == ["any other mesh", "plan 1, with bars on the left", *drawn]


# ---- schedules -------------------------------------------------------------------------------------------------------


def test_a_bubble_is_a_fraction_up_to_thousandths():
    assert bubble_text(Fraction(1, 1000)) == "1/1000 = 0.1 %" and bubble_text(Fraction(1, 1001)) == "0.1 %"


def test_a_schedule_without_a_bubble_counts_it_in_one_way():
    assert facts(timeline("zb-h1", 1, 1)) == "bubble (idle / total) 0  ·  peak 1 activation"


def test_different_times_of_messages_are_not_in_the_caption():
    assert sizes_text([timeline(), timeline(comm=Fraction(1, 4))]) == "p = 4 ranks, m = 8 microbatches;  F = 1, B = 2"


def test_the_gallery_takes_the_times_that_it_is_given():
    times = Durations(Fraction(2), Fraction(1), Fraction(1), Fraction(1, 2))
    lines = gallery(1, 4, times)
    assert lines["1F1B"].makespan == 16 and lines["1F1B"].comm == Fraction(1, 2)


@pytest.mark.parametrize(("length", "shown"), [(20, "n" * 20), (21, "n" * 19 + "…")])
def test_a_long_name_is_cut_after_twenty_letters(length, shown):
    schedule = replace(make("gpipe", 1, 1), name="n" * length)
    assert plot_schedule(simulate(schedule)).axes[0].get_title(loc="left") == shown


def test_a_schedule_of_one_and_a_half_times_the_next_is_not_cut():
    short = timeline(forward=2, backward_input=2, backward_weight=2)
    longer = timeline(forward=3, backward_input=3, backward_weight=3)
    longest = timeline(forward=4, backward_input=4, backward_weight=4)
    assert plot_schedules({"a": short, "b": longer}).axes[0].get_xlim()[1] == longer.makespan
    figure = plot_schedules({"a": short, "b": longest})
    assert figure.axes[0].get_xlim()[1] == 1.06 * short.makespan
    beside = figure.axes[1].texts[-1]
    assert (beside.get_text(), beside.xy[1]) == ("▸ 132", 2.0)


def test_of_few_schedules_the_longest_is_not_cut():
    short = timeline(forward=2, backward_input=2, backward_weight=2)
    longest = timeline(forward=4, backward_input=4, backward_weight=4)
    assert plot_schedule({"a": short, "b": longest}).axes[0].get_xlim()[1] == longest.makespan


def test_nothing_to_draw_is_one_clear_line():
    with pytest.raises(UsageError, match="no timeline to draw"):
        plot_schedules({})
    with pytest.raises(UsageError, match="the schedule takes no time: there is nothing to draw"):
        plot_schedule(timeline(forward=0, backward_input=0, backward_weight=0))


@pytest.mark.parametrize(("m", "largest"), [(10, True), (11, False)])
def test_numbers_have_one_digit_up_to_ten_microbatches(m, largest):
    """Numbers of one digit have the largest letters."""
    sizes = {text.get_fontsize() for text in plot_schedule(timeline("naive", 2, m)).axes[0].texts}
    assert (sizes == {9.0}) == largest


def test_boxes_of_no_time_do_not_widen_a_picture():
    assert plot_schedule(timeline("zb-h1", 2, 4, backward_weight=0)).get_figwidth() == 11


def test_numbers_stay_in_their_panel_and_have_a_halo():
    panel = plot_schedule(timeline(p=2, m=2)).axes[0]
    assert len(panel.texts) == 8 and all(text.get_clip_on() for text in panel.texts)
    for text in panel.texts:
        (halo,) = text.get_path_effects()
        assert halo._gc["foreground"] in palette([make("1f1b", 2, 2)]).values()


def test_times_stand_under_the_last_panel_alone():
    figure = plot_schedule({"a": timeline(), "b": timeline()})
    seen = [{tick.label1.get_visible() for tick in axes.xaxis.get_major_ticks()} for axes in figure.axes]
    ticks = [{tick.tick1line.get_visible() for tick in axes.xaxis.get_major_ticks()} for axes in figure.axes]
    assert seen == ticks == [{False}, {False}, {True}]
    assert all(marks(axes.yaxis) == {0} for axes in figure.axes) and marks(figure.axes[-1].xaxis) != {0}


@pytest.mark.parametrize(("v", "later"), [(2, "second"), (3, "later ones")])
def test_a_legend_shows_a_ranks_stages_side_by_side(v, later):
    line = timeline("interleaved-1f1b", 2, 4, v)
    _, labels = legend_handles(palette([line.schedule]))
    assert labels[-1] == f"the rank's first stage, {later} (with a bar)"
    figure = plot_schedule(line)
    FigureCanvasAgg(figure).draw()
    patches = figure.legends[0].findobj(Rectangle)
    starts = [patch.get_window_extent().x0 for patch in patches]
    assert len(starts) == 3 * v + 1 and len({round(start) for start in starts}) == len(starts)


# ---- timelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "drawn"), [(295, ["dp", "tp"]), (296, ["dp"])])
def test_three_hundred_arrows_of_collectives_are_drawn(count, drawn):
    """Five messages of dp and `count` of tp have arrows if they are at most 300."""
    messages = [Message(0, 0.0, 1, 1.0, track=track) for track in ["tp"] * count + ["dp"] * 5]
    assert tracks_with_arrows(messages) == drawn


def test_rows_of_a_timeline_have_small_names_and_no_marks():
    axes = plot_timeline(parse_trace(chrome(ranks=2, steps=1))).axes[0]
    assert marks(axes.yaxis) == {0} and marks(axes.xaxis) != {0}
    assert {label.get_fontsize() for label in axes.get_yticklabels()} == {8}
    assert {label.get_fontsize() for label in axes.get_xticklabels()} == {9}
    assert {text.get_annotation_clip() for text in axes.texts} == {False}


def test_an_arrow_ends_at_the_moments_of_its_message():
    texts = plot_timeline(parse_trace(chrome(ranks=2, steps=1)), arrows=True).axes[0].texts
    ends = {(text.arrow_patch.shrinkA, text.arrow_patch.shrinkB) for text in texts if text.arrow_patch}
    assert ends == {(0, 0)}


@pytest.mark.parametrize(("ranks", "mesh"), [(1, {}), (3, {"pp": 1, "dp": 4, "tp": 1})])
def test_ranks_that_are_not_the_meshs_have_no_place_in_it(ranks, mesh):
    data = chrome(ranks=ranks, steps=1)
    data["otherData"]["mesh"] = mesh
    names = plot_timeline(parse_trace(data)).axes[0].get_yticklabels()
    assert [name.get_text() for name in names] == [f"rank {rank}" for rank in range(ranks)]


def test_a_wide_bar_between_narrow_ones_parts_them():
    """10 s are 405 points: two bars have 1 point each, and one of 4 points is between them."""
    data = chrome(ranks=1, steps=1)
    data["traceEvents"].append(slice_event("send", 0, 1, 1, 0.02))
    data["traceEvents"].append(slice_event("send", 0, 1, 1.03, 0.1))
    data["traceEvents"].append(slice_event("send", 0, 1, 1.14, 0.02))
    figure = plot_timeline(parse_trace(data))
    assert not any("too short" in text.get_text() for text in figure.texts)


def test_pictures_laid_out_by_hand_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_timeline(parse_trace(chrome(ranks=2, steps=1))).draw_without_rendering()
        plot_schedule(timeline(p=1, m=1)).draw_without_rendering()


def test_a_number_outside_of_the_steps_shown_is_cut():
    data = chrome(ranks=1, steps=3)
    data["traceEvents"].append(slice_event("0F7", 0, 0, 12, 1))
    numbers = [text for text in plot_timeline(parse_trace(data), slice(1, 2)).axes[0].texts if text.get_text() == "7"]
    assert [(text.get_clip_on(), text.get_color() in ("white", INK)) for text in numbers] == [(True, True)]
    assert np.allclose([text.get_position()[0] for text in numbers], 2.5)
