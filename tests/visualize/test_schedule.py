"""Pictures of schedules: a box for each action at its time, numbers that fit, colours that can be told apart."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import FillBetweenPolyCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb

from minipar.errors import UsageError
from minipar.parallel.pipeline import SCHEDULES, Action, Durations, load_csv, make, peak_live, simulate
from visualize import (
    explore,
    explore_schedules,
    gallery,
    live_activations,
    measured_durations,
    measured_timeline,
    parse_trace,
    plot_measured,
    plot_schedule,
    plot_schedules,
    plot_timeline,
    predicted_timeline,
)
from visualize.__main__ import main
from visualize.boxes import chunks, fitting, palette
from visualize.schedule import NAMES, bubble_text, facts
from visualize.style import COLOURS, at_lightness, lightness, save

KINDS = {"F", "B", "I", "W"}


def timeline(name="1f1b", p=4, m=8, v=None, **durations):
    return simulate(make(name, p, m, v), Durations(**durations))


def boxes(axes) -> list[tuple[float, float, int, str]]:
    """(start, end, rank, colour) of every box in a panel; the frames of the rows and the memory are none."""
    found = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        if isinstance(collection, FillBetweenPolyCollection):
            continue
        colours = [to_hex(colour) for colour in collection.get_facecolor()]
        for number, path in enumerate(collection.get_paths()):
            (x0, y0), (x1, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            colour = colours[number % len(colours)]
            if colour != "#ffffff":
                found.append((round(x0, 6), round(x1, 6), math.floor(y0), colour))
    return sorted(found)


def expected(line, scale=1.0) -> list[tuple[float, float, int, str]]:
    colours, chunk = palette([line.schedule]), chunks(line.schedule)
    return sorted(
        (
            round(float(slot.start) * scale, 6),
            round(float(slot.end) * scale, 6),
            rank,
            colours[slot.action.kind, chunk[slot.action.stage]].lower(),
        )
        for rank, row in enumerate(line.ranks)
        for slot in row
    )


# ---- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("naive", 3, 2), ("gpipe", 1, 1), ("1f1b", 4, 8), ("interleaved-1f1b", 2, 4), ("zb-h1", 4, 2), ("zbv", 3, 5)],
)
def test_the_boxes_are_the_actions(name, p, m):
    line = timeline(name, p, m, forward=Fraction(1, 3), backward_weight=Fraction(1, 2), comm=Fraction(1, 10))
    panel, memory = plot_schedule(line).axes
    assert boxes(panel) == expected(line)
    assert panel.get_xlim() == memory.get_xlim() == (0, float(line.makespan))
    assert [label.get_text() for label in panel.get_yticklabels()] == [f"rank {r}" for r in range(p)]


def test_idle_time_is_white_and_framed():
    frames = [c for c in plot_schedule(timeline(m=1)).axes[0].collections if to_hex(c.get_facecolor()[0]) == "#ffffff"]
    assert len(frames) == 4 and all(lightness(to_hex(frame.get_edgecolor()[0])) < 95 for frame in frames)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "said"),
    [
        ("gpipe", 4, 8, None, "p = 4, m = 8  ·  bubble 3/11 = 27.3 %  ·  peak 8 activations"),
        ("1f1b", 8, 32, None, "p = 8, m = 32  ·  bubble 7/39 = 17.9 %  ·  peak 8 activations"),
        ("naive", 4, 8, None, "p = 4, m = 8  ·  bubble 3/4 = 75.0 %  ·  peak 1 activation"),
        ("gpipe", 1, 2, None, "p = 1, m = 2  ·  bubble 0  ·  peak 2 activations"),
        ("interleaved-1f1b", 4, 8, 2, "p = 4, m = 8, v = 2  ·  bubble 3/19 = 15.8 %  ·  peak 11/2 = 5.5 activations"),
        ("zb-h2", 4, 8, None, "p = 4, m = 8  ·  bubble 1/9 = 11.1 % (Zero Bubble's rate 0)  ·  peak 7 activations"),
    ],
)
def test_the_title_says_bubble_and_peak(name, p, m, v, said):
    line = timeline(name, p, m, v)
    assert facts(line) == said
    panel = plot_schedule(line, memory=False).axes[0]
    assert (panel.get_title(loc="left"), panel.get_title(loc="right")) == (NAMES[name], said)


def test_a_bubble_is_a_fraction_only_where_that_says_something():
    assert bubble_text(Fraction(7, 10**6)) == "0.0 %" and bubble_text(0.25) == "25.0 %" and bubble_text(0) == "0"


@pytest.mark.parametrize(("name", "p", "m"), [("1f1b", 4, 8), ("1f1b", 8, 32), ("zbv", 4, 8), ("zbv", 8, 32)])
def test_numbers_stand_inside_their_boxes_and_can_be_read(name, p, m):
    line = timeline(name, p, m)
    figure = plot_schedule(line, memory=False)
    FigureCanvasAgg(figure)
    panel = figure.axes[0]
    renderer, inverse = figure.canvas.get_renderer(), panel.transData.inverted()
    found: dict[tuple[float, int], str] = {}
    by_place = {(x0, rank): (x0, x1) for x0, x1, rank, _ in boxes(panel)}
    for text in panel.texts:
        extent = text.get_window_extent(renderer)
        (left, _), (right, _) = inverse.transform(extent)
        x, y = text.get_position()
        start, end = next(by_place[key] for key in by_place if key[1] == int(y) and key[0] < x < by_place[key][1])
        assert start < left and right < end, f"{text.get_text()} is wider than its box"
        size = text.get_fontsize()
        top = y - 0.73 * size * figure.dpi / 72 / (panel.bbox.height / p)
        assert int(y) + 0.04 < top and y < int(y) + 0.96, f"{text.get_text()} is higher than its box"
        assert size >= 5
        found[start, int(y)] = found.get((start, int(y)), "") + text.get_text()
    assert found == {
        (round(float(slot.start), 6), rank): str(slot.action.microbatch)
        for rank, row in enumerate(line.ranks)
        for slot in row
    }


def test_numbers_that_could_not_be_read_are_left_out():
    assert fitting(1, 20, 20) == (False, 9.0) and fitting(2, 3, 20)[1] == fitting(2, 30, 3)[1] == 0
    upright, size = fitting(2, 7, 20)
    assert upright and size == pytest.approx(0.8 * 7 / 0.64)
    assert len(plot_schedule(timeline(), width=2.0).axes[0].texts) == 0


def test_a_picture_grows_with_what_it_must_number_but_not_without_end():
    assert plot_schedule(timeline()).get_figwidth() == plot_schedule(timeline("1f1b", 8, 32)).get_figwidth() == 11
    assert 11 < plot_schedule(timeline("zbv", 8, 32), memory=False).get_figwidth() < 20
    assert plot_schedule(timeline("gpipe", 2, 300), memory=False).get_figwidth() == 20


def test_several_timelines_share_one_axis_and_memory_lies_below():
    predicted, real = timeline("zb-h1", 4, 4), timeline("zb-h1", 4, 4, forward=1.5, comm=0.25)
    figure = plot_schedule({"predicted": predicted, "measured": real}, seconds=True)
    first, second, memory = figure.axes
    assert boxes(first) == expected(predicted) and boxes(second) == expected(real)
    assert first.get_xlim() == second.get_xlim() == memory.get_xlim() == (0, real.makespan)
    assert first.get_position().y0 > second.get_position().y1 > memory.get_position().y1
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["ZB-H1, predicted", "ZB-H1, measured"]
    assert memory.get_xlabel() == "time (s)" and first.get_xlabel() == ""
    areas = [one for one in memory.collections if isinstance(one, FillBetweenPolyCollection)]
    assert len(areas) == 4 and len(memory.lines) == 4, "predicted as areas, measured as lines"
    assert [text.get_text() for text in memory.texts] == ["4", "3", "2", "1", "peak"]


def test_seconds_are_shown_in_a_unit_that_can_be_read():
    axes = plot_schedule(timeline(forward=1e-3, backward_input=1e-3, backward_weight=1e-3), seconds=True).axes[1]
    assert axes.get_xlabel() == "time (ms)" and axes.get_xlim() == (0, pytest.approx(33))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8)])
def test_live_activations_rise_to_the_peak_and_end_at_none(name, p, m):
    line = timeline(name, p, m, comm=Fraction(1, 7))
    for slots, actions in zip(line.ranks, line.schedule.ranks, strict=True):
        steps = live_activations(slots)
        assert max(live for _, live in steps) == peak_live(actions) and steps[-1][1] == 0
        assert all(a < b for (a, _), (b, _) in zip(steps, steps[1:], strict=False))


def test_the_gallery_gives_every_schedule_the_same_model():
    lines = gallery(4, 8)
    assert list(lines) == list(NAMES.values())
    busy = {sum(slot.end - slot.start for row in line.ranks for slot in row) for line in lines.values()}
    assert busy == {4 * 8 * 3}
    assert {name: line.makespan for name, line in lines.items()} == {
        "Naive": 96, "GPipe": 33, "1F1B": 33, "Interleaved 1F1B": Fraction(57, 2), "ZB-H1": 27, "ZB-H2": 27,
        "ZB-V": Fraction(51, 2),
    }  # fmt: skip
    assert "Interleaved 1F1B" not in gallery(4, 6)
    figure = plot_schedules(lines)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(lines)
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 1.06 * 33)}, "the naive one is cut"
    assert [text.get_text() for text in figure.axes[0].texts][-1] == "▸ 96"
    assert len(boxes(figure.axes[-1])) == 2 * 3 * 4 * 8


# ---- colours ---------------------------------------------------------------------------------------------------------


def test_lightness_is_that_of_cielab_and_can_be_set():
    assert lightness("#000000") == 0 and lightness("#ffffff") == pytest.approx(100)
    assert lightness("#777777") == pytest.approx(50.03, abs=0.01)
    for target in (20, 46, 80):
        assert lightness(at_lightness(COLOURS["F"], target)) == pytest.approx(target, abs=0.5)


@pytest.mark.parametrize("shown", [["1f1b"], ["zb-h1"], ["1f1b", "zb-h2"], ["interleaved-1f1b"], ["zbv"]])
def test_colours_survive_greyscale(shown):
    colours = palette(make(name, 2, 4) for name in shown)
    grey = sorted(map(lightness, colours.values()))
    assert min(b - a for a, b in zip(grey, grey[1:], strict=False)) > 9 and 100 - grey[-1] > 9, "idle is white"


# Machado, Oliveira and Fernandes 2009, severity 1: what is seen without one of the three cones, from linear RGB.
BLINDNESS = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_survive_colour_blindness(kind):
    def seen(colour):
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        linear = np.clip(BLINDNESS[kind] @ linear, 0, 1)
        xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
        f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    four = [seen(COLOURS[name]) for name in sorted(KINDS)]
    distances = [np.linalg.norm(a - b) for i, a in enumerate(four) for b in four[:i]]
    assert min(distances) > 15, "2.3 is a just noticeable difference"


def test_a_ranks_stages_have_shades_of_their_own():
    colours = palette([make("interleaved-1f1b", 2, 4, 4)])
    forwards = [lightness(colours["F", number]) for number in range(4)]
    assert forwards == sorted(forwards) and min(np.diff(forwards)) > 5
    assert chunks(make("zbv", 2, 4)) == {0: 0, 3: 1, 1: 0, 2: 1}
    texts = plot_schedule(timeline("zbv", 2, 2)).legends[0].get_texts()
    assert [text.get_text() for text in texts][-2:] == ["idle", "the rank's first stage, second"]


# ---- measured --------------------------------------------------------------------------------------------------------


def chrome(line, steps=2, replicas=1, late=0.0):
    """The trace of a run: each step `line` in seconds, later steps slower by a tenth, then the optimizer."""
    events, at = [], late
    for r in range(len(line.ranks) * replicas):
        for tid, name in ((0, "computation"), (1, "communication pp, send and receive")):
            events.append({"ph": "M", "name": "thread_name", "pid": r, "tid": tid, "args": {"name": name}})
    for step in range(steps):
        slow = 1 + 0.1 * step
        for r in range(len(line.ranks) * replicas):
            for slot in line.ranks[r // replicas]:
                start, length = float(slot.start) * slow + 0.001 * (r % replicas), float(slot.end - slot.start) * slow
                event = {"ph": "X", "cat": "computation", "name": str(slot.action), "pid": r, "tid": 0}
                events.append(event | {"ts": (at + start) * 1e6, "dur": length * 1e6})
            event = {"ph": "X", "cat": "computation", "name": "optimizer", "pid": r, "tid": 0}
            events.append(event | {"ts": (at + float(line.makespan) * slow) * 1e6, "dur": 5e5})
            events.append({"ph": "X", "name": "send", "pid": r, "tid": 1, "ts": at * 1e6, "dur": 1e5})
        at += float(line.makespan) * slow + 1
    return {"traceEvents": events[::-1], "otherData": {"clock": "cpu"}}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_measured_timeline_is_the_last_whole_step(name):
    line = timeline(name, 2, 4)
    for step, slow in ((-1, 1.1), (0, 1.0)):
        got = measured_timeline(parse_trace(chrome(line, late=3.0)), step=step)
        assert got.schedule.ranks == line.schedule.ranks and got.peak_activations == line.peak_activations
        assert got.ranks[0][0].start == 0 and got.makespan == pytest.approx(slow * float(line.makespan))
        assert got.bubble_fraction == pytest.approx(float(line.bubble_fraction))


def test_a_step_cut_short_is_no_whole_step():
    data = chrome(timeline(p=2, m=4))
    data["traceEvents"] = [e for e in data["traceEvents"] if not (e["name"] == "1B3" and e["ts"] > 15e6)]
    assert measured_timeline(parse_trace(data)).makespan == pytest.approx(15)
    with pytest.raises(UsageError, match="step 1: the trace holds 1 whole steps of the pipeline"):
        measured_timeline(parse_trace(data), step=1)


def test_steps_are_told_apart_without_an_optimizer():
    data = chrome(timeline(p=2, m=4), steps=3)
    data["traceEvents"] = [event for event in data["traceEvents"] if event["name"] != "optimizer"]
    assert measured_timeline(parse_trace(data)).makespan == pytest.approx(1.2 * 15)


def test_of_several_replicas_one_is_shown():
    line = timeline("zb-h1", 2, 4)
    trace = parse_trace(chrome(line, replicas=2))
    for replica in (0, 1):
        got = measured_timeline(trace, replica=replica)
        assert got.schedule.ranks == line.schedule.ranks
        assert got.bubble_fraction == pytest.approx(float(line.bubble_fraction))
    with pytest.raises(UsageError, match="replica 2: the trace holds 2 of this pipeline"):
        measured_timeline(trace, replica=2)


def test_a_trace_without_a_pipeline_is_refused():
    data = chrome(timeline(p=1, m=1))
    for event in data["traceEvents"]:
        event["name"] = {"0F0": "forward", "0B0": "backward"}.get(event["name"], event["name"])
    with pytest.raises(UsageError, match="the trace holds no pipeline actions"):
        measured_timeline(parse_trace(data))


def test_the_prediction_takes_each_stages_mean_times():
    """Where every action takes its stage's mean, prediction and measurement are the same picture."""
    line = timeline("zb-h1", 3, 5, forward=2.0, backward_input=1.5)
    measured = measured_timeline(parse_trace(chrome(line, steps=1)), name="zb-h1")
    assert measured_durations(measured).of(Action(1, "I", 3)) == pytest.approx(1.5)
    predicted = predicted_timeline(measured)
    assert float(predicted.makespan) == pytest.approx(float(line.makespan))
    assert float(predicted_timeline(measured, comm=0.5).makespan) > predicted.makespan
    first, second, _ = plot_measured(parse_trace(chrome(line)), "zb-h1").axes
    assert len(boxes(first)) == len(boxes(second)) == 3 * 3 * 5
    assert first.get_title(loc="left") == "ZB-H1, predicted"


