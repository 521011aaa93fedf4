"""The pipeline chapters: timelines read from traces, and schedules that follow a notebook's sliders."""

from dataclasses import replace
from fractions import Fraction

import pytest

from chapters.support.ch07.figures import draw_crossing
from chapters.support.ch08 import figures as figures_pipeline
from chapters.support.ch08.clock import measured_timeline
from chapters.support.ch08.figures import explore_schedules, plot_overlap, schedule_table
from chapters.support.schedule_paths import PHASES, MarkedPath, plot_paths
from minipar.bench.pipeline import mean_durations
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Durations, simulate
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize import parse_trace


def timeline(name="1f1b", p=4, m=8, **durations):
    return simulate(make(name, p, m), Durations(**durations))


def chrome(line, late=0.0):
    """The trace of a run: a step `line` in seconds, then the optimizer."""
    events = []
    for rank, row in enumerate(line.ranks):
        for tid, name in ((0, "computation"), (1, "communication pp, send and receive")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        ends = [(str(slot.action), float(slot.start), float(slot.end)) for slot in row]
        for name, start, end in (*ends, ("optimizer", float(line.makespan), float(line.makespan) + 0.5)):
            event = {"ph": "X", "cat": "computation", "name": name, "pid": rank, "tid": 0}
            events.append(event | {"ts": (late + start) * 1e6, "dur": (end - start) * 1e6})
        events.append({"ph": "X", "name": "send", "pid": rank, "tid": 1, "ts": late * 1e6, "dur": 1e5})
    return {"traceEvents": events[::-1], "otherData": {"clock": "cpu"}}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_measured_timeline_is_that_of_the_step(name):
    line = timeline(name, 2, 4)
    got = measured_timeline(parse_trace(chrome(line, late=3.0)))
    assert got.schedule.ranks == line.schedule.ranks and got.peak_activations == line.peak_activations
    assert got.ranks[0][0].start == 0 and got.makespan == pytest.approx(float(line.makespan))
    assert got.bubble_fraction == pytest.approx(float(line.bubble_fraction))


def test_the_prediction_takes_each_stages_mean_times():
    """Where every action takes its stage's mean, prediction and measurement are the same picture."""
    line = timeline("zb-h1", 3, 5, forward=2.0, backward_input=1.5)
    measured = measured_timeline(parse_trace(chrome(line)))
    durations = mean_durations(measured)
    assert durations.of(Action(1, "I", 3)) == pytest.approx(1.5)
    predicted = simulate(measured.schedule, durations)
    assert float(predicted.makespan) == pytest.approx(float(line.makespan))
    assert float(simulate(measured.schedule, replace(durations, comm=0.5)).makespan) > predicted.makespan


def test_in_a_notebook_the_picture_follows_the_sliders(monkeypatch, capsys):
    widgets, display = pytest.importorskip("ipywidgets"), pytest.importorskip("IPython.display")
    drawn = []
    monkeypatch.setattr(figures_pipeline, "in_notebook", lambda: True)
    monkeypatch.setattr(figures_pipeline, "plot_schedule", drawn.append)
    boxes, make_box, views = [], widgets.VBox, []
    monkeypatch.setattr(widgets, "VBox", lambda children: boxes.append(make_box(children)) or boxes[-1])
    monkeypatch.setattr(display, "display", lambda *shown, raw=False: views.extend(shown if raw else ()))
    assert explore_schedules() is None, "no value to print"
    box = boxes[-1]
    assert drawn[0].schedule.ranks == make("zb-h1", 4, 8).ranks, "a static picture comes first"
    (view,) = views
    assert "VBox" not in view["text/plain"] and "application/vnd.jupyter.widget-view+json" in view
    sliders = {
        one.description: one
        for column in box.children[0].children
        for one in column.children
        if isinstance(one, (widgets.Dropdown, widgets.IntSlider, widgets.FloatSlider))
    }
    assert len(sliders) == 8 and len(drawn) == 2 and drawn[1].ranks == drawn[0].ranks, "the sliders begin with it"
    sliders["schedule"].value = "interleaved-1f1b"
    sliders["interleaved: v"].value = 3
    sliders["F"].value = 0.3
    assert drawn[-1].schedule.ranks == make("interleaved-1f1b", 4, 8, 3).ranks
    assert drawn[-1].ranks[0][0].end == Fraction(3, 10)
    before = len(drawn)
    sliders["microbatches m"].value = 9
    assert len(drawn) == before and "9/4 is not whole" in capsys.readouterr().out, "what cannot be says why"


PATH = [("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("F", 1, 1), ("B", 1, 1), ("B", 1, 0)]
PIECES = [("down", 1), ("the last rank", 6), ("up", 2)]


def slots(p=2, m=2):
    rows = timeline("1f1b", p, m).ranks
    return {(s.action.kind, s.action.microbatch, s.action.stage): (s.start, s.end) for row in rows for s in row}


def test_a_path_is_drawn_as_frames_with_its_pieces_below():
    figure = plot_paths({"1F1B": MarkedPath(slots(), PATH, PIECES)}, "F = 1, B = 2")
    axes = figure.axes[0]
    frames = [patch for patch in axes.patches if patch.get_gid() == "path"]
    boxes = [patch for patch in axes.patches if patch.get_gid() is None]
    assert sorted((f.get_x(), f.get_width()) for f in frames) == sorted(
        (start, end - start) for start, end in (slots()[action] for action in PATH)
    )
    assert sorted((box.get_x(), box.get_x() + box.get_width()) for box in boxes) == sorted(slots().values())
    assert [text.get_text() for text in axes.texts if text.get_gid() == "piece"] == ["down", "the last rank", "up"]


def test_phases_are_drawn_below_the_ranks_that_have_them():
    axes = plot_paths({"1F1B": MarkedPath(slots(), PATH, PIECES, ahead=[1, 0])}, "").axes[0]
    strips = {(p.get_gid(), p.get_x(), p.get_x() + p.get_width()) for p in axes.patches if p.get_gid() in PHASES}
    assert strips == {("warm-up", 0, 1), ("steady state", 1, 6), ("cool-down", 6, 9), ("steady state", 1, 7)}


def test_a_path_that_is_shorter_than_the_schedule_is_refused():
    for path, pieces in ((PATH[:-1], PIECES), (PATH, PIECES[:-1])):
        with pytest.raises(UsageError, match="but the schedule 9"):
            MarkedPath(slots(), path, pieces)


def test_overlap_is_drawn_as_simulated_and_pays_later():
    lines = {line.get_label(): line.get_xydata() for line in plot_overlap(4, 16, steps=4).axes[0].lines}
    assert list(lines) == ["ZB-V", "DualPipeV"]
    for name, key in (("ZB-V", "zbv"), ("DualPipeV", "dualpipev")):
        for x, (share, time) in zip((0, 0.25, 0.5, 0.75, 1), lines[name], strict=True):
            durations = Durations(1 + x, 1 + x, 1, exchange=x)
            assert share == pytest.approx(100 * x / (1 + x))
            assert time == pytest.approx(simulate(make(key, 4, 16), durations).makespan / 96)
    assert lines["ZB-V"][0, 1] < lines["DualPipeV"][0, 1] and lines["ZB-V"][-1, 1] > lines["DualPipeV"][-1, 1]


def test_the_table_has_a_row_for_each_schedule():
    rows = schedule_table(4, 8).splitlines()
    assert len(rows) == 2 + len(SCHEDULES)
    (row,) = (row for row in rows if row.startswith("ZB-H2"))
    assert row.split()[1:] == ["1/9", "=", "0.111", "0.125", "1", "to", "7", "7", "1/9", "=", "0.111", "48"]


def test_outside_a_notebook_exploring_is_one_picture():
    assert explore_schedules().axes[0].get_title(loc="left") == "ZB-H1"


def actions_of(name, p, m, times):
    slots = timeline(name, p, m, **times).ranks
    return {
        (slot.action.kind, slot.action.microbatch, slot.action.stage): (slot.start, slot.end)
        for row in slots
        for slot in row
    }


def test_the_warm_up_counts_the_hops():
    times = actions_of("interleaved-1f1b", 4, 8, {"forward": 1, "backward_input": 1, "backward_weight": 0})
    axes = figures_pipeline.plot_warm_up(times, p=4, rank=1, stages=8, end=14).axes[0]
    spans = [text.get_text() for text in axes.texts if text.get_gid() == "span"]
    assert spans[0].startswith("4 forwards") and spans[1].startswith("4 forwards: 2 hops down")
    assert len([patch for patch in axes.patches if patch.get_gid() == "way"]) == 6  # down three ranks and back


def test_crossing_messages_join_a_send_with_its_receive():
    lists = ["0F0", "0SEND_F0", "0RECV_B0"], ["1RECV_F0", "1B0", "1SEND_B0"]
    axes = draw_crossing(lists, stopped=(1, 2)).axes[0]
    arrows = [(text.xyann[0], text.xy[0]) for text in axes.texts if hasattr(text, "arrow_patch") and text.arrow_patch]
    assert sorted(arrows) == [(1.5, 0.5), (2.5, 2.5)]


def test_versions_stand_in_their_boxes():
    times = {("F", 0, 0): (0, 1), ("F", 5, 0): (1, 2), ("B", 0, 0): (2, 4)}
    axes = figures_pipeline.draw_versions(times, {"a rule": lambda stage, microbatch: microbatch + stage}, end=3).axes[
        0
    ]
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["0", "5"]  # the backward ends too late


def test_points_and_lines_are_where_the_values_are():
    axes = figures_pipeline.plot_memory_and_bubble({"a": (4, 0.25), "b": (7, 0.1)}).axes[0]
    assert [tuple(line.get_xydata()[0]) for line in axes.lines] == [(4, 0.25), (7, 0.1)]
    axes = figures_pipeline.plot_operations([1, 2], {"F": [2, 3], "W": [2, 2]}).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 1.5], [1, 1]]
