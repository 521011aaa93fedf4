"""Claims about what a file may say: each number has its least value, and a file with a smaller one is refused."""

import json
import math

import pytest
from picture_cases import bench_rows, chrome, slice_event
from picture_text import layouts, search

from minipar.errors import UsageError
from visualize import parse_trace, read_comparison, read_layouts, style
from visualize.__main__ import main
from visualize.measurements import read_bench
from visualize.plan import read_plan


def changed(data, value, *keys):
    """Copy JSON data, with another value at a place."""
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return copy


PLACES_FROM_0 = [
    ("plans", 0, "seconds", "bubble"),
    ("plans", 0, "seconds", "total"),
    ("plans", 0, "seconds", "cp"),
    ("plans", 0, "seconds", "ep"),
    ("plans", 0, "memory_bytes", "buffers"),
    ("plans", 0, "mfu"),
    ("plans", 0, "zero_stage"),
    ("meshes", 0, "seconds"),
    ("meshes", 0, "memory_bytes"),
    ("assumptions", "memory_used"),
]
PLACES_FROM_1 = [
    ("plans", 0, "tp"),
    ("plans", 0, "cp"),
    ("plans", 0, "etp"),
    ("plans", 0, "zero_replicas"),
    ("meshes", 0, "dp"),
    ("gpu", "memory"),
    ("gpus",),
    ("global_batch",),
    ("seq_len",),
]


@pytest.mark.parametrize("place", [*PLACES_FROM_0, *PLACES_FROM_1], ids=str)
def test_a_plan_has_no_number_below_its_least(write, place):
    least = 1 if place in PLACES_FROM_1 else 0
    good = changed(search(), least, *place)
    assert read_plan(write("good.json", good)) == good
    for wrong in (least - 0.5, "1", True):
        with pytest.raises(UsageError, match="was not written by minipar.plan --json"):
            read_plan(write("bad.json", changed(search(), wrong, *place)))


@pytest.mark.parametrize("place", [("gpu", "name"), ("model", "name"), ("plans",)], ids=str)
def test_a_plan_without_names_or_plans_is_refused(write, place):
    empty = [] if place == ("plans",) else ""
    with pytest.raises(UsageError, match="was not written by minipar.plan --json"):
        read_plan(write("bad.json", changed(search(), empty, *place)))


def test_a_layout_measured_once_is_read(write):
    """Its times are all equal. The least value is 1e-9, since the axes are logarithmic."""
    row = layouts()[0] | dict.fromkeys(("seconds_min", "seconds", "seconds_max"), 0.5)
    row |= {"predicted_seconds": 1e-9}
    assert read_layouts(write("rows.json", [row])) == [row]
    for wrong in ({"predicted_bytes": 0}, {"seconds_max": 0.4}, {"seconds_min": 0.6}):
        with pytest.raises(UsageError, match="bench layouts"):
            read_layouts(write("bad.json", [row | wrong]))


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([], "is not a list of rows: not written by minipar.bench collectives"),
        ({"op": "x"}, "is not a list of rows: not written by minipar.bench collectives"),
        ([7], "row 0 lacks op, algorithm, ranks, bytes, seconds, mpi_seconds, wire_bytes, wire_bytes_expected: not"),
        ([bench_rows()[0], bench_rows()[1] | {"wire_bytes": "many"}], "row 1: 'many' is not a number: not"),
        ([bench_rows()[0] | {"seconds": None}], "row 0: None is not a number: not"),
        ([bench_rows()[0] | {"bytes": -1}], "row 0: -1 is not between 0 and 1e+18: not"),
        ([bench_rows()[0] | {"algorithm": 7}], "row 0: op and algorithm are not texts: not"),
    ],
)
def test_a_benchmark_says_which_row_is_wrong(write, rows, line):
    with pytest.raises(UsageError) as raised:
        read_bench(write("bench.json", rows))
    assert line in str(raised.value)


def test_a_comparison_is_read_in_the_order_of_its_steps(write):
    ratios = {"a": 0.5, "b": 1}
    read = read_comparison(write("c.json", {"ratios": {"10": ratios, "9": ratios}}))
    assert list(read) == [9, 10] and list(read[9]) == ["a", "b"]