def test_the_trace_picture_colours_actions_by_kind_and_numbers_them():
    line = timeline("zb-h1", 2, 3)
    axes = plot_timeline(parse_trace(chrome(line)), slice(0, 1)).axes[0]
    texts = sorted(text.get_text() for text in axes.texts)
    assert texts == sorted(str(slot.action.microbatch) for row in line.ranks for slot in row)
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend[:3] == ["F forward", "I backward, input", "W backward, weights"] and "optimizer" in legend
    forwards = [box for box in boxes(axes) if box[3] == COLOURS["F"].lower()]
    assert len(forwards) == 2 * 3


# ---- the command -----------------------------------------------------------------------------------------------------


def told(capsys, *arguments) -> dict:
    """What `visualize schedule ... --json -` says, and that it says nothing else."""
    assert main(["schedule", *map(str, arguments), "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (4, 8, 2), (4, 8, 3), (8, 16, 2)])
def test_json_gives_the_closed_forms(capsys, p, m, v):
    size = ["--stages", p, "--microbatches", m]
    for name, bubble, peaks in (
        ("naive", (p - 1) / p, [1] * p),
        ("gpipe", (p - 1) / (m + p - 1), [m] * p),
        ("1f1b", (p - 1) / (m + p - 1), [min(m, p - r) for r in range(p)]),
    ):
        got = told(capsys, "--schedule", name, *size, "--forward", "1/3", "--backward-weight", "0.7")
        assert got["bubble_fraction"] == bubble and got["peak_activations"] == peaks
        assert (got["schedule"], got["stages"], got["microbatches"], got["virtual_stages"]) == (name, p, m, 1)
    got = told(capsys, "--schedule", "interleaved-1f1b", *size, "--virtual-stages", v)
    assert got["bubble_fraction"] == (p - 1) / (v * m + p - 1) and got["virtual_stages"] == v
    assert told(capsys, "--schedule", "1f1b", *size)["makespan"] == 3 * (m + p - 1)


def test_json_gives_zero_bubbles_table(capsys):
    times = ["--forward", 18.522, "--backward-input", 18.086, "--backward-weight", 9.337, "--comm", 0.601]
    for name, rate in (("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)):
        got = told(capsys, "--schedule", name, "--stages", 8, "--microbatches", 24, *times)
        assert round(got["bubble_rate"], 4) == rate


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_through_csv_and_is_the_same(capsys, tmp_path, name):
    path = str(tmp_path / "own.csv")
    size = ["--schedule", name, "--stages", "2", "--microbatches", "4"]
    assert main(["schedule", *size, "--csv", path]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert load_csv(path).ranks == make(name, 2, 4).ranks
    times = ["--forward", "2", "--comm", "0.5"]
    assert told(capsys, "--schedule", path, *times) == told(capsys, *size, *times) | {"schedule": "own"}


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_command_draws_and_says_what_it_wrote(capsys, tmp_path, suffix):
    out, numbers = tmp_path / "new" / f"s.{suffix}", tmp_path / "s.json"
    size = ["--schedule", "zbv", "--stages", "2", "--microbatches", "3"]
    assert main(["schedule", *size, "--out", str(out), "--json", str(numbers)]) == 0
    assert capsys.readouterr() == (f"{out}\n{numbers}\n", "")
    assert out.stat().st_size > 3000 and json.loads(numbers.read_text())["schedule"] == "zbv"
    assert told(capsys, *size, "--out", str(out)) == json.loads(numbers.read_text()), "and nothing beside it"


GOOD = "0F0,,,0B0\n,1F0,1B0,\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "holds no actions"),
        ("0F0,0X0\n", "rank 0, cell 2: unknown action '0X0'"),
        (GOOD.replace("1B0", "1B0,1B0"), "rank 1, 1B0: done 2 times"),
        (GOOD.replace("1B0", ""), "1B0 is missing"),
        ("0B0,0F0\n", "rank 0, 0B0: comes before 0F0"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n",
            "rank 1, 1F0: needs 0F0 from rank 0, but rank 1 has no 1RECV",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "rank 0 before 0B0, which needs 1B0; rank 1 before 1F1, which needs 0F1",
        ),
    ],
)
def test_a_bad_file_is_one_line_with_action_and_rank(capsys, tmp_path, content, line):
    path, out = tmp_path / "bad.csv", tmp_path / "out.png"
    if content is not None:
        path.write_text(content)
    assert main(["schedule", "--schedule", str(path), "--out", str(out), "--json", "-"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("visualize: error: ") and printed.err.count("\n") == 1
    assert line in printed.err and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--schedule", "1f1b", "--stages", "4", "--microbatches", "8"], "give --out FIG, --json FILE or --csv FILE"),
        (["--json", "-"], "the following arguments are required: --schedule"),
        (["--schedule", "1f1b", "--json", "-"], "1f1b needs --stages P and --microbatches M"),
        (["--schedule", "2f2b", "--json", "-"], "schedule 2f2b: choose from naive"),
        (["--schedule", "{csv}", "--stages", "2", "--json", "-"], "--stages 2: {csv} says this itself"),
        (["--schedule", "{csv}", "--virtual-stages", "2", "--json", "-"], "--virtual-stages 2: {csv} says this"),
        (["--schedule", "{csv}", "--out", "x.gif"], "--out x.gif: the name must end in"),
        (["--schedule", "{csv}", "--json", "{csv}/x"], "--json {csv}/x cannot be written"),
        (["--schedule", "{csv}", "--csv", "{csv}/x"], "--csv {csv}/x cannot be written"),
        (["--schedule", "{csv}", "--json", "-", "--forward", "nan"], "--forward: invalid duration (as 3, 0.5 or 1/3)"),
        (["--schedule", "{csv}", "--json", "-", "--forward=-1"], "--forward: invalid duration"),
        (["--schedule", "{csv}", "--json", "-", "--comm", "1/0"], "--comm: invalid duration"),
        (["--schedule", "{csv}", "--json", "-", "--comm", "1e99999999"], "--comm: invalid duration"),
        (
            ["--schedule", "{csv}", "--json=-", "--forward=0", "--backward-input=0", "--backward-weight=0"],
            "= 0: the schedule takes no time",
        ),
        (["--schedule", "1f1b", "--stages=0", "--microbatches=8", "--json=-"], "pp = 0"),
        (["--schedule", "1f1b", "--stages=99999", "--microbatches=99999", "--json=-"], "more than can be shown"),
        (
            ["--schedule", "1f1b", "--stages=4", "--microbatches=8", "--virtual-stages=2", "--json=-"],
            "1 stage per rank",
        ),
        (["--schedule", "interleaved-1f1b", "--stages=4", "--microbatches=6", "--json=-"], "6/4 is not whole"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, tmp_path, arguments, line):
    path = tmp_path / "good.csv"
    path.write_text(GOOD)
    assert main(["schedule", *(text.format(csv=path) for text in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and line.format(csv=path) in printed.err


def test_the_gallery_can_be_made_again(capsys, tmp_path, monkeypatch):
    made = {}
    monkeypatch.setattr("visualize.schedule_command.save", lambda figure, path: made.update({path: figure}))
    assert main(["gallery", "--out", str(tmp_path)]) == 0
    names = [Path(path).name for path in capsys.readouterr().out.split()]
    assert names == ["schedules.png", "schedule_1f1b_8x32.png", "schedule_zbv.png"]
    assert all((Path(__file__).parents[2] / "visualize" / "gallery" / name).is_file() for name in names)
    assert len(made) == 3 and len(boxes(made[str(tmp_path / names[1])].axes[0])) == 2 * 8 * 32


# ---- the notebook ----------------------------------------------------------------------------------------------------


def test_outside_a_notebook_exploring_is_one_picture(tmp_path):
    figure = explore_schedules()
    assert boxes(figure.axes[0]) == expected(timeline("1f1b", 4, 8))
    save(figure, str(tmp_path / "explored.svg"))


def test_in_a_notebook_the_picture_follows_the_sliders(monkeypatch, capsys):
    widgets = pytest.importorskip("ipywidgets")
    drawn = []
    monkeypatch.setattr(explore, "in_notebook", lambda: True)
    monkeypatch.setattr(explore, "plot_schedule", drawn.append)
    box = explore_schedules()
    sliders = {
        one.description: one
        for column in box.children[0].children
        for one in column.children
        if isinstance(one, (widgets.Dropdown, widgets.IntSlider, widgets.FloatSlider))
    }
    assert len(sliders) == 8 and drawn[-1].schedule.ranks == make("1f1b", 4, 8).ranks
    sliders["schedule"].value = "interleaved-1f1b"
    sliders["interleaved: v"].value = 3
    sliders["F"].value = 0.3
    assert drawn[-1].schedule.ranks == make("interleaved-1f1b", 4, 8, 3).ranks
    assert drawn[-1].ranks[0][0].end == Fraction(3, 10)
    before = len(drawn)
    sliders["microbatches m"].value = 9
    assert len(drawn) == before and "9/4 is not whole" in capsys.readouterr().out, "what cannot be says why"
