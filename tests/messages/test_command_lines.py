"""Claims about command lines: a mistake is one line that shows the user's values, on every rank, and exit code 2."""

import re

import pytest
from launcher import run_each
from refusals import check_message, refused, shown

from minipar import generate
from minipar.bench.__main__ import bench
from minipar.cli import report
from minipar.comm.threads import run_local, serial
from minipar.compare import differences
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.plan import __main__ as plan
from minipar.train import __main__ as train
from minipar.train.flags import parse
from minipar.train.pretrained import save_pretrained
from visualize import __main__ as visualize

TRAIN = {  # the flags, on how many ranks, and what the line shows
    "--dtype float8": (1, "--dtype", "float8"),
    "--lr fast": (1, "--lr", "fast"),
    "--betas 0.9": (1, "--betas", "2"),
    "--schedule zb-h3 --pp 2": (2, "--schedule", "zb-h3", "zb-h1"),
    "--hidden 64 --heads 5": (1, "64", "5"),
    "--model mixtrel": (1, "mixtrel"),
    "--save-every 3": (1, "--save-every", "3", "--save"),
    "--resume nowhere": (1, "nowhere", "--save"),
    "--dp 4 --zero-stage 3 --zero-replicas 3": (4, "3", "4"),
    "--zero-stage 1 --sync-every-microbatch": (1, "--zero-stage", "1", "--sync-every-microbatch"),
    "--cp 2 --dropout 0.1": (2, "0.1", "2"),
    "--tp 2 --sequence-parallel --seq-len 7": (2, "7/2"),
    "--tp 3": (3, "heads/tp", "4/3"),
    "--reduction tree --microbatches 3": (1, "--reduction", "tree", "3"),
    "--reduction tree --cp 2": (2, "--reduction", "tree", "cp 1"),
    "--reduction tree --dtype bfloat16": (1, "--reduction", "tree", "float32"),
    "--verify": (1, "--verify", "float32", "float64"),
    "--dp 3": (8, "dp", "3", "8"),
    "--dp 2 --tp 2 --pp 3": (8, "dp*tp*pp", "2*2*3", "12", "8"),
    "--global-batch 10 --microbatches 3": (4, "global-batch", "10", "dp*microbatches", "10/12"),
}


@pytest.mark.parametrize("flags", TRAIN)
def test_a_wrong_flag_of_a_training_is_refused(flags):
    """... as the flags are read, or as the strategies are applied: before the first step."""
    ranks, *values = TRAIN[flags]
    refused(UsageError, *values, by=lambda: run_local(ranks, lambda comm: train.run(comm, flags.split())))


@pytest.fixture
def answer(capsys, monkeypatch):
    """A function that runs a command in this process, and returns its exit code, output and line of error."""

    def run(words):
        name, *argv = words.split()
        monkeypatch.setattr("sys.argv", ["program", *argv])
        programs = {"plan": plan.main, "generate": generate.main, "compare": differences.main}
        programs |= {"visualize": visualize.main, "train": parse, "bench": lambda argv: bench(serial())}
        code, line = 0, ""
        try:
            code = programs[name](argv)
        except UsageError as error:
            code, line = 2, str(error)
        except SystemExit as leaving:
            code = leaving.code
        printed = capsys.readouterr()
        return code, printed.out, line or printed.err.rstrip("\n")

    return run


# Without these a command asks for them first.
NEEDED = {
    "plan": "--model gpt2 --gpu h100 --gpus 1 --global-batch 1 --seq-len 8",
    "generate": "--from nowhere",
    "compare": "a b",
    "visualize schedule": "--schedule 1f1b --out x.png",
}


@pytest.mark.parametrize("command", ["train", "plan", "generate", "compare", "bench step", "visualize schedule"])
def test_a_misspelt_flag_of_any_command_is_refused(command, answer):
    """Each flag with its last letter doubled, or without it: a flag is never abbreviated."""
    code, text, _ = answer(f"{command} --help")
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]{3,})", text, re.MULTILINE)
    assert code == 0 and "--help" in flags
    for flag in flags:
        for misspelt in (f"{flag}{flag[-1]}", flag[:-1]):
            code, out, line = answer(f"{command} {NEEDED.get(command, '')} {misspelt} x")
            assert misspelt in flags or (code, out) == (2, "") and shown(line, misspelt), line


@pytest.mark.parametrize(
    ("words", "meant"),
    [("train --zero_stage 1", "--zero-stage"), ("train --layer 2", "--layers"), ("bench stp", "step"),
     ("visualize schedul", "schedule")],
)  # fmt: skip
def test_an_unknown_word_is_answered_with_the_one_that_was_meant(words, meant, answer):
    code, out, line = answer(words)
    assert (code, out) == (2, "")
    check_message(line, meant)


def test_what_resembles_no_flag_is_answered_with_none(answer):
    code, out, line = answer("train --nonsense 1")
    assert (code, out) == (2, "") and re.findall(r"--[\w-]+", line) == ["--nonsense"]


ON_TWO_RANKS = {
    "--data {}/nowhere.txt": ("nowhere.txt",),
    "--data {}/empty.txt": ("empty.txt",),
    "--data {}/short.txt --seq-len 64": ("short.txt", "10"),
    "--data {}/short.txt --seq-len 4 --vocab-size 100": ("120", "100"),
    "--data {}/odd.bin": ("odd.bin",),
    "--data {}/short.txt --seq-len 8 --eval-every 1": ("short.txt", "9"),
    "--init-from {}/nowhere": ("nowhere", "config.json"),
    "--model {}/gpt2 --layers 3": ("3", "gpt2", "1"),
    "--init-from {}/gpt2": ("ln_f.bias",),
    "--metrics {}/short.txt/m.jsonl": ("m.jsonl",),
    "--global-batch 1000000000000 --seq-len 8": ("1000000000000",),
    "--device tpu": ("--device", "tpu"),
    "--dp 3": ("3", "2"),
    "--layers 1 --hidden 16 --steps 5 --lr 1e30": ("--lr",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that cannot be trained on; in short.txt the largest token is 120."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("abcxefghij")
    (folder / "odd.bin").write_bytes(bytes(2001))
    model = GPT(GPTConfig(256, 64, 16, 1, 2))
    state = model.state_dict()
    del state["ln_f.bias"]
    save_pretrained(model, folder / "gpt2", state)
    return folder


def test_every_rank_refuses_and_one_of_them_says_why(folder):
    """In one job of two ranks, in which a rank that goes on would wait for the others."""
    commands = [["minipar.train", *flags.format(folder).split()] for flags in ON_TWO_RANKS]
    for result, (flags, values) in zip(run_each(2, commands), ON_TWO_RANKS.items(), strict=True):
        assert result.returncode == 2, flags
        (line,) = result.stderr.splitlines()
        assert line.startswith("minipar: error: ")
        assert [value for value in values if value not in line] == []


def test_an_error_is_one_line_whatever_it_holds(capsys):
    assert report(UsageError("a\n  b\r\n")) == 2
    assert capsys.readouterr() == ("", "minipar: error: a b\n")
