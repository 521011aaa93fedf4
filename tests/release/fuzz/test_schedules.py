"""Schedules as CSV files, and the flags of a schedule's picture."""

from __future__ import annotations

import pytest
from fuzz.harness import Worker, problems
from fuzz.strategies import cases, command_lines, damaged, names, or_no_file
from fuzz.test_visualize import MAIN, WARM, named_outputs
from fuzz.worker import Case
from hypothesis import strategies as st

SCHEDULES = [
    "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n",
    "0F0,,0B0\n",
    "0F0,0F1,,,0I0,0W0,0I1,0W1\n,1F0,1F1,1I0,1W0,1I1,1W1\n",
    "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n",
    "0F0,0F1,,0B0,,,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,,,1B1\n",
]
CELLS = [
    "", " ", "0F0", "1B1", "9F9", "0F", "F0", "0X0", "-1F0", "٣F0", "0f0", "0F0 ", '"0F0"', '"', "999999999F0",
    "0F999999999", "1234567890F0", "0UNSHARD", "0RESHARD", "0REDUCE_GRAD", "0SEND_F0", "1RECV_B0", "0F0;0F1",
    "(1F1;1B0)OVERLAP_F_B", "(0F1;1B0)OVERLAP_F_B", "(0F0;0F0)OVERLAP_F_B", "(0F0;)OVERLAP_F_B",
    "\x1b[31m", "x" * 200_000, "\0",
]  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn) -> bytes:
    """A valid schedule with cells replaced, added, moved or removed, and rows repeated, moved or removed."""
    rows = [row.split(",") for row in draw(st.sampled_from(SCHEDULES)).splitlines()]
    for _ in range(draw(st.integers(0, 4))):
        if not rows:
            break
        row = draw(st.integers(0, len(rows) - 1))
        kind = draw(st.sampled_from(("cell", "cell", "insert", "delete", "swap", "row", "no row", "move")))
        cells = rows[row]
        place = draw(st.integers(0, max(0, len(cells) - 1)))
        if kind == "insert":
            cells.insert(place, draw(st.sampled_from(CELLS)))
        elif kind == "row":
            rows.insert(row, list(cells))
        elif kind == "no row":
            del rows[row]
        elif kind == "move":
            rows.append(rows.pop(row))
        elif not cells:
            continue
        elif kind == "cell":
            cells[place] = draw(st.sampled_from(CELLS))
        elif kind == "delete":
            del cells[place]
        else:
            cells[place], cells[0] = cells[0], cells[place]
    return "".join(",".join(row) + "\n" for row in rows).encode()


LARGE = [
    (",".join(f"0F{m}" for m in range(60_000)) + "," + ",".join(f"0B{m}" for m in range(60_000))).encode(),
    "".join(f"{rank}F0,{rank}B0\n" for rank in range(60_000)).encode(),
    b"," * 3_000_000 + b"0F0,0B0\n",
    b"\n" * 3_000_000 + b"0F0,0B0\n",
    ("0F0" + "0" * 9_000_000).encode(),
    ",".join(f"0F{m},0B{m}" for m in range(2000)).encode(),
    "".join(f"{rank}F0,{rank}B0\n" for rank in range(300)).encode(),
]


def schedule_case(name: str, content: bytes | str, extra: str) -> Case:
    out = {"--json": "-", "--csv": "o.csv", "--out": "o.svg"}[extra]
    return Case(("schedule", "--schedule", name, extra, out), {name: content}, outputs=(out,))


EXTRA = st.sampled_from(["--json"] * 20 + ["--csv"] * 5 + ["--out"])  # a picture takes longest


def test_a_csv_is_simulated_or_refused(fuzzed):
    contents = or_no_file(schedules().flatmap(damaged))
    strategy = cases(schedule_case, name=names(".csv") | names(), content=contents, extra=EXTRA)
    count = fuzzed(MAIN, strategy, share=0.18, warm=WARM)
    assert 0 < count.succeeded < count.cases


@pytest.mark.parametrize("content", LARGE, ids=range(len(LARGE)))
def test_a_large_csv_ends_in_time(content):
    case = schedule_case("a.csv", content, "--json")
    with Worker(MAIN, WARM) as worker:
        assert problems(case, worker.outcome(case)) == []


NAMES = ["naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"]
FLAGS = {
    "--schedule": [*NAMES, "file.csv", "fifo.csv", "directory", "directory.csv", "/dev/zero", "missing.csv"],
    "--stages": ["1", "2", "4", "7", "300", "100000"],
    "--microbatches": ["1", "2", "8", "9", "300", "100000"],
    "--virtual-stages": ["1", "2", "3", "100000"],
    "--forward": ["2", "0", "0.601", "1/3", "999999999999/7", ".5"],
    "--backward-input": ["2", "0", "0.601"],
    "--backward-weight": ["2", "0", "1/999999999999"],
    "--comm": ["1", "1/3", "999999999999"],
    "--json": ["-", "o.json", "/dev/full", "directory"],
    "--csv": ["o.csv", "/dev/full", "directory", "o.json"],
}
VALID = {"": ["schedule"], "--schedule": ["1f1b"], "--stages": ["2"], "--microbatches": ["4"], "--json": ["-"]}


def flags_case(argv: tuple[str, ...], draws: bool) -> Case:
    argv = (*argv, "--out", "o.svg") if draws else argv
    made = {"file.csv": SCHEDULES[0].encode(), "fifo.csv": "fifo", "directory": "directory"}
    return Case(argv, made | {"directory.csv": "directory"}, outputs=named_outputs(argv))


def test_flags_of_a_schedule_are_taken_or_refused(fuzzed):
    lines = command_lines(VALID, FLAGS, most=4)
    draws = st.integers(0, 29).map(lambda n: n == 29)
    count = fuzzed(MAIN, cases(flags_case, argv=lines, draws=draws), share=0.06, warm=WARM)
    assert 0 < count.succeeded < count.cases
