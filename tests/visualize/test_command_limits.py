"""The command's flags that are required or have a default, and the most that it shows of a schedule."""

import json

import pytest
from picture_cases import bench_rows, chrome, rows
from picture_commands import failure, told

from visualize import __main__ as command
from visualize import style
from visualize.__main__ import main


def test_a_command_and_its_picture_are_required(write, capsys):
    assert "the following arguments are required: trace|mesh|loss|" in failure(capsys)
    assert "the following arguments are required: --out" in failure(capsys, "loss", write("m", "x"))
    assert "the following arguments are required: --out" in failure(capsys, "plan", write("p", "x"))
    assert "the following arguments are required: --out" in failure(capsys, "gallery")


def test_flags_are_not_abbreviated(capsys):
    assert "--vers" in failure(capsys, "--vers", "gallery", "--out", "x")


def test_the_help_calls_the_command_by_its_name(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: minipar visualize [-h] [--version]\n")


def test_a_level_has_a_name_and_a_dollar_is_a_dollar(write, drawn):
    metrics = write("a$x$.jsonl", "".join(json.dumps(row) + "\n" for row in rows([3.0, 2.0])))
    assert main(["loss", metrics, metrics, "--reference", "1.5", "--out", "x.png"]) == 0
    texts = drawn[0].axes[0].get_legend().get_texts()
    assert texts[-1].get_text() == "reference 1.500" and "a$x$.jsonl: every" in texts[0].get_text()
    assert not any(text.get_parse_math() for text in texts)


def test_a_trace_is_drawn_or_its_values_are_written(write, tmp_path, drawn, capsys):
    trace = write("t.json", chrome())
    values = str(tmp_path / "values.json")
    assert main(["trace", trace, "--out", "x.png", "--json", values]) == 0
    assert capsys.readouterr() == (f"x.png\n{values}\n", "") and len(drawn) == 1
    assert main(["trace", trace, "--json", values]) == 0
    assert capsys.readouterr() == (f"{values}\n", "") and len(drawn) == 1


def test_the_command_prints_the_path_of_its_picture(write, drawn, capsys):
    assert main(["traffic", write("b.json", bench_rows()), "--out", "b.png"]) == 0
    assert capsys.readouterr() == ("b.png\n", "") and len(drawn) == 1


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [[], ["--stages", 2], ["--microbatches", 2]], ids=str)
def test_a_named_schedule_needs_both_sizes(capsys, size):
    line = failure(capsys, "schedule", "--schedule", "gpipe", *size, "--json", "-")
    assert line == "--schedule gpipe needs --stages P and --microbatches M"


def test_a_schedule_may_take_less_than_one_unit_of_time(capsys):
    size = ["--schedule", "gpipe", "--stages", 1, "--microbatches", 2]
    short = ["--forward", 0, "--backward-input", "1/8", "--backward-weight", ".125"]
    assert told(capsys, *size, *short)["makespan"] == 0.5


def test_as_many_actions_are_shown_as_the_limit_says(capsys, monkeypatch):
    """Before a schedule is made, its actions are reckoned with two stages per rank, unless the flag says how many."""
    monkeypatch.setattr(command, "MOST", 16)
    size = ["--schedule", "gpipe", "--stages", 1, "--microbatches"]
    assert told(capsys, *size, 8)["microbatches"] == 8
    line = "--schedule gpipe: stages*microbatches = 1*9: more than can be shown"
    assert failure(capsys, "schedule", *size, 9, "--json", "-") == line
    assert told(capsys, *size, 8, "--virtual-stages", 1)["microbatches"] == 8
    line = "--schedule gpipe: 18 actions: more than 16 cannot be shown"
    assert failure(capsys, "schedule", *size, 9, "--virtual-stages", 1, "--json", "-") == line


def test_a_file_is_refused_for_the_numbers_of_its_microbatches(write, capsys, monkeypatch):
    """Two actions may name a microbatch of a high number. The actions that are missing are not listed then."""
    monkeypatch.setattr(command, "MOST", 16)
    text = "0F{0},0B{0}\n1F{0},1B{0}\n"
    path = write("few.csv", text.format(7))
    assert "is missing" in failure(capsys, "schedule", "--schedule", path, "--json", "-")
    path = write("few.csv", text.format(8))
    line = f"{path}: stages*microbatches = 18: more than 16 cannot be shown"
    assert failure(capsys, "schedule", "--schedule", path, "--json", "-") == line


def test_a_schedule_file_may_have_any_name(write, capsys):
    for name in ("own.txt", "own.CSV"):
        assert told(capsys, "--schedule", write(name, "0F0,0B0\n"))["stages"] == 1


def test_a_picture_is_written_into_new_directories(tmp_path):
    path = tmp_path / "new" / "newer" / "x.png"
    for _ in range(2):
        style.save(style.picture(2.0, 1.0), str(path))
    assert path.stat().st_size > 0
