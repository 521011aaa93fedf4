"""The mesh drawn: its numbers are what the ranks counted and the closed forms, each line is a pair that talks."""

import json
import re
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from launcher import ROOT, run_mpi
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle
from picture_parts import mesh_lines, texts

from minipar.comm import DeviceMesh, run_local, save_chrome_trace, start_trace, wire_bytes
from visualize import MeshTraffic, mesh_traffic, mesh_values, parse_trace, plot_mesh, read_trace
from visualize.__main__ import main
from visualize.mesh import AXES, BOX, LOOKS, THINNEST, WIDEST, layout
from visualize.style import byte_label, lightness

pytestmark = pytest.mark.sampled(3)

ELEMENTS = {"tp": 1000, "dp": 501, "pp": 37}  # of the array that each axis sums, float64; not all divide

CUBE = {"pp": 2, "dp": 2, "tp": 2}


def program(comm, path, sizes, steps=2):
    """On each axis a ring, in each step; and a message to the next stage. Returns what this rank counted."""
    mesh = DeviceMesh(comm, **sizes)
    start_trace(comm)
    comm.traffic.reset()
    for _ in range(steps):
        for axis, n in ELEMENTS.items():
            getattr(mesh, axis).all_reduce(np.ones(n), algorithm="ring")
        if mesh.pp.rank + 1 < mesh.pp.size:
            mesh.pp.isend(np.ones(7), mesh.pp.rank + 1).wait()
        if mesh.pp.rank > 0:
            mesh.pp.irecv(np.empty(7), mesh.pp.rank - 1).wait()
        with comm.tracer.region("optimizer"):
            pass
    counted = {
        axis: (comm.traffic.messages(axis=axis), comm.traffic.bytes(axis=axis)) for axis in ("tp", "cp", "dp", "pp")
    }
    save_chrome_trace(str(path), comm, mesh)
    return counted


def run(tmp_path, steps=2, **sizes):
    """(what the trace says, what each rank counted)"""
    path = tmp_path / "trace.json"
    counted = run_local(int(np.prod(list(sizes.values()))), program, path, sizes, steps, clock="model")
    return mesh_traffic(read_trace(str(path))), counted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [CUBE, {"dp": 3, "tp": 2}, {"dp": 8}, {"pp": 3, "tp": 2}], ids=str)
def test_bytes_and_messages_are_counted_and_the_closed_form(tmp_path, sizes):
    traffic, counted = run(tmp_path, **sizes)
    assert traffic.shape == {"pp": 1, "dp": 1, "tp": 1} | sizes and traffic.steps == 2
    for rank in range(traffic.ranks):
        place = traffic.coordinates(rank)
        for axis in traffic.shape:
            assert traffic.sent(axis, rank) == counted[rank][axis]
            p, n = traffic.shape[axis], ELEMENTS[axis]
            ring = wire_bytes("all_reduce", "ring", n, 8, p, place[axis])
            handed_on = 7 * 8 if axis == "pp" and place["pp"] + 1 < p else 0
            assert traffic.per_step(traffic.sent(axis, rank)[1]) == ring + handed_on
    numbers = mesh_values(traffic)
    for axis in traffic.shape:
        total = sum(each[axis][1] for each in counted)
        assert numbers["axes"][axis]["bytes"] == total and numbers["axes"][axis]["bytes_per_step"] == total // 2
        assert numbers["axes"][axis]["messages"] == sum(each[axis][0] for each in counted)
        assert sum(link["bytes"] for link in numbers["links"] if link["axis"] == axis) == total
    for each, counts in zip(numbers["ranks"], counted, strict=True):
        assert {axis: (c["messages"], c["bytes"]) for axis, c in each["sent"].items()} == {
            axis: counts[axis] for axis in traffic.shape
        }


