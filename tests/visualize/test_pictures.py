"""Pictures: they show what the file says."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from picture_cases import bench_rows, chrome, rows, slice_event

from minipar.comm import run_local, save_chrome_trace, start_trace
from minipar.errors import UsageError
from visualize import parse_trace, plot_bench, plot_bytes, plot_loss, plot_timeline, read_trace, save
from visualize.style import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PAPER,
    SKY,
    YELLOW,
    byte_label,
    colours,
    ink_on,
    lightness,
)
from visualize.timeline import time_unit


def pale(colour) -> str:
    """A quarter of the colour, the rest white."""
    return "#{:02X}{:02X}{:02X}".format(*(round(255 * (0.75 + 0.25 * part)) for part in to_rgb(colour)))


def bars(figure) -> list[tuple[float, float, float, str, bool]]:
    """(start, end, top, colour, hatched) of every bar in the picture."""
    found = []
    for collection in figure.axes[0].collections:
        assert isinstance(collection, PolyCollection)
        colours = collection.get_facecolor()
        for number, path in enumerate(collection.get_paths()):
            (x0, y0), (x1, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            rgb = tuple(round(float(part) * 255) for part in colours[number % len(colours)][:3])
            found.append((x0, x1, y0, "#{:02X}{:02X}{:02X}".format(*rgb), collection.get_hatch() is not None))
    return found


# ---- timeline --------------------------------------------------------------------------------------------------------


def test_the_timeline_draws_each_slice_at_its_time():
    figure = plot_timeline(parse_trace(chrome(ranks=3, steps=1)))
    for rank in range(3):
        row = [
            (round(a, 6), round(b, 6), colour, hatched)
            for a, b, y, colour, hatched in bars(figure)
            if rank <= y < rank + 1
        ]
        assert sorted(row) == sorted(
            [
                (0, 10, PAPER, False),
                (0, 2, BLUE, False),
                (2, 6, ORANGE, False),
                (9, 10, GREEN, False),
                (6, 9, SKY, False),
                (6, 7, pale(SKY), True),  # the second in which the all-reduce waited
            ]
        )
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["forward", "backward", "optimizer", "all_reduce", "rank does not compute", "waiting for messages"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert figure.axes[0].get_xlabel() == "time (s, model clock)"


@pytest.mark.parametrize(
    ("steps", "seconds", "title"),
    [
        (None, 10, "Timeline of step 5 of 5 on 3 ranks"),
        (slice(1, 2), 10, "Timeline of step 2 of 5 on 3 ranks"),
        (slice(0, 4), 40, "Timeline of steps 1 to 4 of 5 on 3 ranks"),
        (slice(-1, None), 10, "Timeline of step 5 of 5 on 3 ranks"),
        (slice(None, None), 50, "Timeline of steps 1 to 5 of 5 on 3 ranks"),
    ],
)
def test_a_long_trace_is_shown_by_steps(steps, seconds, title):
    axes = plot_timeline(parse_trace(chrome(steps=5)), steps).axes[0]
    assert axes.get_xlim() == pytest.approx((0, seconds)) and axes.get_title(loc="left") == title


def test_an_optimizer_that_takes_no_time_still_ends_its_step():
    """As on a model clock: the next forward begins at the very moment of the optimizer's slice."""
    data = chrome(ranks=1, steps=0)
    for s in range(3):
        forward, optimizer = (
            slice_event("forward", 0, 0, 10.0 * s, 10),
            slice_event("optimizer", 0, 0, 10.0 * s + 10, 0),
        )
        data["traceEvents"] += [optimizer, forward]
    axes = plot_timeline(parse_trace(data), slice(1, 3)).axes[0]
    assert axes.get_title(loc="left") == "Timeline of steps 2 to 3 of 3 on 1 rank"
    assert axes.get_xlim() == pytest.approx((0, 20))


def test_short_steps_after_a_long_one_have_their_own_unit():
    data = chrome(ranks=1, steps=0)
    for begin, seconds in ((0.0, 10.0), (10.0, 0.004), (10.004, 0.004)):
        forward = slice_event("forward", 0, 0, begin, seconds)
        data["traceEvents"] += [forward, slice_event("optimizer", 0, 0, begin + seconds, 0)]
    axes = plot_timeline(parse_trace(data), slice(1, 3)).axes[0]
    assert axes.get_xlim() == pytest.approx((0, 8)) and axes.get_xlabel().startswith("time (ms")


