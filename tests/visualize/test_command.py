"""The command: it draws what training writes, and a file that says something else is one line and exit code 2."""

import os

import pytest
from launcher import run_mpi
from picture_cases import bench_rows, chrome, search

from visualize.__main__ import main
from visualize.measurements import KINDS

TINY = "--layers 1 --hidden 8 --heads 1 --seq-len 4 --global-batch 2 --steps 2 --zero-stage 2".split()


def test_what_training_wrote_is_drawn(tmp_path, capsys):
    flags = [*TINY, "--trace", "t.json", "--metrics", "m.jsonl", "--memory", "held.json"]
    done = run_mpi(2, ["-m", "minipar.train", *flags], timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    trace, metrics, held = (str(tmp_path / name) for name in ("t.json", "m.jsonl", "held.json"))
    jobs = [["trace", trace, "--steps", "0:1", "--arrows"], ["mesh", trace], ["loss", metrics, metrics]]
    for number, job in enumerate([*jobs, ["memory", held, "--rank", "1"]]):
        out = tmp_path / "made" / f"{number}.png"
        assert main([*job, "--out", str(out)]) == 0
        assert out.stat().st_size > 3000 and capsys.readouterr() == (f"{out}\n", "")


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_other_formats_and_files_are_drawn(write, tmp_path, suffix):
    for command, value in (("traffic", bench_rows()), ("plan", search()), ("compare", {"ratios": {"0": {"a": 2}}})):
        out = tmp_path / f"{command}.{suffix}"
        assert main([command, write("file.json", value), "--out", str(out)]) == 0 and out.stat().st_size > 3000


@pytest.mark.parametrize(
    ("command", "content", "values"),
    [
        ("trace", None, ["missing"]),
        ("trace", "{", ["JSON"]),
        ("trace", "[" * 100_000, ["JSON"]),
        ("trace", {"traceEvents": []}, ["trace of minipar"]),
        ("trace", [{"ph": "X", "name": "f"}], ["pid"]),
        ("mesh", {"events": []}, ["traceEvents"]),
        ("loss", "", ["steps"]),
        ("loss", '{"step": 0, "loss": 1.0}\nbroken\n', ["line 2"]),
        ("loss", '{"step": 0, "loss": 1e999}\n', ["line 1", "--metrics"]),
        ("traffic", [{"op": "x"}], ["row 0", "minipar.bench"]),
        ("memory", {"kinds": list(KINDS), "ranks": [{"rank": 0}]}, ["--memory"]),
        ("memory", {"kinds": list(KINDS[:3]), "ranks": []}, ["--memory"]),
        ("plan", {"plans": [{"mfu": "much"}], "meshes": []}, ["minipar.plan --json"]),
        ("layouts", [{"dp": 1}], ["minipar.bench machine"]),
        ("compare", {"ratios": {"0": {"a": 1}, "1": {"b": 1}}}, ["minipar.compare --json"]),
    ],
)
def test_another_file_is_one_line_and_exit_code_2(write, tmp_path, capsys, command, content, values):
    path = str(tmp_path / "missing") if content is None else write("file", content)
    out = tmp_path / "out.png"
    assert main([command, path, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and not out.exists()
    assert path in printed.err and all(value in printed.err for value in values)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--out", "x.gif"], ["x.gif", ".png"]),
        (["--out", "{file}/x.png"], ["{file}/x.png"]),
        (["--out", "x.png", "--steps", "3"], ["--steps", "'3'"]),
        ([], ["--out", "--json"]),
        (["--out", "x.png", "--stps", "3:"], ["--stps", "--steps"]),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(write, capsys, arguments, values):
    path = write("t.json", chrome())
    assert main(["trace", path, *(text.format(file=path) for text in arguments)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and all(value.format(file=path) in line for value in values)


@pytest.mark.parametrize("command", [["trace"], ["loss"], ["schedule", "--schedule"]])
def test_a_pipe_or_a_device_is_refused_before_it_is_read(tmp_path, capsys, command):
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (str(tmp_path / "pipe.csv"), "/dev/zero"):
        assert main([*command, path, "--out", str(tmp_path / "x.png")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_path_cannot_change_what_the_terminal_shows(tmp_path, capsys):
    assert main(["trace", "no\nsuch\x1b[31mfile", "--out", "x.png"]) == 2
    assert "no\\nsuch\\x1b[31mfile" in capsys.readouterr().err
