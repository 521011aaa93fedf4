"""Plans, and predicted against measured: what is drawn is what was written, and foreign files are refused."""

import json

import pytest

from minipar.errors import UsageError
from visualize import plot_agreement, read_layouts
from visualize.plan import HATCHES, MEASURED, MEMORY, TIME, layout_name, plot_plan
from visualize.style import lightness

PLAIN = {"dp": 1, "tp": 1, "pp": 1, "zero_stage": 0, "schedule": None, "sequence_parallel": False, "recompute": "none"}
PLAIN |= {"microbatches": 1, "seconds": 0.5, "seconds_min": 0.4, "seconds_max": 0.7, "predicted_seconds": 0.55}
PLAIN |= {"peak_bytes": 4_000_000, "predicted_bytes": 3_000_000}
MUCH = PLAIN | {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1, "schedule": "1f1b", "sequence_parallel": True}
MUCH |= {"recompute": "full", "microbatches": 4, "seconds": 0.9, "seconds_max": 1.0}


def test_names():
    assert layout_name(PLAIN) == layout_name(PLAIN | {"sequence_parallel": 2**31}) == "one device"
    assert "ZeRO-1 x4" in layout_name(MUCH | {"zero_replicas": 4})
    assert layout_name(MUCH) == "dp 2, tp 2, pp 2, ZeRO-1, 1f1b, SP, recompute, 4 microbatches"


def test_points_are_the_rows_slowest_first():
    time, memory = plot_agreement([PLAIN, MUCH]).axes
    for axes, measured, predicted in ((time, [900.0, 500.0], [550.0, 550.0]), (memory, [4.0, 4.0], [3.0, 3.0])):
        drawn = {line.get_label(): [float(x) for x in line.get_xdata()] for line in axes.lines}
        assert drawn[MEASURED] == measured and drawn["predicted"] == predicted
    (legend,) = time.figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["measured: median and range of the steps' time, peak memory", "predicted"]
    assert [text.get_text() for text in time.texts] == ["-39 %", "+10 %"]
    assert [text.get_text() for text in memory.texts] == ["-25 %", "-25 %"]
    assert [label.get_text() for label in time.get_yticklabels()] == [layout_name(MUCH), "one device"]
    exact = plot_agreement([PLAIN | {"predicted_seconds": 0.4999}]).axes[0]
    assert [text.get_text() for text in exact.texts] == ["0 %"]


@pytest.mark.parametrize(
    "rows", [[], {}, [{"seconds": 1}], [PLAIN | {"predicted_seconds": None}], [PLAIN | {"seconds_min": 0.6}]]
)
def test_a_file_without_predictions_is_refused(tmp_path, rows):
    path = tmp_path / "layouts.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(UsageError, match="bench layouts --machine FILE --json"):
        read_layouts(str(path))


def search():
    """What the planner writes, as far as it is drawn: two plans of three meshes, all far from 0."""
    plans = [
        {"dp": dp, "tp": tp, "pp": 1, "zero_stage": 1, "mfu": 0.5}
        | {"seconds": dict.fromkeys(TIME, seconds / 6) | {"total": seconds}}
        | {"memory_bytes": dict.fromkeys(MEMORY, 10e9)}
        for dp, tp, seconds in ((4, 1, 100.0), (2, 2, 101.0))
    ]
    meshes = [plan | {"seconds": plan["seconds"]["total"], "memory_bytes": 50e9 + plan["tp"] * 1e9} for plan in plans]
    meshes.append({"dp": 1, "tp": 4, "pp": 1, "seconds": 104.0, "memory_bytes": 55e9})
    about = {"model": {"name": "m"}, "gpus": 4, "gpu": {"name": "g", "memory": 60e9}, "global_batch": 8, "seq_len": 16}
    return about | {"plans": plans, "meshes": meshes, "assumptions": {"memory_used": 0.92}}