def test_steps_that_are_not_there_are_refused():
    with pytest.raises(UsageError, match=r"chooses none of the trace's 3 steps \(0 to 2\)"):
        plot_timeline(parse_trace(chrome()), slice(3, None))
    unmarked = {"traceEvents": [event for event in chrome()["traceEvents"] if event["name"] != "optimizer"]}
    assert plot_timeline(parse_trace(unmarked))
    with pytest.raises(UsageError, match="marks no steps"):
        plot_timeline(parse_trace(unmarked), slice(0, 1))


def test_waiting_is_no_longer_than_its_slice():
    """A clock rounds; the bar of a wait would reach beyond that of its slice."""
    data = chrome(ranks=1, steps=1)
    data["traceEvents"].append(slice_event("all_gather", 0, 1, 9.5, 0.25, wait=0.5))
    assert parse_trace(data).ranks[0]["communication dp"][-1].wait == 0.25


def test_arrows_join_sender_and_receiver():
    trace = parse_trace(chrome(ranks=3, steps=3))
    assert sorted(trace.messages)[:2] == [
        (0, 6.0, 1, 9.0, "dp", 8, "communication dp"),
        (0, 16.0, 1, 19.0, "dp", 8, "communication dp"),
    ]
    texts = plot_timeline(trace, slice(1, 2), arrows=True).axes[0].texts
    arrows = [text for text in texts if text.arrow_patch is not None]
    ends = sorted((int(arrow.xyann[1]), arrow.xyann[0], int(arrow.xy[1]), arrow.xy[0]) for arrow in arrows)
    assert ends == [(0, 6.0, 1, 9.0), (1, 6.0, 2, 9.0), (2, 6.0, 0, 9.0)], "those of the step that is shown"


def test_an_arrow_may_begin_and_end_with_the_steps_shown():
    data = chrome(ranks=2, steps=3)
    for event in data["traceEvents"]:
        if event.get("id") == "10":  # in the second step, which lasts from 10 to 20 s
            event["ts"] = {"s": 10e6, "f": 20e6}[event["ph"]]
    texts = plot_timeline(parse_trace(data), slice(1, 2), arrows=True).axes[0].texts
    ends = [(text.xyann[0], text.xy[0]) for text in texts if text.arrow_patch is not None]
    assert sorted(ends) == [(0.0, 10.0), (6.0, 9.0)]


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
    figure = plot_timeline(trace, arrows=True)
    figure.savefig(tmp_path / "t.png")
    notes = [text.get_text() for text in figure.texts]
    arrows = f"arrows: {len(trace.messages)} messages of world"
    assert [note for note in notes if "too short" not in note] == [arrows, "world: collectives of all ranks"]


