"""The Chrome trace: it loads, slices nest on every track, and every arrow has both ends."""

import collections
import json

import numpy as np
import pytest

from minipar.comm import DeviceMesh, Network, run_local, save_chrome_trace, start_trace

ROUNDING = 1e-6  # microseconds: ts and dur are sums of floating-point numbers


def program(comm, path):
    mesh = DeviceMesh(comm, dp=2, tp=2)
    start_trace(comm)
    with comm.tracer.region("step"):
        with comm.tracer.region("forward", flops=1e9):
            mesh.tp.all_reduce(np.ones(1000))
        works = [mesh.dp.all_reduce(np.ones(1000), algorithm="ring", async_op=True) for _ in range(3)]
        with comm.tracer.region("backward", flops=2e9):
            for tag in (3, 3, 4):
                peer = 1 - mesh.tp.rank
                out = mesh.tp.isend(np.ones(5), peer, tag)
                mesh.tp.irecv(np.ones(5), peer, tag).wait()
                out.wait()
        for work in works:
            work.wait()
        mesh.tp.barrier()
    save_chrome_trace(path, comm)


@pytest.fixture(params=["wall", "cpu", "model"])
def trace(request, tmp_path):
    path = tmp_path / "trace.json"
    network = None if request.param == "wall" else Network(1e-5, 1e-9)
    run_local(4, program, str(path), clock=request.param, network=network)
    return json.loads(path.read_text())


def tracks(trace):
    slices = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    return slices


def test_processes_are_ranks_and_tracks_have_names(trace):
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {pid for pid, _ in names} == {0, 1, 2, 3}
    assert set(names.values()) == {
        "computation", "communication dp", "communication tp", "communication tp, send and receive"
    }  # fmt: skip
    assert set(tracks(trace)) == set(names)
    expected = {"computation": {"step", "forward", "backward"}, "communication dp": {"all_reduce"}}
    for track, slices in tracks(trace).items():
        if names[track] in expected:
            assert {event["name"] for event in slices} == expected[names[track]]


def test_slices_on_one_track_nest(trace):
    for slices in tracks(trace).values():
        stack = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while stack and stack[-1] <= event["ts"] + ROUNDING:
                stack.pop()
            assert event["dur"] >= 0
            assert not stack or end <= stack[-1] + ROUNDING
            stack.append(end)


def test_every_arrow_joins_slices_of_two_ranks(trace):
    ends = collections.defaultdict(dict)
    slices = tracks(trace)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
            around = slices[event["pid"], event["tid"]]
            assert any(s["ts"] - ROUNDING <= event["ts"] <= s["ts"] + s["dur"] + ROUNDING for s in around)
    assert len(ends) == 4 * (1 + 3 * 2 + 3 + 1)  # per rank: doubling, three rings of two steps, three sends, a barrier
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert pair["s"]["pid"] != pair["f"]["pid"]
        if trace["otherData"]["clock"] != "wall":  # a logical clock never lets a message arrive before it is sent
            assert pair["s"]["ts"] < pair["f"]["ts"]


def test_communication_slices_carry_their_bytes(trace):
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "communication"]
    rings = [e["args"] for e in slices if e["args"]["algorithm"] == "ring"]
    assert len(rings) == 12
    assert all(e["bytes"] == 8000 and e["wait"] >= 0 for e in rings)


def test_a_slices_wait_is_the_time_its_sender_was_late(tmp_path):
    def late(comm):
        start_trace(comm)
        comm.clock.advance(5.0 * comm.rank)
        comm.broadcast(np.zeros(8, np.uint8), root=1)
        save_chrome_trace(str(tmp_path / "trace.json"), comm)

    run_local(2, late, clock="model", network=Network(1.0, 0.125))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {e["pid"]: (e["dur"], e["args"]["wait"]) for e in events if e["ph"] == "X"}
    assert slices == {0: (7e6, 5.0), 1: (0.0, 0.0)}


def test_a_trace_lasts_from_its_start_until_it_is_saved(tmp_path):
    def program(comm):
        def region(name):
            with comm.tracer.region(name):
                comm.all_reduce(np.ones(3))

        region("before")
        for name in ("first", "second"):
            start_trace(comm)
            region(name)
            save_chrome_trace(str(tmp_path / name), comm)
            region("after")
        save_chrome_trace(str(tmp_path / "again"), comm)

    run_local(2, program, clock="model")
    for name, expected in {"first": "first", "second": "second", "again": "second"}.items():
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        slices = [event["name"] for event in events if event["ph"] == "X"]
        assert sorted(slices) == sorted([expected, "all_reduce"] * 2)