def test_the_points_of_the_meshes_fill_their_panel_and_are_named():
    """Neither axis starts at 0; each plan has its number, below its bars as at its point."""
    time, memory, points = plot_plan(search()).axes
    assert 40 < points.get_xlim()[0] < 51 and 90 < points.get_ylim()[0] < 100
    legend = {text.get_text() for text in points.get_legend().get_texts()}
    assert legend == {"any other mesh", "plans 1 to 2, with bars on the left", "92% of a GPU's memory: the limit"}
    (limit,) = {x for line in points.lines if line.get_linestyle() == "--" for x in line.get_xdata()}
    assert limit == pytest.approx(0.92 * 60), "where the search ends, not the memory of the data sheet"
    drawn = {line.get_label(): line for line in points.lines}
    assert len({line.get_color() for line in drawn.values()}) == 3
    others, plans = drawn["any other mesh"], drawn["plans 1 to 2, with bars on the left"]
    assert list(others.get_xdata()) == [55] and list(plans.get_xdata()) == [51, 52]
    assert others.get_marker() != plans.get_marker(), "told apart in grey"
    assert [(text.get_text(), *text.xy) for text in points.texts] == [("1", 51, 100), ("2", 52, 101)]
    for panel in (time, memory):
        names = [label.get_text() for label in panel.get_xticklabels()]
        assert names == ["plan 1\ndp 4\ntp 1\npp 1\nZeRO-1", "plan 2\ndp 2\ntp 2\npp 1\nZeRO-1"]


def scaled(factor):
    """The search for a model that is smaller by a factor."""
    small = search()
    for mesh in small["meshes"]:
        mesh |= {"seconds": mesh["seconds"] / factor, "memory_bytes": mesh["memory_bytes"] / factor}
    for plan in small["plans"]:
        for parts in (plan["seconds"], plan["memory_bytes"]):
            parts.update({part: value / factor for part, value in parts.items()})
    return small


@pytest.mark.parametrize(("factor", "units"), [(1, ("s", "GB")), (1e3, ("ms", "MB")), (1e6, ("us", "kB"))])
def test_units_fit_the_model(factor, units):
    time, memory, points = plot_plan(scaled(factor)).axes
    assert time.get_ylabel() == points.get_ylabel() == f"time of a step ({units[0]})"
    assert memory.get_ylabel() == points.get_xlabel() == f"memory of the fullest rank ({units[1]})"
    assert max(patch.get_y() + patch.get_height() for patch in time.patches) == pytest.approx(101)
    (plans,) = [line for line in points.lines if line.get_label().startswith("plans")]
    limits = [line for line in points.lines if line.get_linestyle() == "--"]
    assert len(limits) == (factor == 1), "far away it would squeeze the points"
    assert list(plans.get_xdata()) == pytest.approx([51, 52]) and list(plans.get_ydata()) == pytest.approx([100, 101])


@pytest.mark.parametrize("plans", [1, 2, 5])
def test_legends_stay_inside_of_their_panels(plans):
    found = search()
    found["plans"] = (found["plans"] * 3)[:plans]
    figure = plot_plan(found)
    figure.draw_without_rendering()
    for panel in figure.axes:
        inside = panel.get_window_extent()
        for each in (*panel.get_legend().get_texts(), *panel.get_legend().legend_handles):
            box = each.get_window_extent()
            assert inside.x0 + 3 < box.x0 and box.x1 < inside.x1 - 3, each


def test_parts_of_time_alike_in_grey_differ_by_hatching():
    looks = [(round(lightness(colour)), HATCHES.get(part)) for part, colour in TIME.items()]
    for i, (light, hatch) in enumerate(looks):
        assert all(abs(light - other) > 10 or hatch != pattern for other, pattern in looks[:i])
    bars = plot_plan(search()).axes[0].containers
    drawn = {part.get_label(): part.patches[0].get_hatch() for part in bars}
    assert drawn == {part: HATCHES.get(part) for part in TIME}


def test_no_part_of_time_has_the_colour_of_a_part_of_memory():
    shared = set(TIME.values()) & set(MEMORY.values())
    assert shared == {TIME["optimizer"]} == {MEMORY["optimizer"]}, "the optimizer alone is part of both"
