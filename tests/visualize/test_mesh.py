"""The mesh drawn: its numbers are what the ranks counted and the closed forms, each line is a pair that talks."""

import json
from math import prod

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch

from minipar.comm import DeviceMesh, run_local, save_chrome_trace, start_trace, wire_bytes
from visualize import MeshTraffic, mesh_traffic, mesh_values, parse_trace, plot_mesh, read_trace
from visualize.__main__ import main
from visualize.mesh import LOOKS, THINNEST, WIDEST
from visualize.style import lightness

ELEMENTS = {"tp": 1000, "dp": 501, "pp": 37}  # of the array that each axis sums, float64; not all divide


def rings(comm, mesh):
    """On each axis a ring, in each of two steps; and a message to the next stage."""
    for _ in range(2):
        for axis, n in ELEMENTS.items():
            getattr(mesh, axis).all_reduce(np.ones(n), algorithm="ring")
        if mesh.pp.rank + 1 < mesh.pp.size:
            mesh.pp.isend(np.ones(7), mesh.pp.rank + 1).wait()
        if mesh.pp.rank > 0:
            mesh.pp.irecv(np.empty(7), mesh.pp.rank - 1).wait()
        with comm.tracer.region("optimizer"):
            pass


def context(comm, mesh):
    """A message around cp, and a sum over dp and cp together, as training sends them."""
    mesh.cp.all_gather(np.ones(50), algorithm="ring")
    mesh.dp_cp.all_reduce(np.ones(600), algorithm="ordered")


def experts(comm, mesh):
    """Tokens to experts, and the sum of experts' gradients."""
    counts = [3 + rank for rank in range(mesh.ep.size)]
    mesh.ep.all_to_all(np.ones(sum(counts)), counts=(counts, [3 + mesh.ep.rank] * mesh.ep.size))
    mesh.edp.all_reduce(np.ones(100), algorithm="ring")


def run(tmp_path, program, **sizes):
    """(what the trace says, what each rank counted by axis: messages and bytes)"""
    path = tmp_path / "trace.json"

    def rank(comm):
        mesh = DeviceMesh(comm, **sizes)
        start_trace(comm)
        comm.traffic.reset()
        program(comm, mesh)
        counted = {axis: (comm.traffic.messages(axis=axis), comm.traffic.bytes(axis=axis)) for axis in LOOKS}
        save_chrome_trace(str(path), comm, mesh)
        return counted

    ranks = prod(size for axis, size in sizes.items() if axis != "ep")
    counted = run_local(ranks, rank, clock="model")
    return mesh_traffic(read_trace(str(path))), counted


def lines_of(figure):
    """{(axis, rank, higher rank): line} of a drawn mesh; heads of arrows are patches of their own."""
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch) and patch.get_gid()]
    named = [(patch, *patch.get_gid().split()) for patch in patches]
    return {(axis, int(low), int(high)): patch for patch, axis, low, high in named}


CASES = [
    (rings, {"pp": 2, "dp": 2, "tp": 2}),
    (rings, {"dp": 3, "tp": 2}),
    (rings, {"pp": 3, "tp": 2}),
    (context, {"dp": 2, "cp": 2, "tp": 2}),
    (experts, {"dp": 2, "cp": 2, "tp": 2, "ep": 4}),
]


@pytest.mark.parametrize(("program", "sizes"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_bytes_and_lines_are_those_that_the_ranks_counted(tmp_path, program, sizes):
    traffic, counted = run(tmp_path, program, **sizes)
    for rank in range(traffic.ranks):
        assert {axis: traffic.sent(axis, rank) for axis in LOOKS} == counted[rank]
    numbers = mesh_values(traffic)
    for axis in numbers["axes"]:
        messages, nbytes = map(sum, zip(*(each[axis] for each in counted), strict=True))
        assert (numbers["axes"][axis]["messages"], numbers["axes"][axis]["bytes"]) == (messages, nbytes)
        assert sum(link["bytes"] for link in numbers["links"] if link["axis"] == axis) == nbytes
    drawn = lines_of(plot_mesh(traffic))
    both = dict.fromkeys(((axis, min(s, d), max(s, d)) for axis, s, d in traffic.links), 0)
    for (axis, source, dest), (_, nbytes) in traffic.links.items():
        both[axis, min(source, dest), max(source, dest)] += nbytes
    assert drawn.keys() == both.keys()
    if program is rings:  # a line is as wide as its bytes
        widths = {pair: THINNEST + (WIDEST - THINNEST) * both[pair] / max(both.values()) for pair in both}
        assert {pair: line.get_linewidth() for pair, line in drawn.items()} == widths


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"dp": 8}, {"pp": 3, "tp": 2}], ids=str)
def test_bytes_are_the_closed_form_of_a_ring(tmp_path, sizes):
    traffic, _ = run(tmp_path, rings, **sizes)
    for rank in range(traffic.ranks):
        place = traffic.coordinates(rank)
        for axis, n in ELEMENTS.items():
            p = sizes.get(axis, 1)
            ring = wire_bytes("all_reduce", "ring", n, 8, p, place[axis])
            handed_on = 7 * 8 if axis == "pp" and place["pp"] + 1 < p else 0
            assert traffic.per_step(traffic.sent(axis, rank)[1]) == ring + handed_on


def test_coordinates_are_the_meshs():
    sizes = {"pp": 3, "dp": 2, "cp": 1, "tp": 2}
    traffic = MeshTraffic(sizes, 1)
    expected = run_local(12, lambda comm: DeviceMesh(comm, **sizes).coordinates)
    assert [traffic.coordinates(rank) for rank in range(12)] == expected


def test_axes_differ_in_grey_and_in_pattern():
    light = sorted(lightness(colour) for colour, _ in LOOKS.values())
    assert min(b - a for a, b in zip(light, light[1:], strict=False)) > 15
    assert len({str(dashes) for _, dashes in LOOKS.values()}) == len(LOOKS)


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


@pytest.mark.parametrize(
    ("trace", "values"),
    [
        (chrome(None, bytes=8), ["mesh"]),
        (chrome(DP2), ["bytes"]),
        (chrome(DP2, ranks=3, bytes=8), ["3 ranks", "1*2*1 = 2"]),
        (chrome(DP2, ("tp", 0, 1), bytes=8), ["tp", "rank 0", "rank 1"]),
        (chrome({"pp": 1, "dp": 128, "tp": 1}, ranks=128, bytes=8), ["128"]),
    ],
)
def test_a_trace_that_does_not_fit_is_one_line(write, tmp_path, capsys, trace, values):
    out = tmp_path / "out.png"
    assert main(["mesh", write("t.json", trace), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and not out.exists()
    assert all(value in printed.err for value in values)


def test_the_command_writes_picture_and_json(write, tmp_path, capsys):
    file, out, told = write("t.json", chrome(DP2, bytes=8)), tmp_path / "made" / "mesh.png", tmp_path / "mesh.json"
    assert main(["mesh", file, "--out", str(out), "--json", str(told)]) == 0
    assert capsys.readouterr() == (f"{out}\n{told}\n", "") and out.stat().st_size > 3000
    assert main(["mesh", file, "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers == json.loads(told.read_text()) == mesh_values(mesh_traffic(parse_trace(chrome(DP2, bytes=8))))
    assert numbers["links"] == [{"axis": "dp", "source": 0, "dest": 1, "messages": 1, "bytes": 8}]
