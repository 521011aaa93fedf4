"""Pictures of schedules: a box for each action at its time, numbers that fit, colours that can be told apart."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import FillBetweenPolyCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Annotation
from picture_parts import timeline

from minipar.parallel.pipeline.actions import peak_live
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize import gallery, live_activations, plot_schedule, plot_schedules
from visualize.__main__ import main
from visualize.boxes import DIGIT_WIDTH, KINDS, chunks, fitting, legend_handles, palette
from visualize.schedule import NAMES, bubble_text, facts, sizes_text
from visualize.style import COLOURS, at_lightness, lightness

pytestmark = pytest.mark.sampled(3)

RATE = ", none from a rank's first to its last action"  # Zero Bubble's way of counting


def drawn(axes, bars=False) -> list[tuple[float, float, int, str]]:
    """(start, end, rank, colour) of every box in a panel, or of every bar that marks a later stage."""
    found = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        if isinstance(collection, FillBetweenPolyCollection) or collection.get_hatch():
            continue
        colours = [to_hex(colour) for colour in collection.get_facecolor()]
        for number, path in enumerate(collection.get_paths()):
            (x0, y0), (x1, y1) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            colour = colours[number % len(colours)]
            frame = bool(y1 - y0 > 0.9 and collection.get_edgecolor().any() and colour == "#ffffff")
            if not frame and (y1 - y0 < 0.1) == bars:
                found.append((round(x0, 6), round(x1, 6), math.floor(y0), colour))
    return sorted(found)


def expected(line, scale=1.0) -> list[tuple[float, float, int, str]]:
    colours, chunk = palette([line.schedule]), chunks(line.schedule)
    return sorted(
        (
            round(float(slot.start) * scale, 6),
            round(float(slot.end) * scale, 6),
            rank,
            colours[half.kind, chunk[half.stage]].lower(),
        )
        for rank, row in enumerate(line.ranks)
        for slot in row
        for half in slot.action.halves
    )


# ---- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "p", "m"),
    [
        ("naive", 3, 2),
        ("gpipe", 1, 1),
        ("1f1b", 4, 8),
        ("interleaved-1f1b", 2, 4),
        ("zb-h1", 4, 2),
        ("zbv", 3, 5),
        ("dualpipev", 2, 5),
    ],
)
def test_the_boxes_are_the_actions(name, p, m):
    line = timeline(name, p, m, forward=Fraction(1, 3), backward_weight=Fraction(1, 2), comm=Fraction(1, 10))
    panel, memory = plot_schedule(line).axes
    assert drawn(panel) == expected(line)
    assert panel.get_xlim() == memory.get_xlim() == (0, float(line.makespan))
    assert [label.get_text() for label in panel.get_yticklabels()] == [f"rank {r}" for r in range(p)]


def test_idle_time_is_white_and_framed():
    frames = [c for c in plot_schedule(timeline(m=1)).axes[0].collections if to_hex(c.get_facecolor()[0]) == "#ffffff"]
    assert len(frames) == 4 and all(lightness(to_hex(frame.get_edgecolor()[0])) < 95 for frame in frames)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "p", "m", "v", "said"),
    [
        ("gpipe", 4, 8, None, "bubble (idle / total) 3/11 = 27.3 %  ·  peak 8 activations"),
        ("1f1b", 8, 32, None, "bubble (idle / total) 7/39 = 17.9 %  ·  peak 8 activations"),
        ("naive", 4, 8, None, "bubble (idle / total) 3/4 = 75.0 %  ·  peak 1 activation"),
        ("gpipe", 1, 2, None, "bubble (idle / total) 0  ·  peak 2 activations"),
        ("interleaved-1f1b", 4, 8, 2, "bubble (idle / total) 3/19 = 15.8 %  ·  peak 11/2 = 5.5 activations"),
        ("zb-h2", 4, 8, None, f"bubble (idle / total) 1/9 = 11.1 %{RATE}  ·  peak 7 activations"),
    ],
)
def test_the_title_says_bubble_and_peak(name, p, m, v, said):
    line = timeline(name, p, m, v)
    assert facts(line) == said
    panel = plot_schedule(line).axes[0]
    title = f"{NAMES[name]}, v = {v}" if v else NAMES[name]
    assert (panel.get_title(loc="left"), panel.get_title(loc="right")) == (title, said)


def test_a_bubble_that_zero_bubble_counts_otherwise_says_how():
    line = timeline("zbv", 4, 8, forward=2)
    fraction, rate = bubble_text(line.bubble_fraction), bubble_text(line.bubble_rate)
    assert 0 < line.bubble_rate < line.bubble_fraction
    assert facts(line).startswith(f"bubble (idle / total) {fraction}, {rate} from a rank's first to its last action  ·")


def test_a_bubble_is_a_fraction_only_where_that_says_something():
    assert bubble_text(Fraction(7, 10**6)) == "0.0 %" and bubble_text(0.25) == "25.0 %" and bubble_text(0) == "0"


@pytest.mark.parametrize(("name", "p", "m"), [("1f1b", 4, 8), ("1f1b", 8, 32), ("zbv", 4, 8), ("zbv", 8, 32)])
def test_numbers_stand_inside_their_boxes_and_can_be_read(name, p, m):
    line = timeline(name, p, m)
    figure = plot_schedule(line)
    FigureCanvasAgg(figure)
    panel = figure.axes[0]
    renderer, inverse = figure.canvas.get_renderer(), panel.transData.inverted()
    found: dict[tuple[float, int], str] = {}
    by_place = {(x0, rank): (x0, x1) for x0, x1, rank, _ in drawn(panel)}
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
    assert fitting(1, 20, 20) == 9.0 and fitting(2, 3, 20) == fitting(2, 30, 3) == 0
    assert fitting(2, 9, 20) == pytest.approx(0.78 * 9 / 1.28), "both digits in one line"


def test_a_number_leaves_a_tenth_of_its_box_free_on_each_side():
    """So numbers of neighbours do not touch: 32 microbatches on 8 ranks, two digits in the narrowest box."""
    for width in (9, 10, 14):
        assert fitting(2, width, 50) * 2 * DIGIT_WIDTH <= 0.8 * width


def test_where_no_number_fits_there_is_none():
    assert len(plot_schedule(timeline("gpipe", 2, 300)).axes[0].texts) == 0


def test_a_picture_grows_with_its_numbers_but_not_without_end():
    assert plot_schedule(timeline()).get_figwidth() == 11
    assert 11 < plot_schedule(timeline("1f1b", 8, 32)).get_figwidth() < 15
    assert plot_schedule(timeline("gpipe", 2, 300)).get_figwidth() == 24


def test_several_timelines_share_one_axis_and_memory_lies_below():
    predicted, real = timeline("zb-h1", 4, 4), timeline("zb-h1", 4, 4, forward=1.5, comm=0.25)
    figure = plot_schedule({"predicted": predicted, "measured": real}, seconds=True)
    first, second, memory = figure.axes
    assert drawn(first) == expected(predicted) and drawn(second) == expected(real)
    assert first.get_xlim() == second.get_xlim() == memory.get_xlim() == (0, real.makespan)
    assert first.get_position().y0 > second.get_position().y1 > memory.get_position().y1
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["ZB-H1, predicted", "ZB-H1, measured"]
    assert memory.get_xlabel() == "time (s; number in a box: its microbatch)" and first.get_xlabel() == ""
    areas = [one for one in memory.collections if isinstance(one, FillBetweenPolyCollection)]
    assert len(areas) == 4 and len(memory.lines) == 4, "predicted as areas, measured as lines"
    assert [text.get_text() for text in memory.texts] == ["4", "3", "2", "1", "peak"]
    legend = memory.get_legend()
    named = {text.get_text(): one for text, one in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    assert to_hex(named["predicted"].get_facecolor()) == to_hex(areas[0].get_facecolor()[0])
    assert to_hex(named["measured"].get_color()) == to_hex(memory.lines[0].get_color())
    assert plot_schedule(predicted).axes[-1].get_legend() is None
    milli = plot_schedule(timeline(forward=1e-3, backward_input=1e-3, backward_weight=1e-3), seconds=True).axes[1]
    assert milli.get_xlabel().startswith("time (ms;") and milli.get_xlim() == (0, pytest.approx(33))


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        (timeline(forward=3), "p = 4 ranks, m = 8 microbatches;  F = 3, B = 2"),
        (timeline("zb-h1", 1, 1), "p = 1 rank, m = 1 microbatch;  F = I = W = 1"),
        (
            timeline("zbv", forward=Fraction(1, 2)),
            "p = 4 ranks, m = 8 microbatches;  F = 1, I = W = 2 for all layers of a rank",
        ),
    ],
)
def test_a_picture_states_its_sizes_and_the_times_of_the_actions(line, stated):
    for figure in (plot_schedule(line), plot_schedules({"one": line})):
        assert [text.get_text() for text in figure.texts] == [stated]
        assert figure.axes[-1].get_xlabel() == "time (number in a box: its microbatch)"


def test_measured_times_are_not_stated_as_if_all_were_equal():
    two = {"predicted": timeline(), "measured": timeline(forward=2)}
    assert sizes_text(list(two.values())) == "p = 4 ranks, m = 8 microbatches;  B = 2"
    assert plot_schedule(two, seconds=True).texts[0].get_text() == "p = 4 ranks, m = 8 microbatches"
    other = [timeline(), timeline(m=4)]
    assert sizes_text(other) == "F = 1, B = 2"


def hatched(figure, panel) -> list[tuple[float, int]]:
    """(start, rank) of every hatched box of a panel."""
    patterns = [one for one in figure.axes[panel].collections if one.get_hatch()]
    corners = [path.vertices.min(axis=0) for one in patterns for path in one.get_paths()]
    return sorted((round(float(x), 6), int(y)) for x, y in corners)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_w_is_hatched_and_no_other_kind_and_the_legend_says_so(name):
    line = timeline(name)
    figure = plot_schedule(line)
    weights = [
        (round(float(slot.start), 6), rank)
        for rank, row in enumerate(line.ranks)
        for slot in row
        if slot.action.kind == "W"
    ]
    assert hatched(figure, 0) == sorted(weights)
    labels = {kind: label for kind, label in KINDS.items() if any(k == kind for k, _ in palette([line.schedule]))}
    handles, texts = legend_handles(palette([line.schedule]))
    marks = {text: {patch.get_hatch() for patch in patches} for patches, text in zip(handles, texts, strict=True)}
    assert {kind: marks[label] for kind, label in labels.items()} == {
        kind: {"////"} if kind == "W" else {None} for kind in labels
    }


def test_all_numbers_of_a_picture_have_one_size():
    """Two digits in one line, in a forward of one unit as in a backward of two."""
    for line in (timeline("1f1b", 8, 32), timeline("zbv", 4, 8)):
        texts = plot_schedule(line).axes[0].texts
        assert len({round(text.get_fontsize(), 6) for text in texts}) == 1
        assert {text.get_rotation() for text in texts} == {0} and not any("\n" in text.get_text() for text in texts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8)])
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
        "ZB-V": Fraction(51, 2), "DualPipeV": 27,
    }  # fmt: skip
    assert "Interleaved 1F1B" not in gallery(4, 6)
    figure = plot_schedules(lines)
    assert "DualPipeV" not in gallery(4, 7)
    two = dict.fromkeys(("Interleaved 1F1B", "ZB-V", "DualPipeV"), ", v = 2")  # stages per rank
    assert [axes.get_title(loc="left") for axes in figure.axes] == [name + two.get(name, "") for name in lines]
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 1.06 * 33)}, "the naive one is cut"
    assert [text.get_text() for text in figure.axes[0].texts][-1] == "▸ 96"
    assert len(drawn(figure.axes[-2])) == 2 * 3 * 4 * 8


def test_a_pairs_forward_is_above_its_backward_in_one_row():
    """Both for the whole time of the pair, each with its number; the axis says what two boxes mean."""
    line = timeline("dualpipev", 2, 6)
    figure = plot_schedule(line)
    panel = figure.axes[0]
    pairs = [(slot, rank) for rank, row in enumerate(line.ranks) for slot in row if slot.action.pair]
    assert len(pairs) == 7 + 7
    for slot, rank in pairs:
        middle = float(slot.start + slot.end) / 2
        texts = sorted(
            (t.get_position()[1], t.get_text())
            for t in panel.texts
            if abs(t.get_position()[0] - middle) < 1e-9 and int(t.get_position()[1]) == rank
        )
        assert [text for _, text in texts] == [str(half.microbatch) for half in slot.action.halves]
        assert rank < texts[0][0] < rank + 0.5 < texts[1][0] < rank + 1
    assert "F above B: a pair" in figure.axes[-1].get_xlabel()
    assert "pair" not in plot_schedule(timeline("zbv", 2, 6)).axes[-1].get_xlabel()
    assert (
        sizes_text([line]) == "p = 2 ranks, m = 6 microbatches;  F = I = W = 2, B = 4, F&B = 6 for all layers of a rank"
    )


# ---- colours ---------------------------------------------------------------------------------------------------------


def test_lightness_is_that_of_cielab_and_can_be_set():
    assert lightness("#000000") == 0 and lightness("#ffffff") == pytest.approx(100)
    assert lightness("#777777") == pytest.approx(50.03, abs=0.01)
    for target in (20, 46, 80):
        assert lightness(at_lightness(COLOURS["F"], target)) == pytest.approx(target, abs=0.5)


@pytest.mark.sampled(1)
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

    def nearest(colours):
        lab = [seen(colour) for colour in colours]
        return min(np.linalg.norm(a - b) for i, a in enumerate(lab) for b in lab[:i])

    assert nearest([COLOURS[name] for name in "FBIW"]) > 15, "2.3 is a just noticeable difference"
    together = ("F", "I", "W", "optimizer", "all_reduce", "reduce_scatter", "all_gather")
    assert nearest([COLOURS[name] for name in together]) > 15, "of a zero-bubble trace"
    for stage in (0, 1):
        shades = palette([make("zbv", 2, 4)])
        assert nearest([colour for (_, number), colour in shades.items() if number == stage]) > 20, "same bar"


def test_a_later_stage_has_a_bar_which_grows_with_the_stage():
    line = timeline("interleaved-1f1b", 2, 4, 3)
    chunk = chunks(line.schedule)
    later = [(slot, rank) for rank, row in enumerate(line.ranks) for slot in row if chunk[slot.action.stage] > 0]
    bars = drawn(plot_schedule(line).axes[0], bars=True)
    assert len(bars) == len(later) == 2 * 2 * 2 * 4
    bars.sort(key=lambda bar: (bar[2], bar[0]))
    for (left, right, rank, _), (slot, home) in zip(bars, later, strict=True):
        width = (right - left) / float(slot.end - slot.start)
        assert rank == home and slot.start < left and width == pytest.approx(chunk[slot.action.stage] / 2, rel=0.2)


def test_a_ranks_stages_have_shades_of_their_own():
    colours = palette([make("interleaved-1f1b", 2, 4, 4)])
    forwards = [lightness(colours["F", number]) for number in range(4)]
    assert forwards == sorted(forwards) and min(np.diff(forwards)) > 5
    assert chunks(make("zbv", 2, 4)) == {0: 0, 3: 1, 1: 0, 2: 1}
    texts = plot_schedule(timeline("zbv", 2, 2)).legends[0].get_texts()
    assert [text.get_text() for text in texts][-2:] == ["idle", "the rank's first stage, second (with a bar)"]


def test_the_gallery_can_be_drawn_again(capsys, tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr("visualize.style.save", lambda figure, path: figures.update({path: figure}))
    assert main(["gallery", "--out", str(tmp_path)]) == 0
    names = [Path(path).name for path in capsys.readouterr().out.split()]
    assert names == ["schedules.png", "schedule_1f1b_8x16.png", "schedule_zbv.png"]
    assert all((Path(__file__).parents[2] / "visualize" / "gallery" / name).is_file() for name in names)
    assert len(figures) == 3 and len(drawn(figures[str(tmp_path / names[1])].axes[0])) == 2 * 8 * 16
    small = "p = 4 ranks, m = 8 microbatches;  F = I = W = 1"
    assert [figure.texts[0].get_text() for figure in figures.values()] == [
        f"{small}, B = 2, F&B = 3 for all layers of a rank",
        "p = 8 ranks, m = 16 microbatches;  F = 1, B = 2",
        f"{small} for all layers of a rank",
    ]


def test_what_stands_in_the_margin_is_never_left_out():
    """It begins at the axes' edge, which a rounding could put outside of them."""
    panel = plot_schedule(timeline("1f1b", 2, 2)).axes[-1]
    beside = [text for text in panel.texts if isinstance(text, Annotation)]
    assert [text.get_text() for text in beside] == ["2", "1", "peak"]
    assert [text.get_annotation_clip() for text in beside] == [False] * 3