def test_coordinates_are_the_meshs():
    def coordinates(comm):
        return DeviceMesh(comm, pp=3, dp=2, cp=1, tp=2).coordinates

    traffic = MeshTraffic({"pp": 3, "dp": 2, "cp": 1, "tp": 2}, 1)
    assert [traffic.coordinates(rank) for rank in range(12)] == run_local(12, coordinates)


def test_training_is_drawn_with_the_bytes_that_it_sends(tmp_path):
    """Data parallelism over 2 ranks, tensor parallelism over 2; a ring of two sends each array once, from each rank."""
    small = "--layers 1 --hidden 8 --heads 2 --seq-len 4 --global-batch 4 --steps 3 --dp 2 --tp 2".split()
    file, told = tmp_path / "t.json", tmp_path / "numbers.json"
    done = run_mpi(4, ["-m", "minipar.train", *small, "--trace", str(file)], timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert main(["mesh", str(file), "--json", str(told)]) == 0
    numbers = json.loads(told.read_text())
    assert numbers["mesh"] == {"pp": 1, "dp": 2, "tp": 2} and numbers["steps"] == 3
    h, vocabulary, s, tokens = 8, 256, 4, 2 * 4
    # dp, float32: a rank's share of the parameters (column layers with their biases and row layers' weights are halved,
    # the rest is whole), and the loss as one float64.
    block = (12 * h * h + 7 * h) // 2 + 6 * h
    dp = 4 * (vocabulary // 2 * h + s * h + block + 2 * h) + 8
    # tp: embedding and block forward, block and head backward, 6 sums of activations; for the loss three numbers per
    # token; for the gradient norm two float64.
    tp = 4 * (6 * tokens * h + 3 * tokens) + 16
    for rank in numbers["ranks"]:
        assert {axis: sent["bytes"] for axis, sent in rank["sent"].items()} == {"tp": 3 * tp, "dp": 3 * dp, "pp": 0}
    assert {axis: each["bytes_per_step"] for axis, each in numbers["axes"].items()} == {
        "tp": 4 * tp,
        "dp": 4 * dp,
        "pp": 0,
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [CUBE, {"pp": 2, "dp": 4, "tp": 2}, {"dp": 8}, {"dp": 2}], ids=str)
def test_each_pair_that_talks_is_one_line_as_wide_as_its_bytes(tmp_path, sizes):
    traffic, _ = run(tmp_path, **sizes)
    figure = plot_mesh(traffic)
    drawn = mesh_lines(figure)
    talks = {(axis, min(s, d), max(s, d)) for axis, s, d in traffic.links}
    assert set(drawn) == talks
    both = {
        (axis, low, high): sum(traffic.links.get((axis, *pair), (0, 0))[1] for pair in ((low, high), (high, low)))
        for axis, low, high in talks
    }
    for pair, line in drawn.items():
        assert line.get_linewidth() == THINNEST + (WIDEST - THINNEST) * both[pair] / max(both.values())
        assert to_hex(line.get_edgecolor()).upper() == LOOKS[pair[0]][0].upper()
    written = texts(figure)
    for rank in range(traffic.ranks):
        assert f"rank {rank}" in written
        assert " ".join(f"{axis} {place}" for axis, place in traffic.coordinates(rank).items()) in written
    for axis in traffic.axes:
        messages, nbytes = traffic.sent(axis)
        assert {byte_label(nbytes // 2, traffic.unit), f"{messages // 2:,}"} <= set(written)
        for rank in range(traffic.ranks):
            assert f"{axis} {byte_label(traffic.per_step(traffic.sent(axis, rank)[1]), traffic.unit)}" in written
    if traffic.ranks == 8:
        labels = sorted(byte_label(nbytes / 2, traffic.unit) for nbytes in both.values())
        assert labels == sorted(text for text in written if text in set(labels))


@pytest.mark.parametrize("sizes", [CUBE, {"dp": 2}], ids=str)
def test_a_line_ends_at_the_boxes_of_its_ranks(tmp_path, sizes):
    figure = plot_mesh(run(tmp_path, **sizes)[0])
    numbers = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    for (_, low, high), line in mesh_lines(figure).items():
        for rank, box in ((low, line.patchA), (high, line.patchB)):
            x, y = numbers[f"rank {rank}"]
            assert box.get_x() < x < box.get_x() + box.get_width()
            assert box.get_y() < y < box.get_y() + box.get_height()


def test_all_bytes_have_one_unit_and_the_stages_are_named(tmp_path):
    links = {("tp", 0, 1): [1, 5 * 2**20], ("tp", 1, 0): [1, 2**20], ("pp", 0, 2): [1, 3000], ("pp", 1, 3): [1, 70]}
    figure = plot_mesh(MeshTraffic({"pp": 2, "dp": 1, "tp": 2}, 1, links))
    sizes = [found for text in texts(figure) for found in re.findall(r"\d (B|[KMG]iB)\b", text)]
    assert len(sizes) > 10 and set(sizes) == {"MiB"}
    fields = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    names = [text for text in figure.axes[0].texts if text.get_text().startswith("stage ")]
    assert [text.get_text() for text in names] == ["stage 0", "stage 1"] and len(fields) == 2
    for field, text in zip(fields, names, strict=True):
        assert field.get_bbox().contains(*text.get_position()), "a name stands in its field"
    assert any("A grey field: the ranks of one pipeline stage." in text for text in texts(figure))
    without = plot_mesh(MeshTraffic({"pp": 1, "dp": 2, "tp": 1}, 1, {("dp", 0, 1): [1, 8]}))
    assert not any("grey" in text for text in texts(without)), "no field, no word about it"


def test_a_line_beside_a_row_passes_over_those_that_it_crosses():
    """tp of 4 in two stages: the ring's way back from the last rank crosses the lines of pp."""
    ring = {("tp", 4 * stage + i, 4 * stage + (i + 1) % 4): [1, 100] for stage in (0, 1) for i in range(4)}
    pipeline = {("pp", i, i + 4): [1, 100] for i in range(4)}
    drawn = mesh_lines(plot_mesh(MeshTraffic({"pp": 2, "dp": 1, "tp": 4}, 1, ring | pipeline)))
    over = {pair for pair, line in drawn.items() if line.get_path_effects()}
    assert over == {("tp", 0, 3), ("tp", 4, 7)}
    straight = max(line.get_zorder() for pair, line in drawn.items() if pair not in over)
    assert straight < min(drawn[pair].get_zorder() for pair in over)


def test_letters_in_the_mesh_have_eight_points(tmp_path):
    traffic, _ = run(tmp_path, **CUBE)
    figure = plot_mesh(traffic)
    assert min(text.get_fontsize() for text in figure.axes[0].texts) >= 8 and figure.get_figwidth() < 8


def test_heads_are_where_bytes_arrive_and_little_is_not_drawn():
    links = {("dp", 0, 1): [1, 1000], ("dp", 1, 2): [1, 500], ("dp", 2, 1): [1, 500], ("dp", 0, 2): [1, 10]}
    figure = plot_mesh(MeshTraffic({"pp": 1, "dp": 3, "tp": 1}, 1, links))
    arrows = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    styles = [type(patch.get_arrowstyle()).__name__ for patch in arrows if patch.get_gid() is None]
    assert styles == ["CurveFilledB", "CurveFilledAB"]
    assert set(mesh_lines(figure)) == {("dp", 0, 1), ("dp", 1, 2)}
    assert texts(figure).count("1000 B") == 2 and "10 B" not in texts(figure)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes",
    [(pp, dp, tp) for pp in (1, 2, 3, 4) for dp in (1, 2, 4, 8) for tp in (1, 2, 4) if 1 < pp * dp * tp <= 64],
    ids=str,
)
def test_boxes_lie_apart_and_tensor_parallel_ranks_nearest(sizes):
    shape = dict(zip(("pp", "dp", "tp"), sizes, strict=True))
    places = layout(shape, (BOX, 1.0))
    assert list(places) == list(range(int(np.prod(sizes))))
    for (x0, y0), (x1, y1) in combinations(places.values(), 2):
        assert abs(x0 - x1) > BOX + 0.1 or abs(y0 - y1) > 1.1
    near = {}
    for axis in shape if min(sizes) > 1 else ():
        step = {"tp": 1, "dp": shape["tp"], "pp": shape["tp"] * shape["dp"]}[axis]
        near[axis] = float(np.hypot(*np.subtract(places[0], places[step])))
    assert not near or near["tp"] == min(near.values())


def train_in_context(comm, path, sizes):
    """A message around cp, and a sum over dp and cp together, as training sends them."""
    mesh = DeviceMesh(comm, **sizes)
    start_trace(comm)
    comm.traffic.reset()
    mesh.cp.all_gather(np.ones(50), algorithm="ring")
    mesh.dp_cp.all_reduce(np.ones(600), algorithm="ordered")
    mesh.tp.all_reduce(np.ones(100), algorithm="ring")
    save_chrome_trace(str(path), comm, mesh)
    return {axis: comm.traffic.bytes(axis=axis) for axis in mesh.AXES}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sizes",
    [
        {"cp": 4},
        {"dp": 2, "cp": 2},
        {"dp": 2, "cp": 2, "tp": 2},
        {"pp": 2, "cp": 4},
        {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
    ],
    ids=str,
)
def test_gradients_are_drawn_between_ranks_of_dp_and_cp(tmp_path, sizes):
    path = tmp_path / "trace.json"
    counted = run_local(int(np.prod(list(sizes.values()))), train_in_context, path, sizes, clock="model")
    traffic = mesh_traffic(read_trace(str(path)))
    assert [{axis: traffic.sent(axis, rank)[1] for axis in AXES} for rank in range(traffic.ranks)] == counted
    drawn = mesh_lines(plot_mesh(traffic))
    assert set(drawn) == {(axis, min(s, d), max(s, d)) for axis, s, d in traffic.links}
    replicas = sizes.get("dp", 1) * sizes["cp"]
    assert sum(axis == "dp" for axis, *_ in drawn) == replicas * (replicas - 1) // 2 * traffic.ranks // replicas
    for (x0, y0), (x1, y1) in combinations(layout(traffic.shape, (BOX, 1.0)).values(), 2):
        assert abs(x0 - x1) > BOX + 0.1 or abs(y0 - y1) > 1.1


@pytest.mark.parametrize("sizes", [{"dp": 4, "ep": 2}, {"dp": 2, "cp": 2, "tp": 2, "ep": 4}], ids=str)
def test_tokens_are_drawn_on_their_way_to_experts(tmp_path, sizes):
    path, ranks = tmp_path / "trace.json", sizes["dp"] * sizes.get("cp", 1) * sizes.get("tp", 1)

    def program(comm):
        mesh = DeviceMesh(comm, **sizes)
        start_trace(comm)
        comm.traffic.reset()
        counts = [3 + rank for rank in range(mesh.ep.size)]
        mesh.ep.all_to_all(np.ones(sum(counts)), counts=(counts, [3 + mesh.ep.rank] * mesh.ep.size))
        mesh.edp.all_reduce(np.ones(100), algorithm="ring")
        save_chrome_trace(str(path), comm, mesh)
        return {axis: comm.traffic.bytes(axis=axis) for axis in LOOKS}, mesh.ep.ranks

    counted = run_local(ranks, program, clock="model")
    traffic = mesh_traffic(read_trace(str(path)))
    assert [{axis: traffic.sent(axis, rank)[1] for axis in LOOKS} for rank in range(ranks)] == [c for c, _ in counted]
    drawn = {pair[1:] for pair in mesh_lines(plot_mesh(traffic)) if pair[0] == "ep"}
    assert drawn == {(a, b) for _, members in counted for a in members for b in members if a < b}
    assert sum(row["sent"]["ep"]["bytes"] for row in mesh_values(traffic)["ranks"]) == traffic.sent("ep")[1] > 0


def test_axes_differ_in_grey_and_in_pattern():
    light = sorted(lightness(colour) for colour, _ in LOOKS.values())
    assert min(b - a for a, b in zip(light, light[1:], strict=False)) > 15
    assert len({str(dashes) for _, dashes in LOOKS.values()}) == len(LOOKS) == 5


# ---- the command -----------------------------------------------------------------------------------------------------


def chrome(mesh, message=("dp", 0, 1), ranks=2, **args):
    """The smallest trace: one message."""
    axis, source, dest = message
    events = []
    for rank in range(ranks):
        for tid, name in ((0, "computation"), (1, f"communication {axis}")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        events.append({"ph": "X", "name": "all_reduce", "pid": rank, "tid": 1, "ts": 0, "dur": 2})
    events.append({"ph": "s", "id": "a", "pid": source, "tid": 1, "ts": 0, "args": args})
    events.append({"ph": "f", "id": "a", "pid": dest, "tid": 1, "ts": 1})
    return {"traceEvents": events, "otherData": {"clock": "wall"} | ({"mesh": mesh} if mesh else {})}


DP2 = {"pp": 1, "dp": 2, "tp": 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (chrome(None, bytes=8), "does not say its mesh"),
        (chrome({"dp": 2}, bytes=8), "does not say its mesh"),
        (chrome({"pp": 0, "dp": 2, "tp": 1}, bytes=8), "does not say its mesh"),
        (chrome(DP2), "does not say how many bytes its messages have"),
        (chrome(DP2, ranks=3, bytes=8), "has 3 ranks, but its mesh pp*dp*tp = 1*2*1 = 2"),
        (chrome(DP2, ("tp", 0, 1), bytes=8), "has a message on tp from rank 0 to rank 1, which do not lie along tp"),
        (chrome({"pp": 1, "dp": 2, "tp": 2}, ("dp", 0, 3), ranks=4, bytes=8), "from rank 0 to rank 3, which do not"),
        (chrome({"pp": "x", "dp": 2, "tp": 1}, bytes=8), "not a trace of minipar"),
        (chrome({"pp": 1, "dp": 128, "tp": 1}, ranks=128, bytes=8), "128 ranks: more than 64 cannot be drawn"),
    ],
)
def test_a_trace_that_does_not_fit_is_one_line_and_exit_code_2(tmp_path, capsys, trace, line):
    file, out = tmp_path / "t.json", tmp_path / "out.png"
    file.write_text(json.dumps(trace))
    assert main(["mesh", str(file), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("visualize: error: ") and printed.err.count("\n") == 1
    assert line in printed.err and not out.exists()


def test_the_command_writes_picture_and_json_or_standard_output(tmp_path, capsys):
    file, out, told = tmp_path / "t.json", tmp_path / "made" / "mesh.png", tmp_path / "mesh.json"
    file.write_text(json.dumps(chrome(DP2, bytes=8)))
    assert main(["mesh", str(file), "--out", str(out), "--json", str(told)]) == 0
    assert capsys.readouterr() == (f"{out}\n{told}\n", "") and out.stat().st_size > 3000
    assert main(["mesh", str(file), "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers == json.loads(told.read_text()) == mesh_values(mesh_traffic(parse_trace(chrome(DP2, bytes=8))))
    assert numbers["links"] == [{"axis": "dp", "source": 0, "dest": 1, "messages": 1, "bytes": 8}]
    assert main(["mesh", str(file)]) == 2
    assert "nothing to do: give --out FIG or --json FILE" in capsys.readouterr().err
    assert main(["mesh", str(file), "--json", str(tmp_path / "no" / "x")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_it_runs_as_a_module(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(chrome(DP2, bytes=8)))
    command = [sys.executable, "-m", "visualize", "mesh", str(tmp_path / "t.json"), "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["mesh"] == DP2
