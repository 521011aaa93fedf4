"""Pictures of the memory ledger: what is drawn is what was held, and a file that is something else is refused."""

import numpy as np
import pytest
from launcher import run_mpi
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from minipar import memory
from visualize import plot_ledger
from visualize.__main__ import main
from visualize.measurements import KINDS, read_ledger
from visualize.style import COLOURS

KIB = 1024
# forward: activations grow; backward: they go, and a buffer comes and goes; optimizer: the model state alone
MOMENTS = [
    ("forward", (4 * KIB, 4 * KIB, 8 * KIB, 0, 0)),
    ("forward", (4 * KIB, 4 * KIB, 8 * KIB, 2 * KIB, 0)),
    ("forward", (4 * KIB, 4 * KIB, 8 * KIB, 6 * KIB, 0)),
    ("backward", (4 * KIB, 4 * KIB, 8 * KIB, 6 * KIB, KIB)),
    ("backward", (4 * KIB, 4 * KIB, 8 * KIB, 3 * KIB, 0)),
    ("optimizer", (4 * KIB, 4 * KIB, 8 * KIB, 0, 0)),
]


def account(ranks=2, kinds=KINDS, moments=MOMENTS):
    return {"kinds": list(kinds), "ranks": [{"rank": rank, "peak": 0, "moments": moments} for rank in range(ranks)]}


def heights(axes, x):
    """{colour: (from, to)} of the areas over the place x."""
    found = {}
    for area in axes.collections:
        assert isinstance(area, PolyCollection)
        vertices = area.get_paths()[0].vertices
        ys = [
            y for (x0, y), (x1, _) in zip(vertices[:-1], vertices[1:], strict=True) if min(x0, x1) <= x <= max(x0, x1)
        ]
        found[to_hex(area.get_facecolor()[0]).upper()] = (min(ys), max(ys))
    return found


def test_kinds_are_the_ledgers_and_differ_in_lightness():
    assert KINDS == memory.KINDS
    light = [np.dot([int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)], [0.299, 0.587, 0.114]) for kind in KINDS]
    assert min(abs(a - b) for i, a in enumerate(light) for b in light[:i]) > 15


def test_areas_stack_to_the_memory_held_and_the_peak_is_named():
    axes = plot_ledger({"run": MOMENTS}).axes[0]
    edge = axes.lines[0]
    assert edge.get_drawstyle() == "steps-post"
    assert list(edge.get_ydata()) == [16, 18, 22, 23, 19, 16, 16]
    assert axes.get_ylabel() == "memory of one rank (KiB)" and axes.texts[0].get_text() == "peak 23 KiB"
    assert axes.texts[0].xy[0] == edge.get_xdata()[3]
    inside = (edge.get_xdata()[3] + edge.get_xdata()[4]) / 2  # the first moment of backward
    assert heights(axes, inside) == {
        COLOURS["parameters"]: (0, 4),
        COLOURS["gradients"]: (4, 8),
        COLOURS["optimizer"]: (8, 16),
        COLOURS["activations"]: (16, 22),
        COLOURS["buffers"]: (22, 23),
    }


def test_phases_are_named_in_order_and_a_short_one_has_room():
    axes = plot_ledger({"run": MOMENTS * 20}).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["forward", "backward", "optimizer"] * 20
    long = [("forward", (1, 0, 0, 0, 0))] * 500 + [("optimizer", (1, 0, 0, 0, 0))]
    axes = plot_ledger({"run": long}).axes[0]
    (start, *_, last, end) = axes.lines[0].get_xdata()
    assert (start, last) == (0, 500) and end - last > 0.15 * end


def test_runs_share_one_scale_and_each_has_its_formula():
    smaller = [(phase, (KIB, *held[1:])) for phase, held in MOMENTS]
    figure = plot_ledger({"whole": MOMENTS, "sharded": smaller}, {"whole": 16 * KIB, "sharded": 13 * KIB})
    left, right = figure.axes
    assert plot_ledger({str(i): MOMENTS for i in range(4)}).get_size_inches()[0] > figure.get_size_inches()[0]
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == ("whole", "sharded")
    assert left.get_ylim() == right.get_ylim()
    levels = [[line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] for axes in figure.axes]
    assert levels == [[16], [13]]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [*KINDS, "model state, formula"]


