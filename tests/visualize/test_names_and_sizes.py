"""The command's runs of `loss` and `memory` and their names, the ticks of steps, and files that are large."""

import json
import warnings

import pytest
from picture_cases import chrome, rows

from minipar.errors import UsageError
from visualize import __main__ as command
from visualize import plot_loss, style
from visualize.__main__ import main

KINDS = ["parameters", "gradients", "optimizer", "activations", "buffers"]


def metrics(directory, name, losses):
    directory.mkdir(exist_ok=True)
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows(losses)))
    return str(directory / name)


def labels(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


@pytest.mark.parametrize("count", range(1, 13))
def test_a_few_steps_have_whole_ticks(count):
    axes = plot_loss({"": rows([1.0] * count)}).axes[0]
    axes.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks and all(tick == int(tick) for tick in ticks)


def test_one_run_needs_no_name_and_several_have_theirs(tmp_path, drawn):
    one = metrics(tmp_path / "x", "m.jsonl", [3.0, 2.0])
    two = metrics(tmp_path / "x", "_n.jsonl", [3.0, 1.0])
    same = metrics(tmp_path / "y", "m.jsonl", [3.0, 0.5])
    for files, expected in (
        ([one], ["every step, 3.000 at first, 2.000 at last"]),
        ([one, two], ["m: every step, 3.000 at first, 2.0", " _n: every step, 3.000 at first, 1.0"]),
        ([one, same], [f"{one}: every step, 3.000 at first, 2.0", f"{same}: every step, 3.000 at first, 0.5"]),
    ):
        assert main(["loss", *files, "--out", "x.png"]) == 0
        found = labels(drawn[-1])
        assert len(found) == len(expected)
        assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def ledger(directory, *peaks):
    """A ledger in which the parameters of rank r take peaks[r] bytes."""
    ranks = [{"rank": rank, "moments": [["forward", [peak, 0, 0, 0, 0]]]} for rank, peak in enumerate(peaks)]
    directory.mkdir(exist_ok=True)
    (directory / "l.json").write_text(json.dumps({"kinds": KINDS, "ranks": ranks}))
    return str(directory / "l.json")


@pytest.mark.parametrize(
    ("flags", "rank", "sizes"), [([], 0, ("1 KiB", "3 KiB")), (["--rank", "1"], 1, ("2 KiB", "4 KiB"))]
)
def test_the_memory_of_the_rank_that_is_asked_for_is_drawn(flags, rank, sizes, tmp_path, drawn):
    files = [ledger(tmp_path / "x", 1024, 2048), ledger(tmp_path / "y", 3072, 4096)]
    assert main(["memory", *files, *flags, "--out", "x.png"]) == 0
    peaks = [axes.texts[-1].get_text() for axes in drawn[0].axes]
    assert peaks == [f"peak {size}" for size in sizes]
    assert drawn[0].get_suptitle() == f"Memory of rank {rank} during one training step, by kind"
    assert [axes.get_title(loc="left") for axes in drawn[0].axes] == files


def test_a_rank_that_is_not_in_the_ledger_is_refused(tmp_path, capsys):
    assert main(["memory", ledger(tmp_path / "x", 1, 2), "--rank", "2", "--out", "x.png"]) == 2
    line = capsys.readouterr().err
    assert "--rank 2: " in line and "has ranks 0 to 1" in line


# ---- large files -----------------------------------------------------------------------------------------------------


def test_a_large_file_is_announced_before_it_is_read(write, drawn, monkeypatch, capsys):
    path = write("t.json", chrome())
    assert main(["trace", path, "--out", "x.png"]) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(style, "LONG", 1000)
    announced = []

    def parse(*arguments):
        announced.append(capsys.readouterr().err)
        raise UsageError("it ends here")

    monkeypatch.setattr(style, "parse_json", parse)
    for name in ("trace", "mesh"):
        assert main([name, path, "--out", "x.png"]) == 2
    line = f"visualize: reading 0 MB from {path}, which can take minutes\n"
    assert announced[0] == line and announced[1].endswith(line)


@pytest.mark.parametrize("name", ["trace", "mesh", "loss", "traffic", "memory", "plan", "layouts", "compare"])
def test_a_file_that_is_too_large_is_refused_at_once(name, tmp_path, capsys):
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.truncate(style.MOST_BYTES + 1)  # a hole: it takes no space
    assert main([name, str(path), "--out", "x.png"]) == 2
    line = capsys.readouterr().err
    assert "209,715,201 bytes are more than 209,715,200; write one of fewer steps" in line and line.count("\n") == 1


def test_a_schedule_file_has_a_limit_of_its_own(tmp_path, capsys):
    path = tmp_path / "huge.csv"
    with open(path, "wb") as file:
        file.truncate(command.MOST_BYTES + 1)
    assert main(["schedule", "--schedule", str(path), "--json", "-"]) == 2
    assert "8,388,609 bytes are more than 8,388,608\n" in capsys.readouterr().err


def test_characters_that_the_font_lacks_are_no_warning(tmp_path):
    figure = style.picture(2.0, 1.0)
    figure.text(0.5, 0.5, "\U0001f9ee")  # an abacus
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        style.save(figure, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 0
