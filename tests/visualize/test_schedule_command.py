"""The command `visualize schedule`: closed forms as JSON, CSV files, pictures, and one line for each mistake."""

import json

import pytest
from picture_commands import told

from minipar.parallel.pipeline.schedule_file import load_csv
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize.__main__ import main


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


def test_json_has_the_times_it_was_made_with(capsys):
    size = ["--schedule", "1f1b", "--stages", 2, "--microbatches", 2]
    none = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "comm": 0.0}
    assert told(capsys, *size)["times"] == none
    times = ["--forward", "1/4", "--backward-input", 2, "--backward-weight", 3, "--comm", 0.5]
    given = {"forward": 0.25, "backward_input": 2.0, "backward_weight": 3.0, "comm": 0.5}
    assert told(capsys, *size, *times)["times"] == given


SEND_FIRST = """0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""


def test_channels_in_order_deadlock_or_have_a_cost(capsys, tmp_path):
    path = tmp_path / "crossing.csv"
    path.write_text(SEND_FIRST)
    for channel in ("rank", "pair"):
        assert main(["schedule", "--schedule", str(path), "--in-order", channel, "--json", "-"]) == 2
        assert "one channel per " + channel in capsys.readouterr().err
    got = told(capsys, "--schedule", path, "--in-order", "direction", "--comm", "1")
    # 1RECV_F1 is posted after 1B0, which ends at 5. So 1F1 begins at 6.
    assert (got["in_order"], got["in_order_cost"], got["makespan"]) == ("direction", 1, 12)
    size = ["--schedule", "interleaved-1f1b", "--stages", 4, "--microbatches", 8, "--comm", "1/4"]
    free, one = told(capsys, *size), told(capsys, *size, "--in-order", "rank")
    assert one["in_order_cost"] == one["makespan"] - free["makespan"] > 0 and "in_order" not in free
    assert one["bubble_fraction"] > free["bubble_fraction"]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_command_draws_and_says_what_it_wrote(capsys, tmp_path, suffix):
    out, numbers = tmp_path / "new" / f"s.{suffix}", tmp_path / "s.json"
    size = ["--schedule", "zbv", "--stages", "2", "--microbatches", "3"]
    assert main(["schedule", *size, "--out", str(out), "--json", str(numbers)]) == 0
    assert capsys.readouterr() == (f"{out}\n{numbers}\n", "")
    assert out.stat().st_size > 3000 and json.loads(numbers.read_text())["schedule"] == "zbv"
    assert told(capsys, *size, "--out", str(out)) == json.loads(numbers.read_text()), "and nothing beside it"


GOOD = "0F0,,,0B0\n,1F0,1B0,\n"


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n", "\r\n\r\n", "\n\n\n\n\n\n\n\n"])
def test_blank_lines_at_a_files_end_are_no_ranks(capsys, tmp_path, end):
    path = tmp_path / "own.csv"
    path.write_text(GOOD.rstrip("\n") + end)
    assert load_csv(path).ranks == make("1f1b", 2, 1).ranks
    assert told(capsys, "--schedule", path)["stages"] == 2


def chain(ranks):
    """A file of so many ranks, in which one microbatch goes down and comes back."""
    return "".join(f"{rank}F0,{rank}B0\n" for rank in range(ranks))


def test_1024_ranks_are_shown_and_one_more_is_refused(capsys, tmp_path):
    path = tmp_path / "many.csv"
    path.write_text(chain(1024))
    assert told(capsys, "--schedule", path)["stages"] == 1024
    path.write_text(chain(1025))
    named = ["--schedule", "1f1b", "--stages", "1025", "--microbatches", "1"]
    for arguments, line in (
        (["--schedule", str(path)], "1025 ranks, one per line: more than 1024 cannot be shown"),
        (named, "--stages 1025: more than 1024 ranks cannot be shown"),
    ):
        assert main(["schedule", *arguments, "--json", "-"]) == 2
        assert line in capsys.readouterr().err
    assert told(capsys, *named[:3], "1024", *named[4:])["stages"] == 1024


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
        (["--schedule", "{csv}", "--in-order", "link", "--json", "-"], "invalid choice: 'link' (choose from"),
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
        (["--schedule", "1f1b", "--stages=1000", "--microbatches=99999", "--json=-"], "more than can be shown"),
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