def test_a_ratio_may_be_infinite_undefined_or_missing(write):
    """JSON has texts for the numbers that it lacks."""
    ratios = {"a": 0.5, "b": "Infinity", "c": "NaN", "d": None, "e": 0, "f": 1}
    read = read_comparison(write("c.json", {"ratios": {"10": ratios}}))[10]
    assert list(read) == list("abcdef")
    assert math.isnan(read.pop("c"))
    assert read == {"a": 0.5, "b": math.inf, "d": None, "e": 0.0, "f": 1.0}


@pytest.mark.parametrize(
    ("ratio", "said"), [("much", "'much' is not a number"), (-1, "-1 is not between 0 and 1e+18"), ([], "[] is not a")]
)
def test_a_comparison_says_which_value_is_no_ratio(write, ratio, said):
    with pytest.raises(UsageError) as raised:
        read_comparison(write("c.json", {"ratios": {"0": {"a": ratio}}}))
    assert said in str(raised.value) and str(raised.value).endswith("not written by minipar.compare --json")


def test_a_number_is_from_its_least_to_1e18():
    assert [style.number(value) for value in (-1e18, 0, 1e18)] == [-1e18, 0.0, 1e18]
    assert style.number(3, 3) == 3.0
    for value in (-1.5e18, 1.5e18, float("nan")):
        with pytest.raises(ValueError, match=r"is not between -1e\+18 and 1e\+18"):
            style.number(value)


@pytest.mark.parametrize("value", [True, "1", None])
def test_a_truth_value_a_text_and_none_are_no_numbers(value):
    with pytest.raises(TypeError, match="is not a number"):
        style.number(value)


def test_a_message_of_no_bytes_and_a_slice_of_no_time_are_read():
    data = chrome(ranks=2, steps=1)
    data["traceEvents"].append(slice_event("barrier", 0, 1, 9, 0, wait=0))
    for event in data["traceEvents"]:
        if event["ph"] == "s":
            event["args"] = {"bytes": 0}
    trace = parse_trace(data)
    assert [message.nbytes for message in trace.messages] == [0, 0]
    last = trace.ranks[0]["communication dp"][-1]
    assert (last.name, last.start, last.end, last.wait) == ("barrier", 9.0, 9.0, 0.0)


def test_a_trace_in_which_nothing_takes_time_is_refused(write, capsys):
    events = [event for event in chrome(ranks=1, steps=1)["traceEvents"] if event["ph"] == "M"]
    path = write("t.json", [*events, slice_event("forward", 0, 0, 1, 0)])
    assert main(["trace", path, "--out", "x.png"]) == 2
    assert capsys.readouterr().err == "visualize: error: the trace holds nothing that took time\n"


# ---- files that cannot be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "announced"), [(2**24 - 1, False), (2**24, True)])
def test_a_file_of_16_mib_is_announced_and_a_smaller_one_is_not(size, announced, tmp_path, capsys):
    path = tmp_path / "long.json"
    with open(path, "wb") as file:
        file.truncate(size)  # nothing is written, so that the file takes no space
    assert len(style.read_text(str(path))) == size
    said = f"visualize: reading 17 MB from {path}, which can take minutes\n" if announced else ""
    assert capsys.readouterr().err == said


def test_a_file_may_have_just_as_many_bytes_as_are_allowed(write):
    path = write("three", "abc")
    style.check_file(path, 3)
    with pytest.raises(UsageError) as raised:
        style.check_file(path, 2, "; write less")
    assert str(raised.value) == f"{path} cannot be read: 3 bytes are more than 2; write less"


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError) as raised:
        style.read_json(str(path))
    assert str(raised.value) == f"{path} is not a text file"


def test_a_file_that_a_broken_disk_holds_is_refused(write, monkeypatch):
    path = write("x.json", "{}")

    def read_text(self, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_text", read_text)
    with pytest.raises(UsageError) as raised:
        style.read_json(path)
    assert str(raised.value) == f"{path} cannot be read: Input/output error"
