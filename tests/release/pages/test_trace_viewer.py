"""Claims about the site's viewer of traces: it reads, measures and colours a trace as visualize does, with ==.

node reads all traces in one process: recorded ones, and random ones.
"""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from picture_cases import chrome

from minipar.comm import ALGORITHMS, DeviceMesh, Network, run_local, save_chrome_trace, start_trace
from minipar.errors import UsageError
from visualize.arrows import tracks_with_arrows
from visualize.boxes import KINDS
from visualize.shares import rank_shares, trace_values
from visualize.style import COLOURS, at_lightness, colours, ink_on, parse_json
from visualize.timeline import COMMUNICATION, COMPUTATION, ORDER, axis_of, coordinates, parse_trace

ROOT = Path(__file__).parents[3]
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="the viewer is JavaScript, and there is no node to run it")

TINY = "--layers 2 --hidden 16 --heads 2 --seq-len 8 --global-batch 4 --steps 2 --dp 2 --pp 2 --microbatches 2"
DRAWN = 40  # random traces
NAMES = [
    ["all_gather", "forward", "0F1"],
    ["B", "W", "I", "F", "optimizer", "recv", "send"],
    ["zebra", "apple", "broadcast", "all_reduce", "forward", "constructor", "__proto__"],
    [f"region {k}" for k in range(9)],
]
EVENT = {"ph": "X", "name": "forward", "pid": 0, "tid": 0, "ts": 0, "dur": 1}
TRACK = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "computation"}}
TEXTS = [
    "",
    "{",
    "not JSON",
    "null",
    "[1, 2]",
    '{"events": []}',
    '{"traceEvents": {}}',
    '{"traceEvents": []}',
    *(
        json.dumps([TRACK, EVENT | change])
        for change in [{"ts": "0"}, {"ts": None}, {"dur": -1}, {"pid": "rank"}, {"args": None}, {"args": {"wait": "1"}}]
    ),
    json.dumps([TRACK, {"ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1}]),
    json.dumps([{"ph": "M", "name": "thread_name"}, EVENT]),
    json.dumps([TRACK | {"args": {"name": "CPU"}}, EVENT]),
    json.dumps([TRACK, EVENT, {"ph": "s", "pid": 0, "ts": 0}]),
    '[{"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 1e999, "dur": 1}]',
]
TRACE = json.dumps([TRACK, EVENT])


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site():
    """The module that records the page's examples."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        import traces
    finally:
        sys.path.pop(0)
    return traces


def collectives(comm, path):
    """Every all-reduce on four ranks of two hosts."""
    start_trace(comm)
    for algorithm in ALGORITHMS["all_reduce"]:
        comm.all_reduce(np.ones(1001, np.float32), algorithm=algorithm)
    save_chrome_trace(path, comm)


def overlap(comm, path):
    """Collectives of two axes behind computation, and messages between stages, in two steps."""
    mesh = DeviceMesh(comm, pp=2, dp=2, tp=2)
    start_trace(comm)
    for step in range(2):
        with comm.tracer.region("forward", flops=1e8 * (1 + comm.rank)):
            mesh.tp.all_reduce(np.ones(500))
        work = mesh.dp.all_reduce(np.ones(3000), algorithm="ring", async_op=True)
        if mesh.pp.rank == 0:
            mesh.pp.isend(np.ones(50), 1, tag=step).wait()
        else:
            mesh.pp.irecv(np.ones(50), 0, tag=step).wait()
        with comm.tracer.region("optimizer", flops=3e7):
            pass
        work.wait()
    save_chrome_trace(path, comm, mesh)


def hedge():
    """So many messages of dp that only those of tp can be followed."""
    events = [TRACK, EVENT]
    for tid, (axis, count) in enumerate([("dp", 299), ("tp", 2)], start=1):
        events.append(TRACK | {"tid": tid, "args": {"name": f"communication {axis}"}})
        ends = [{"pid": 0, "tid": tid, "ts": k, "id": f"{axis}{k}"} for k in range(count)]
        events += [end | {"ph": ph} for end in ends for ph in "sf"]
    return events


def random_trace(rng):
    """Slices anywhere, overlapping and nested; some without time; lanes and messages of several axes."""
    ranks = rng.sample(range(12), rng.randint(1, 4))
    tracks = ["computation", "communication dp", "communication pp, send and receive", "communication world", "other"]
    events = []
    for rank in ranks:
        for tid, name in enumerate(tracks):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        for _ in range(rng.randint(1, 30)):
            length = rng.choice([0, rng.random() * 1e4, rng.randint(0, 3)])
            start = rng.choice([rng.random() * 1e5, rng.randint(0, 5)])
            name = rng.choice(["optimizer", "forward", "1F2", "all_reduce", "(0F1;1B0)OVERLAP_F_B"])
            event = EVENT | {"pid": rank, "tid": rng.randrange(5), "name": name, "ts": start, "dur": length}
            if rng.random() < 0.5:
                event["args"] = {"wait": rng.random() * 2e-2, "bytes": rng.randint(0, 10**9)}
            events.append(event)
        for number in range(rng.randint(0, 5)):
            ends = {"tid": rng.randrange(1, 4), "id": f"{rank}.{number}"}
            sent = {"args": {"bytes": 8}} if rng.random() < 0.5 else {}
            events.append({"ph": "s", "pid": rank, "ts": rng.random() * 1e5, **ends, **sent})
            if rng.random() < 0.8:
                events.append({"ph": "f", "pid": rng.choice(ranks), "ts": rng.random() * 1e5, **ends})
    rng.shuffle(events)
    first = next(event for event in events if event["ph"] == "X")
    first["tid"] = 0  # so that there is a computation
    return rng.choice([events, {"traceEvents": events, "otherData": {"clock": "wall", "mesh": {"pp": 3, "dp": 4}}}])


@pytest.fixture(scope="module")
def traces(site, tmp_path_factory):
    """Recorded traces: collectives, overlap, a training measured; and one made by hand, and random ones."""
    found = [chrome(), json.loads(TRACE), hedge()]
    for program, ranks in ((collectives, 4), (overlap, 8)):
        path = tmp_path_factory.mktemp("trace") / "trace.json"
        run_local(ranks, program, str(path), clock="model", network=Network(1e-5, 1e-9, Network(4e-5, 5e-9), 4))
        found.append(json.loads(path.read_text()))
    found.append(site.record(site.Example("tiny", 4, TINY, measured=True)))
    rng = random.Random("traces")
    return found + [random_trace(rng) for _ in range(DRAWN)]


def spans_of(trace):
    """Stretches of time: each step, all of them, and a part of what there is."""
    slices = [one for tracks in trace.ranks.values() for track in tracks.values() for one in track]
    begin, end = min(one.start for one in slices), max(one.end for one in slices)
    steps = trace.steps()
    spans = [*steps, (begin + (end - begin) / 3, begin + 2 * (end - begin) / 3), (begin, end)]
    return [span for span in spans if span[1] > span[0]]


@pytest.fixture(scope="module")
def page(traces):
    """Return what node makes of all traces, texts and names."""
    questions = [{"data": data, "spans": spans_of(parse_trace(data))} for data in traces]
    asked = json.dumps({"traces": questions, "texts": [*TEXTS, TRACE], "names": NAMES})
    script = str(Path(__file__).with_name("traces.mjs"))
    result = subprocess.run([NODE, script], input=asked, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# ---- Python's answers ------------------------------------------------------------------------------------------------


def slices_of(trace):
    return [
        [rank, [[track, [[s.name, s.start, s.end, s.wait] for s in slices]] for track, slices in tracks.items()]]
        for rank, tracks in trace.ranks.items()
    ]


def shares_of(trace):
    return [
        [vars(rank_shares(tracks, begin, end)) for tracks in trace.ranks.values()] for begin, end in spans_of(trace)
    ]


def rows_of(trace):
    """The rows of a rank as plot_timeline orders them."""
    lanes = {track for tracks in trace.ranks.values() for track in tracks if track.startswith(COMMUNICATION)}
    order = {axis: place for place, axis in enumerate(ORDER)}
    return [COMPUTATION, *sorted(lanes, key=lambda track: (order.get(axis_of(track), len(ORDER)), track))]


def test_a_trace_is_read_as_python_reads_it(page, traces):
    for data, answer in zip(traces, page["traces"], strict=True):
        trace = parse_trace(data)
        assert answer["ranks"] == slices_of(trace)
        assert answer["messages"] == [list(message) for message in trace.messages]
        assert (answer["clock"], answer["mesh"]) == (trace.clock, trace.mesh)
        assert answer["steps"] == [list(step) for step in trace.steps()]


def test_shares_are_those_of_python(page, traces):
    count = 0
    for data, answer in zip(traces, page["traces"], strict=True):
        shares = shares_of(parse_trace(data))
        assert answer["shares"] == shares
        count += sum(0 < each[kind] < 1 for span in shares for each in span for kind in each)
    assert count > 500


def test_the_command_prints_the_shares_of_the_page(page, traces):
    data, answer = traces[-DRAWN - 1], page["traces"][-DRAWN - 1]  # the training
    trace = parse_trace(data)
    for number, (begin, end) in enumerate(trace.steps()):
        values = trace_values(trace, slice(number, number + 1))
        assert values["shown"] == [begin, end]
        assert list(values["ranks"].values()) == answer["shares"][number]


def test_rows_places_and_arrows_are_those_of_the_picture(page, traces):
    for data, answer in zip(traces, page["traces"], strict=True):
        trace = parse_trace(data)
        sizes = {axis for axis, size in trace.mesh.items() if size > 1}
        places = [coordinates(trace.mesh, rank) for rank in trace.ranks]
        assert answer["places"] == [{axis: at for axis, at in each.items() if axis in sizes} for each in places]
        assert answer["rows"] == rows_of(trace)
        assert answer["arrows"] == tracks_with_arrows(trace.messages)
    assert any(len(answer["arrows"]) > 1 for answer in page["traces"])


def test_a_file_that_is_no_trace_is_one_line(page):
    *refusals, accepted = page["texts"]
    assert accepted == ""
    for text, line in zip(TEXTS, refusals, strict=True):
        with pytest.raises(UsageError):
            parse_trace(parse_json(text, "the file"), "the file")
        assert re.fullmatch(r"the file (is not JSON|has).*", line), (text, line)
        assert ("not a" in line or "no trace" in line) and len(line) < 140


def test_colours_and_names_are_those_of_the_pictures(page):
    assert list(page["NAMED"].items()) == list(COLOURS.items())
    assert page["PHASES"] == KINDS
    assert page["names"] == [colours(names) for names in NAMES]
    assert page["edges"] == [at_lightness(colour, 55) for colour in COLOURS.values()]
    assert page["inks"] == [ink_on(colour) for colour in COLOURS.values()]


# ---- the examples ----------------------------------------------------------------------------------------------------


def test_the_demo_of_the_page_is_the_demo_of_make(site):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    flags = dict(re.findall(r"^(MESH|DEMO) [?:]= (.*)$", makefile, re.MULTILINE))
    demo = f"{flags['DEMO']} {flags['MESH']}".replace("$(MESH)", "").replace("--data out/demo.txt", "")

    def named(text):
        return {tuple(flag.split()) for flag in re.split(r" (?=--)", f" {text}")} - {()}

    assert [name for name, example in site.EXAMPLES.items() if example.measured] == ["demo"]
    assert named(site.EXAMPLES["demo"].flags) == named(demo) | {("--steps", "2")}
    network = re.search(r"--network (\S+) (\S+)", makefile)
    assert tuple(map(float, network.groups())) == site.NETWORK
