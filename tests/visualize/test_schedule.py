"""Schedules drawn, as numbers and as files: a box for each action at its time, closed forms, colours one can tell."""

import json
import math
from fractions import Fraction

import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_hex
from picture_cases import timeline

from minipar.parallel.pipeline.actions import peak_live
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize import gallery, live_activations, plot_schedule, plot_schedules
from visualize.__main__ import main
from visualize.boxes import chunks, palette
from visualize.schedule import NAMES
from visualize.schedule_file import load_csv
from visualize.style import lightness


def boxes(axes) -> list[tuple[float, float, int, str]]:
    """(start, end, rank, colour) of every box of an action: idle frames, hatches and the marks of stages left out."""
    found = []
    for collection in axes.collections:
        if isinstance(collection, FillBetweenPolyCollection) or collection.get_hatch():
            continue
        colours = [to_hex(colour) for colour in collection.get_facecolor()]
        for number, path in enumerate(collection.get_paths()):
            (x0, y0), (x1, y1) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            colour = colours[number % len(colours)]
            if colour != "#ffffff" and y1 - y0 >= 0.1:
                found.append((round(x0, 6), round(x1, 6), math.floor(y0), colour))
    return sorted(found)


def expected(line) -> list[tuple[float, float, int, str]]:
    colours, chunk = palette([line.schedule]), chunks(line.schedule)
    found = []
    for rank, row in enumerate(line.ranks):
        for slot in row:
            for half in slot.action.halves:
                colour = colours[half.kind, chunk[half.stage]].lower()
                found.append((round(float(slot.start), 6), round(float(slot.end), 6), rank, colour))
    return sorted(found)


# ---- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("naive", 3, 2), ("1f1b", 4, 8), ("interleaved-1f1b", 2, 4), ("zbv", 3, 5), ("dualpipev", 2, 5)],
)
def test_the_boxes_are_the_actions_at_their_times(name, p, m):
    line = timeline(name, p, m, forward=Fraction(1, 3), backward_weight=Fraction(1, 2), comm=Fraction(1, 10))
    panel, memory = plot_schedule(line).axes
    assert boxes(panel) == expected(line)
    assert panel.get_xlim() == memory.get_xlim() == (0, float(line.makespan))


def test_several_timelines_share_one_axis():
    predicted, real = timeline("zb-h1", 4, 4), timeline("zb-h1", 4, 4, forward=1.5, comm=0.25)
    first, second, memory = plot_schedule({"predicted": predicted, "measured": real}, seconds=True).axes
    assert boxes(first) == expected(predicted) and boxes(second) == expected(real)
    assert first.get_xlim() == second.get_xlim() == memory.get_xlim() == (0, real.makespan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_activations_rise_to_the_peak_and_end_at_none(name):
    for p, m in ((1, 2), (4, 8)):
        line = timeline(name, p, m, comm=Fraction(1, 7))
        for slots, actions in zip(line.ranks, line.schedule.ranks, strict=True):
            steps = live_activations(slots)
            assert max(live for _, live in steps) == peak_live(actions) and steps[-1][1] == 0


def test_the_gallery_gives_every_schedule_the_same_model():
    lines = gallery(4, 8)
    assert list(lines) == list(NAMES.values())
    busy = {sum(slot.end - slot.start for row in line.ranks for slot in row) for line in lines.values()}
    assert busy == {4 * 8 * 3}
    assert {name: line.makespan for name, line in lines.items()} == {
        "Naive": 96, "GPipe": 33, "1F1B": 33, "Interleaved 1F1B": Fraction(57, 2), "ZB-H1": 27, "ZB-H2": 27,
        "ZB-V": Fraction(51, 2), "DualPipeV": 27,
    }  # fmt: skip
    assert {axes.get_xlim() for axes in plot_schedules(lines).axes} == {(0, 1.06 * 33)}, "the naive one is cut"


@pytest.mark.parametrize("shown", [["1f1b", "zb-h2"], ["interleaved-1f1b"], ["zbv"]])
def test_colours_survive_greyscale(shown):
    colours = palette(make(name, 2, 4) for name in shown)
    grey = sorted(map(lightness, colours.values()))
    assert min(b - a for a, b in zip(grey, grey[1:], strict=False)) > 9 and 100 - grey[-1] > 9, "idle is white"


# ---- the command -----------------------------------------------------------------------------------------------------


def told(capsys, *arguments) -> dict:
    """Return what `visualize schedule ... --json -` says, and check that it says nothing else."""
    assert main(["schedule", *map(str, arguments), "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (4, 8, 3), (8, 16, 2)])
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
        assert got["times"] == {"forward": 1 / 3, "backward_input": 1.0, "backward_weight": 0.7, "comm": 0.0}
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


GOOD = "0F0,,,0B0\n,1F0,1B0,\n"


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (GOOD.replace("1B0", "1B0,1B0"), ["rank 1", "1B0"]),
        ("0B0,0F0\n", ["rank 0", "0B0", "0F0"]),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", ["rank 1", "1F0", "1RECV"]),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", ["0B0", "1B0", "1F1", "0F1"]),
        ("".join(f"{rank}F0,{rank}B0\n" for rank in range(1025)), ["1025"]),
        (",".join(f"0F{i}" for i in range(50_001)) + "," + ",".join(f"0B{i}" for i in range(50_001)), ["100002"]),
    ],
)
def test_a_bad_schedule_is_one_line_with_action_and_rank(capsys, tmp_path, write, content, values):
    path, out = write("bad.csv", content), tmp_path / "out.png"
    assert main(["schedule", "--schedule", path, "--out", str(out), "--json", "-"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and not out.exists()
    assert all(value in printed.err for value in values)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--schedule", "1f1b", "--json", "-"], ["--stages", "--microbatches"]),
        (["--schedule", "2f2b", "--json", "-"], ["2f2b", "naive"]),
        (["--schedule", "1f1b", "--stages=1025", "--microbatches=1", "--json=-"], ["--stages 1025"]),
        (["--schedule", "{csv}", "--stages", "2", "--json", "-"], ["--stages 2", "{csv}"]),
        (["--schedule", "{csv}", "--json", "-", "--forward", "nan"], ["--forward", "nan"]),
        (["--schedule", "{csv}", "--json=-", "--forward=0", "--backward-input=0", "--backward-weight=0"], ["= 0"]),
        (["--schedule", "interleaved-1f1b", "--stages=4", "--microbatches=6", "--json=-"], ["6/4"]),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, write, arguments, values):
    path = write("good.csv", GOOD)
    assert main(["schedule", *(text.format(csv=path) for text in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert all(value.format(csv=path) in printed.err for value in values)