def test_lanes_and_ranks_are_named_with_their_place_in_the_mesh():
    data = chrome(ranks=4, steps=1)
    data["otherData"]["mesh"] = {"pp": 2, "dp": 2, "tp": 1}
    figure = plot_timeline(parse_trace(data))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["rank 0\n(0, 0)", "rank 1\n(0, 1)", "rank 2\n(1, 0)", "rank 3\n(1, 1)"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["compute", "dp"] * 4
    notes = ["below a rank: its place on pp, dp", "dp: collectives on that axis of the mesh"]
    assert [text.get_text() for text in figure.texts] == notes
    assert figure.axes[0].get_title(loc="left") == "Timeline of the whole trace on 4 ranks (pp 2, dp 2)"
    middle = figure.axes[0].get_yticks()[0]
    tops = [y for _, _, y, _, _ in bars(figure) if y < 1]
    assert min(tops) < middle < max(tops), "a rank's name is next to the middle of its rows"


def test_a_pipelines_actions_are_coloured_by_kind_and_numbered():
    events = [event for event in chrome(ranks=1, steps=1)["traceEvents"] if event["ph"] == "M"]
    events += [slice_event(name, 0, 0, at, 1) for at, name in enumerate(["0F0", "0I0", "0W0", "0F12"])]
    events += [slice_event("all_reduce", 0, 1, 4, 1, wait=1), slice_event("send", 0, 1, 5, 0)]
    figure = plot_timeline(parse_trace({"traceEvents": events}))
    drawn = [(start, colour) for start, _, _, colour, hatched in bars(figure) if colour != PAPER and not hatched]
    assert drawn[:5] == [(0, BLUE), (1, COLOURS["I"]), (2, COLOURS["W"]), (3, BLUE), (4, SKY)] and COLOURS["I"] != SKY
    assert [text.get_text() for text in figure.axes[0].texts][:4] == ["0", "0", "0", "12"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:4] == ["F forward", "I backward, input", "W backward, weights", "all_reduce"]
    assert "send" not in labels, "only what can be seen"
    assert figure.axes[0].get_xlabel() == "time (s; number in a box: its microbatch)"


def test_a_narrow_bar_keeps_its_colour_without_hatching():
    data = chrome(ranks=1, steps=1)
    data["traceEvents"].append(slice_event("all_gather", 0, 1, 9.5, 0.05, wait=0.05))
    collections = plot_timeline(parse_trace(data)).axes[0].collections
    hatched = [path.vertices[:, 0].min() for c in collections if c.get_hatch() for path in c.get_paths()]
    assert hatched == [6], "the second of the all_reduce; the narrow all_gather shows its colour"


def test_narrow_bars_that_follow_closely_are_added_up():
    data = chrome(ranks=1, steps=1)
    narrow = [("all_gather", 1.0), ("broadcast", 1.05), ("all_gather", 1.1), ("broadcast", 3.0)]
    data["traceEvents"] += [slice_event(name, 0, 1, start, 0.02) for name, start in narrow]  # 10 s are 400 points
    figure = plot_timeline(parse_trace(data))
    lane = [bar for bar in bars(figure) if bar[2] > 0.3]
    drawn = [(round(start, 6), round(end, 6), colour) for start, end, _, colour, _ in lane if start < 3.5]
    assert (1.0, 1.12, GREY) in drawn, "a line from the first to the last"
    assert (1.0, 1.04, YELLOW) in drawn and (1.04, 1.06, COLOURS["broadcast"]) in drawn
    assert (3.0, 3.02, COLOURS["broadcast"]) in drawn and len(drawn) == 4, "a single one is drawn alone"
    assert any("too short to be told apart" in text.get_text() for text in figure.texts)


def pipeline_of(ranks=8):
    """A trace of a mesh of 2 x 2 x 2: on each rank a pipeline's actions, a collective on each axis, and a receive."""
    names = ("computation", "communication tp", "communication dp", "communication pp")
    names += ("communication pp, send and receive",)
    events = []
    for r in range(ranks):
        for tid, name in enumerate(names):
            events.append({"ph": "M", "name": "thread_name", "pid": r, "tid": tid, "args": {"name": name}})
        events += [slice_event(f"0F{m}", r, 0, m, 1) for m in range(4)]
        events += [slice_event(f"0B{m}", r, 0, 4 + 2 * m, 2) for m in range(4)]
        events += [slice_event("all_reduce", r, tid, 11 + tid / 3, 0.3, wait=0.2) for tid in (1, 2, 3)]
        events += [slice_event("recv", r, 4, 0, 4, wait=4), slice_event("optimizer", r, 0, 12.5, 0.5)]
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    return parse_trace({"traceEvents": events, "otherData": {"mesh": mesh, "clock": "cpu"}})


def test_a_timeline_can_be_read_at_half_a_pages_width():
    """Letters of at least 8 points in a picture 7 inches wide, none over others, none outside the picture."""
    figure = plot_timeline(pipeline_of())
    assert figure.get_figwidth() == 7
    axes = figure.axes[0]
    FigureCanvasAgg(figure)
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    rows = [*axes.texts, *axes.get_yticklabels(), *figure.texts, axes.title, axes._left_title, axes.xaxis.label]
    texts = [text for text in (*rows, *figure.legends[0].get_texts()) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 8
    lanes = [text.get_text() for text in axes.texts if not text.get_text().isdigit()]
    assert lanes == ["compute", "tp", "dp", "pp", "pp p2p"] * 8
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[5] == "rank 5\n(1, 0, 1)" and len(names) == 8
    notes = ["below a rank: its place on pp, dp, tp"]
    notes += ["tp, dp, pp: collectives on that axis of the mesh; pp p2p: messages between single ranks"]
    assert [text.get_text() for text in figure.texts] == notes
    boxes = [text.get_window_extent(renderer) for text in texts]
    for number, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1
        for other in boxes[:number]:
            wide = min(box.x1, other.x1) - max(box.x0, other.x0)
            high = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert wide <= 0 or high <= 2, "lines of text may touch, by a pixel of the font's own space"


def test_waiting_is_pale_with_few_lines_and_not_black():
    figure = plot_timeline(pipeline_of())
    hatched = [one for one in figure.axes[0].collections if one.get_hatch()]
    assert hatched and {one.get_hatch() for one in hatched} == {"///"}
    for one in hatched:
        assert min(lightness(to_hex(face)) for face in one.get_facecolor()) > 80
        assert min(lightness(to_hex(line)) for line in one.get_edgecolor()) > 45


# ---- loss and bytes --------------------------------------------------------------------------------------------------


def test_the_loss_curve_draws_every_step_and_the_reference():
    losses = [3.0, 2.5, math.nan, 2.0]
    axes = plot_loss({"run": rows(losses)}, reference=1.5, reference_label="entropy").axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), losses)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["run: every step, 3.000 at first, 2.000 at last", "entropy 1.500"]


