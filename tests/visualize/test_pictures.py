"""Pictures: what is drawn is what the file says, at its time, with its size, in its order."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from picture_cases import bench_rows, chrome, rows, slice_event

from minipar import memory
from minipar.comm import run_local, save_chrome_trace, start_trace
from minipar.errors import UsageError
from visualize import (
    parse_trace,
    plot_agreement,
    plot_bench,
    plot_bytes,
    plot_comparison,
    plot_ledger,
    plot_loss,
    plot_timeline,
    read_trace,
)
from visualize.comparison import EQUAL, SAME_NORM
from visualize.measurements import KINDS
from visualize.plan import MEASURED, layout_name
from visualize.style import BLUE, COLOURS, GREEN, INK, ORANGE, PAPER, SKY, VERMILION


def bars(figure) -> list[tuple[float, float, int, str]]:
    """(start, end, rank, colour) of every bar without hatching."""
    found = []
    for collection in figure.axes[0].collections:
        colours = [to_hex(colour).upper() for colour in collection.get_facecolor()]
        for number, path in enumerate(collection.get_paths() if not collection.get_hatch() else ()):
            (x0, y0), (x1, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((round(x0, 6), round(x1, 6), math.floor(y0), colours[number % len(colours)]))
    return sorted(found)


# ---- timeline --------------------------------------------------------------------------------------------------------


def test_the_timeline_draws_each_slice_at_its_time():
    figure = plot_timeline(parse_trace(chrome(ranks=3, steps=1)))
    row = [(0, 10, PAPER), (0, 2, BLUE), (2, 6, ORANGE), (9, 10, GREEN), (6, 9, SKY)]
    expected = [(start, end, rank, colour) for rank in range(3) for start, end, colour in row]
    assert bars(figure) == sorted(expected)
    waits = [one for one in figure.axes[0].collections if one.get_hatch()]
    spans = [sorted({float(x) for x in path.vertices[:, 0]}) for one in waits for path in one.get_paths()]
    assert spans == [[6, 7]] * 3, "the second in which the all-reduce waited"


@pytest.mark.parametrize(
    ("steps", "seconds", "shown"),
    [(None, 10, "step 5 of 5"), (slice(0, 4), 40, "steps 1 to 4 of 5"), (slice(-1, None), 10, "step 5 of 5")],
)
def test_a_long_trace_is_shown_by_steps(steps, seconds, shown):
    axes = plot_timeline(parse_trace(chrome(steps=5)), steps).axes[0]
    assert axes.get_xlim() == pytest.approx((0, seconds)) and shown in axes.get_title(loc="left")


def test_steps_that_are_not_there_are_refused():
    with pytest.raises(UsageError, match="3 steps"):
        plot_timeline(parse_trace(chrome()), slice(3, None))
    unmarked = {"traceEvents": [event for event in chrome()["traceEvents"] if event["name"] != "optimizer"]}
    with pytest.raises(UsageError):
        plot_timeline(parse_trace(unmarked), slice(0, 1))


def test_waiting_is_no_longer_than_its_slice():
    """A clock rounds; the bar of a wait would reach beyond that of its slice."""
    data = chrome(ranks=1, steps=1)
    data["traceEvents"].append(slice_event("all_gather", 0, 1, 9.5, 0.25, wait=0.5))
    assert parse_trace(data).ranks[0]["communication dp"][-1].wait == 0.25


def test_arrows_join_sender_and_receiver():
    texts = plot_timeline(parse_trace(chrome(ranks=3, steps=3)), slice(1, 2), arrows=True).axes[0].texts
    arrows = [text for text in texts if text.arrow_patch is not None]
    ends = sorted((int(arrow.xyann[1]), arrow.xyann[0], int(arrow.xy[1]), arrow.xy[0]) for arrow in arrows)
    assert ends == [(0, 6.0, 1, 9.0), (1, 6.0, 2, 9.0), (2, 6.0, 0, 9.0)], "those of the step that is shown"


@pytest.mark.parametrize("clock", ["wall", "cpu", "model"])
def test_a_trace_of_minipar_can_be_drawn(tmp_path, clock):
    path = str(tmp_path / "trace.json")

    def work(comm):
        start_trace(comm)
        for _ in range(2):
            with comm.tracer.region("forward", flops=1e9):
                np.ones((50, 50)) @ np.ones((50, 50))
            comm.all_reduce(np.ones(64))
            with comm.tracer.region("optimizer", flops=1e8):
                pass
        save_chrome_trace(path, comm)

    run_local(4, work, clock=clock)
    trace = read_trace(path)
    assert list(trace.ranks) == [0, 1, 2, 3] and trace.clock == clock and len(trace.steps()) == 2
    assert set(trace.ranks[0]) == {"computation", "communication world"} and len(trace.messages) > 0
    plot_timeline(trace, arrows=True).savefig(tmp_path / "t.png")


# ---- curves and bars -------------------------------------------------------------------------------------------------


def test_a_long_curve_shows_its_points_and_their_mean():
    losses = [4.0 - 0.01 * step + 0.1 * (-1) ** step for step in range(200)]
    axes = plot_loss({"a": rows(losses), "b": rows([3.0, math.nan])}).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), losses)
    smooth = axes.lines[1].get_ydata()
    assert list(axes.lines[1].get_xdata())[::199] == [1, 200], "steps are counted from 1, as the trainer counts them"
    assert smooth[20] == pytest.approx(np.mean(losses[15:26])), "a quarter of the way back, where the loss falls fast"
    assert smooth[0] == losses[0] and smooth[100] == pytest.approx(np.mean(losses[90:111]))
    assert smooth[199] == pytest.approx(np.mean(losses[189:]))


def test_measured_bytes_are_drawn_beside_their_formula():
    table = [{"op": "all_reduce", "axis": "dp", "bytes": 700, "expected": 600}, {"op": "broadcast", "bytes": 90}]
    axes = plot_bytes(table).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [700, 90]
    assert list(axes.lines[0].get_xdata()) == [600]
    time, wire = plot_bench(bench_rows()).axes
    assert list(time.lines[0].get_xdata()) == [1024, 4096]
    np.testing.assert_allclose(time.lines[0].get_ydata(), [1024e-9, 4096e-9])
    np.testing.assert_allclose(time.lines[1].get_ydata(), [2048e-9, 8192e-9])
    assert list(wire.lines[0].get_ydata()) == list(wire.lines[1].get_ydata()) == [1536, 6144]


KIB = 1024
MOMENTS = [  # activations grow, a buffer comes and goes
    ("forward", (4 * KIB, 4 * KIB, 8 * KIB, 0, 0)),
    ("backward", (4 * KIB, 4 * KIB, 8 * KIB, 6 * KIB, KIB)),
    ("optimizer", (4 * KIB, 4 * KIB, 8 * KIB, 0, 0)),
]


def test_areas_stack_to_the_memory_held_and_the_peak_is_named():
    axes = plot_ledger({"run": MOMENTS}).axes[0]
    assert KINDS == memory.KINDS and list(axes.lines[0].get_ydata()) == [16, 23, 16, 16]
    assert "23 KiB" in axes.texts[0].get_text()
    tops = [float(area.get_paths()[0].vertices[:, 1].max()) for area in axes.collections]
    assert tops == [4, 8, 16, 22, 23]
    assert [to_hex(area.get_facecolor()[0]).upper() for area in axes.collections] == [COLOURS[kind] for kind in KINDS]
    levels = [axes.lines[-1].get_ydata()[0] for axes in plot_ledger({"a": MOMENTS, "b": MOMENTS}, {"b": 8192}).axes]
    assert levels[1] == 8, "a formula is a line of its run"


def test_a_pixel_is_grey_if_equal_and_else_the_ratios_colour():
    ratios = {0: {"a": None, "b": 8.0, "c": 1 / 8}, 1: {"a": 1 + 1e-9, "b": math.inf, "c": 0.0}}
    pixels = plot_comparison(ratios).axes[0].images[0].get_array().tolist()
    expected = [[EQUAL, SAME_NORM], [VERMILION, INK], [BLUE, INK]]  # (parameters, steps)
    assert pixels == [[pytest.approx(to_rgb(colour), abs=0.01) for colour in row] for row in expected]


PLAIN = {"dp": 1, "tp": 1, "pp": 1, "zero_stage": 0, "schedule": None, "sequence_parallel": False, "recompute": "none"}
PLAIN |= {"microbatches": 1, "seconds": 0.5, "seconds_min": 0.4, "seconds_max": 0.7, "predicted_seconds": 0.55}
PLAIN |= {"peak_bytes": 4_000_000, "predicted_bytes": 3_000_000}
MUCH = PLAIN | {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1, "schedule": "1f1b", "sequence_parallel": True}
MUCH |= {"recompute": "full", "microbatches": 4, "seconds": 0.9, "seconds_max": 1.0}


def test_layouts_are_the_rows_slowest_first():
    time, held = plot_agreement([PLAIN, MUCH]).axes
    for axes, measured, predicted in ((time, [900.0, 500.0], [550.0, 550.0]), (held, [4.0, 4.0], [3.0, 3.0])):
        drawn = {line.get_label(): [float(x) for x in line.get_xdata()] for line in axes.lines}
        assert drawn[MEASURED] == measured and drawn["predicted"] == predicted
    assert [text.get_text() for text in time.texts] == ["-39 %", "+10 %"]
    assert [label.get_text() for label in time.get_yticklabels()] == [layout_name(MUCH), "one device"]
    assert layout_name(MUCH) == "dp 2, tp 2, pp 2, ZeRO-1, 1f1b, SP, recompute, 4 microbatches"