@pytest.mark.parametrize(("unit", "label"), [(1, "B"), (2**20, "MiB"), (2**30, "GiB")])
def test_the_unit_follows_the_size(unit, label):
    axes = plot_ledger({"run": [("forward", (3 * unit, 0, 0, 0, 0))]}).axes[0]
    assert axes.get_ylabel() == f"memory of one rank ({label})" and list(axes.lines[0].get_ydata()) == [3, 3]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_draws_what_training_wrote(tmp_path, capsys):
    """`minipar.train --memory` on two ranks, then `visualize memory` of either."""
    small = "--layers 1 --hidden 8 --heads 1 --seq-len 4 --global-batch 2 --steps 1 --zero-stage 2".split()
    file = tmp_path / "stage2.json"
    done = run_mpi(2, ["-m", "minipar.train", *small, "--memory", str(file)], timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        moments = read_ledger(str(file), rank)
        assert [moment[0] for moment in (moments[0], moments[-1])] == ["forward", "optimizer"]
        out = tmp_path / "made" / f"{rank}.png"
        assert main(["memory", str(file), "--rank", str(rank), "--out", str(out)]) == 0
        assert out.stat().st_size > 3000 and capsys.readouterr() == (f"{out}\n", "")


def test_the_command_compares_files(write, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("visualize.style.save", lambda figure, path: drawn.append(figure))
    files = [write(f"stage{stage}.json", account()) for stage in range(3)]
    assert main(["memory", *files, "--rank", "1", "--out", "x.png"]) == 0
    assert [axes.get_title(loc="left") for axes in drawn[0].axes] == [f"stage{stage}" for stage in range(3)]
    assert main(["memory", files[0], "--out", "x.png"]) == 0
    assert drawn[1].axes[0].get_title(loc="left") == "", "one file: its name says nothing"
    titles = [figure.get_suptitle() for figure in drawn]
    assert titles == [f"Memory of rank {rank} during one training step, by kind" for rank in (1, 0)]
    assert {axes.get_xlabel() for axes in drawn[0].axes} == {"every allocation and release, in order"}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not JSON"),
        ([1, 2], "has no list of ranks: not written by minipar.train --memory"),
        ({"traceEvents": []}, "has no list of ranks: not written by minipar.train --memory"),
        ({"kinds": list(KINDS), "ranks": []}, "has no list of ranks"),
        (
            account(kinds=KINDS[:3]),
            "has other kinds of memory than parameters, gradients, optimizer, activations, buff",
        ),
        ({"kinds": list(KINDS), "ranks": [{"rank": 0}]}, "has a rank without its moments"),
        ({"kinds": list(KINDS), "ranks": [7]}, "has a rank without its moments"),
        (account(moments=[["forward", "many"]]), "has a rank without its moments"),
        (account(moments=[]), "rank 0: expected moments of 5 numbers each"),
        (account(moments=[["forward", [1, 2]]]), "rank 0: expected moments of 5 numbers each"),
    ],
)
def test_another_file_is_one_line_and_exit_code_2(write, tmp_path, capsys, content, line):
    path = str(tmp_path / "missing") if content is None else write("file", content)
    out = tmp_path / "out.png"
    assert main(["memory", path, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("visualize: error: ") and printed.err.count("\n") == 1
    assert line in printed.err and not out.exists()


@pytest.mark.parametrize(("rank", "line"), [("2", "--rank 2: "), ("-1", "has ranks 0 to 1"), ("x", "argument --rank")])
def test_a_rank_that_is_not_there_is_refused(write, tmp_path, capsys, rank, line):
    path = write("two.json", account(ranks=2))
    assert main(["memory", path, f"--rank={rank}", "--out", str(tmp_path / "out.png")]) == 2
    assert line in capsys.readouterr().err