def test_a_long_curve_shows_its_points_and_their_mean():
    losses = [4.0 - 0.01 * step + 0.1 * (-1) ** step for step in range(200)]
    axes = plot_loss({"a": rows(losses), "b": rows(losses[:30])}).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), losses)
    smooth = axes.lines[1].get_ydata()
    assert list(axes.lines[1].get_xdata())[::199] == [1, 200], "steps are counted from 1, as the trainer counts them"
    assert smooth[20] == pytest.approx(np.mean(losses[15:26])), "a quarter of the way back, where the loss falls fast"
    assert smooth[0] == losses[0] and smooth[100] == pytest.approx(np.mean(losses[90:111]))
    assert smooth[199] == pytest.approx(np.mean(losses[189:]))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == f"a: smoothed, 4.100 at first, {np.mean(losses[189:]):.3f} at last"
    assert labels[2:] == ["thin line: every step; smoothed: the mean of up to 10 steps on either side"]
    thin, thick, other, _ = axes.lines
    assert thin.get_linewidth() < thick.get_linewidth() / 2 and thin.get_color() == thick.get_color()
    assert thick.get_color() != other.get_color() and thick.get_linestyle() != other.get_linestyle()


def test_bytes_are_drawn_beside_their_formula(tmp_path):
    path = str(tmp_path / "new" / "bytes.svg")
    table = [{"op": "all_reduce", "axis": "dp", "bytes": 700, "expected": 700}, {"op": "broadcast", "bytes": 90}]
    figure = plot_bytes(table)
    save(figure, path)
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [700, 90]
    assert list(axes.lines[0].get_xdata()) == [700]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all_reduce (dp)", "broadcast"]
    assert "<svg" in Path(path).read_text()


def test_the_benchmark_is_drawn_next_to_mpi_and_the_formula():
    time, wire = plot_bench(bench_rows()).axes
    assert list(time.lines[0].get_xdata()) == [1024, 4096]
    np.testing.assert_allclose(time.lines[0].get_ydata(), [1024e-9, 4096e-9])
    np.testing.assert_allclose(time.lines[1].get_ydata(), [2048e-9, 8192e-9])
    assert list(wire.lines[0].get_ydata()) == list(wire.lines[1].get_ydata()) == [1536, 6144]


def test_colours_are_stable_and_distinct():
    assert colours(["backward", "forward"]) == {"forward": BLUE, "backward": ORANGE}
    chosen = colours(["forward", "backward", "optimizer", "all_reduce", "thing", "other"])
    assert len(set(chosen.values())) == 6


@pytest.mark.parametrize(("value", "label"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB")])
def test_bytes_in_words(value, label):
    assert byte_label(value) == label


def test_times_have_the_unit_of_their_size():
    units = {3.0: ("s", 1.0), 0.5: ("ms", 1e3), 4e-4: ("µs", 1e6)}
    assert {seconds: time_unit(seconds) for seconds in units} == units


def test_letters_differ_in_lightness_from_what_is_under_them():
    assert min(abs(lightness(ink_on(colour)) - lightness(colour)) for colour in COLOURS.values()) > 40
