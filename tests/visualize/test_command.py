"""The command: it writes a picture, and a file that says something else is one clear line and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from picture_cases import bench_rows, chrome, rows, slice_event

from minipar.errors import UsageError
from visualize import plot_loss, read_metrics, save
from visualize.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("suffix", ["png", *(pytest.param(each, marks=pytest.mark.long) for each in ("svg", "pdf"))])
def test_the_command_writes_the_picture(write, tmp_path, suffix, capsys):
    metrics = write("m.jsonl", "".join(json.dumps(row) + "\n" for row in rows([3, 2, 1])))
    jobs = [
        ["trace", write("t.json", chrome(ranks=8)), "--steps", "0:2", "--arrows"],
        ["loss", metrics, metrics, "--reference", "2"],
        ["traffic", write("b.json", bench_rows())],
    ]
    for number, job in enumerate(jobs):
        out = tmp_path / "made" / f"{number}.{suffix}"
        assert main([*job, "--out", str(out)]) == 0
        assert out.stat().st_size > 3000
        assert capsys.readouterr() == (f"{out}\n", "")


@pytest.mark.parametrize(
    ("command", "content", "line"),
    [
        ("trace", None, "cannot be read: No such file or directory"),
        ("trace", "", "is not JSON: Expecting value in line 1, column 1"),
        ("trace", "{", "is not JSON"),
        ("trace", "[1, 2]", "has no list of traceEvents: not a Chrome trace"),
        ("trace", {"events": []}, "has no list of traceEvents: not a Chrome trace"),
        ("trace", {"traceEvents": []}, "has no computation or communication track: not a trace of minipar"),
        ("trace", [{"ph": "X", "name": "f", "pid": 1, "tid": 1, "ts": 0, "dur": 1}], "not a trace of minipar"),
        ("trace", [{"ph": "X", "name": "f"}], "has an event without its fields ('pid'): not a trace of minipar"),
        ("loss", None, "cannot be read"),
        ("loss", "", "holds no steps"),
        ("loss", '{"step": 0, "loss": 1.0}\nbroken\n', "line 2 is not JSON"),
        ("loss", '{"step": 0}\n', "line 1 has no step and loss: not written by minipar.train --metrics"),
        ("loss", "[]\n", "line 1 has no step and loss"),
        ("traffic", {}, "is not a list of rows: not written by minipar.bench collectives"),
        ("traffic", [{"op": "x"}], "row 0 lacks algorithm, ranks, bytes"),
        ("traffic", [bench_rows()[3]], "holds no operation on an array of one byte or more"),
        ("traffic", [bench_rows()[0] | {"seconds": [1]}], "row 0: [1] is not a number"),
        ("traffic", [bench_rows()[0] | {"op": {}}], "row 0: op and algorithm are not texts"),
        ("trace", "[" * 100_000, "is not JSON that can be read: nested too deep"),
        ("trace", "9" * 5000, "is not JSON that can be read: an integer of thousands of digits"),
        ("trace", {"traceEvents": [slice_event("f", 0, 0, 1, 2) | {"dur": "2"}]}, "has an event without its fields"),
        ("loss", '{"step": {}, "loss": 1.0}\n', "line 1 has no step and loss"),
        ("loss", '{"step": 0, "loss": 1e999}\n', "line 1 has no step and loss"),
        ("plan", {"plans": [{"mfu": "much"}], "meshes": []}, "was not written by minipar.plan --json"),
        ("layouts", [{"dp": 1}], "was not written by minipar.bench layouts"),
    ],
)
def test_another_file_is_one_line_and_exit_code_2(write, tmp_path, capsys, command, content, line):
    path = str(tmp_path / "missing") if content is None else write("file", content)
    out = tmp_path / "out.png"
    assert main([command, path, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("visualize: error: ") and printed.err.count("\n") == 1
    assert line in printed.err and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--out", "x.gif"], "--out x.gif: the name must end in .png, .svg, .pdf"),
        (["--out", "{file}/x.png"], "cannot be written"),
        (["--out", "x.png", "--steps", "3"], "argument --steps: invalid A:B value: '3'"),
        (["--out", "x.png", "--steps", "7:"], "--steps chooses none of the trace's 3 steps (0 to 2)"),
        ([], "nothing to do: give --out FIG or --json FILE"),
        (["--json", "{file}/x.json"], "cannot be written: Not a directory"),
        (["--out", "x.png", "--arr"], "unrecognized arguments: --arr"),
        (["--out", "x.png", "--stps", "3:"], "unrecognized arguments: --stps 3:; did you mean --steps?"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(write, capsys, arguments, line):
    path = write("t.json", chrome())
    assert main(["trace", path, *(text.format(file=path) for text in arguments)]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("command", [["trace"], ["loss"], ["memory"], ["schedule", "--schedule"]])
def test_a_pipe_or_a_device_is_refused_before_it_is_read(tmp_path, capsys, command):
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (str(tmp_path / "pipe.csv"), "/dev/zero", str(tmp_path)):
        arguments = [*command, path, "--out", str(tmp_path / "x.png")]
        assert main(arguments) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and ("not a regular file" in line or "choose from" in line)


def test_a_path_cannot_change_what_the_terminal_shows(tmp_path, capsys):
    assert main(["trace", "no\nsuch\x1b[31mfile", "--out", "x.png"]) == 2
    expected = "visualize: error: no\\nsuch\\x1b[31mfile cannot be read: No such file or directory\n"
    assert capsys.readouterr().err == expected
    (tmp_path / "_a\nb.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    out = str(tmp_path / "c\nd.png")
    assert main(["loss", str(tmp_path / "_a\nb.jsonl"), "--out", out]) == 0
    assert capsys.readouterr() == (out.replace("\n", "\\n") + "\n", ""), "no warning of a label hidden"


def test_half_a_character_in_a_name_or_file_is_no_picture(tmp_path, capsys):
    rows = tmp_path / "\udcff.jsonl"
    rows.write_text('{"step": 0, "loss": 1.0}\n')
    label = ["--reference", "1", "--reference-label", "\udcff"]
    assert main(["loss", str(rows), "--out", str(tmp_path / "x.png"), *label]) == 0
    (tmp_path / "\udcff.csv").write_text("0F0,0B0\n")
    assert main(["schedule", "--schedule", str(tmp_path / "\udcff.csv"), "--out", str(tmp_path / "x.svg")]) == 0
    capsys.readouterr()
    rows.write_text(r'{"step": 0, "loss": 1.0, "\udcff": 1}')
    assert main(["loss", str(rows), "--out", str(tmp_path / "x.png")]) == 2
    assert "is not JSON that can be read: surrogates not allowed" in capsys.readouterr().err


@pytest.mark.parametrize("end", [["--json", "-"], ["--help"]])
def test_a_full_standard_output_is_one_line(end):
    flags = ["--schedule", "gpipe", "--stages", "2", "--microbatches", "2", *end]
    command = [sys.executable, "-m", "visualize", "schedule", *flags]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    error = "visualize: error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, error)


@pytest.mark.parametrize("arguments", [["--json", "-"], ["--csv", "/dev/stdout"], ["--json", "/dev/stdout"]])
def test_a_reader_that_has_gone_needs_no_message(arguments):
    flags = ["--schedule", "gpipe", "--stages", "2", "--microbatches", "2", *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "visualize", "schedule", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("flag", ["--json", "--csv", "--out"])
def test_a_full_disk_is_one_line(tmp_path, capsys, flag):
    (tmp_path / "full.svg").symlink_to("/dev/full")
    path = str(tmp_path / "full.svg")
    assert main(["schedule", "--schedule", "gpipe", "--stages", "2", "--microbatches", "2", flag, path]) == 2
    assert capsys.readouterr().err == f"visualize: error: {flag} {path} cannot be written: No space left on device\n"


def test_a_schedule_of_a_long_name_is_refused(capsys):
    assert main(["schedule", "--schedule", "x" * 5000, "--json", "-"]) == 2
    assert "choose from naive, gpipe" in capsys.readouterr().err


def test_a_named_schedule_has_at_most_100000_actions(capsys):
    named = ["schedule", "--schedule", "zb-h1", "--stages", "100", "--json", "-", "--microbatches"]
    assert main([*named, "334"]) == 2
    line = "visualize: error: --schedule zb-h1: 100200 actions: more than 100000 cannot be shown\n"
    assert capsys.readouterr() == ("", line)


def test_a_schedule_file_ends_where_named_schedules_end(write, capsys):
    actions = [f"0F{i}" for i in range(50_001)] + [f"0B{i}" for i in range(50_001)]
    assert main(["schedule", "--schedule", write("a.csv", ",".join(actions)), "--json", "-"]) == 2
    assert "a.csv: 100002 actions: more than 100000 cannot be shown" in capsys.readouterr().err
    assert main(["schedule", "--schedule", write("b.csv", "," * 9_000_000 + "0F0,0B0"), "--json", "-"]) == 2
    assert "b.csv cannot be read: 9,000,007 bytes are more than 8,388,608" in capsys.readouterr().err


def test_it_runs_as_a_module_without_a_display(write, tmp_path):
    out = str(tmp_path / "t.png")
    command = [sys.executable, "-m", "visualize", "trace", write("t.json", chrome()), "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "")
    assert Path(out).read_bytes().startswith(b"\x89PNG")


def test_a_notebook_shows_it_and_save_refuses_what_cannot_be(write, tmp_path):
    picture = plot_loss({"run": read_metrics(write("m.jsonl", '{"step": 0, "loss": 1.0}\n'))})
    assert picture._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="the name must end in"):
        save(picture, str(tmp_path / "picture"))
