"""Claims about a checkpoint's files: what is not whole, or is another run's, is refused in one line that names it."""

import json
import os
import shutil

import numpy as np
import pytest
from launcher import run_each
from refusals import check_message
from training import config_for, run_until, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.train import checkpoint
from minipar.train.data import Tokens, load_tokens

FLAGS = "--layers 1 --hidden 8 --heads 2 --seq-len 8 --global-batch 4 --steps 2 --dtype float64"
TOKENS = Tokens(load_tokens(None, vocab_size=256, seq_len=8).ids[:5000], "a text")
NEWEST = "step-00000002"
ARRAY = f"{NEWEST}/exp_avg/h.0.attn.c_attn.weight.npy"  # (8, 24)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Checkpoints of steps 1 and 2, written by dp 2 x tp 2 at stage 1."""
    folder = tmp_path_factory.mktemp("whole")
    run_until(TOKENS, config_for(f"{FLAGS} --dp 2 --tp 2 --zero-stage 1"), folder, 1)
    run_until(TOKENS, config_for(f"{FLAGS} --dp 2 --tp 2 --zero-stage 1 --resume {folder}"), folder, 2)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def refused(folder, flags="", ranks=2, tokens=TOKENS):
    """The message that every rank gets as it parses the flags, or as it resumes."""

    def rank(comm):
        with pytest.raises(UsageError) as caught:
            trainer_for(config_for(f"{FLAGS} --resume {folder} {flags}", ranks), tokens, comm)
        return str(caught.value)

    messages = run_local(ranks, rank)
    assert len(set(messages)) == 1
    check_message(messages[0])
    return messages[0]


def accepted(folder, flags=""):
    return trainer_for(config_for(f"{FLAGS} --resume {folder} {flags}"), TOKENS)


def as_directory(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "cut in its numbers": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in its header": lambda path: os.truncate(path, 30),
    "emptied": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "a directory": as_directory,
    "no array": lambda path: path.write_bytes(b"not NumPy's"),
    "of another shape": lambda path: np.save(path, np.zeros((8, 23))),
    "of as many values in another shape": lambda path: np.save(path, np.zeros((24, 8))),
    "of another dtype": lambda path: np.save(path, np.zeros((8, 24), np.float32)),
    "objects": lambda path: np.save(path, np.array([["x", 1]], dtype=object), allow_pickle=True),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_array_is_refused_by_name(damage, copy):
    DAMAGE[damage](copy / ARRAY)
    assert str(copy / ARRAY) in refused(copy)
    assert accepted(copy / "step-00000001").first_step == 1  # the one before is whole


RUNS = {
    "cut in the middle": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "not text": lambda text: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("damage", RUNS)
def test_a_damaged_run_json_is_refused_by_name(damage, copy):
    path = copy / NEWEST / "run.json"
    path.write_bytes(RUNS[damage](path.read_bytes()))
    assert str(path) in refused(copy)


def test_a_directory_without_a_checkpoint_is_refused_by_name(copy, tmp_path):
    assert f"{tmp_path}/nowhere" in refused(tmp_path / "nowhere")
    (tmp_path / "empty" / "step-00000007.partial").mkdir(parents=True)
    assert f"{tmp_path}/empty" in refused(tmp_path / "empty")
    (copy / NEWEST / "run.json").unlink()
    assert f"{copy}/{NEWEST}/run.json" in refused(copy)


def test_files_that_are_not_of_the_checkpoint_are_left_alone(copy):
    (copy / NEWEST / "notes.txt").write_text("")
    (copy / "step-best").mkdir()
    assert accepted(copy).first_step == 2
    assert (copy / NEWEST / "notes.txt").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--layers 2", ["h.1.ln_1.weight.npy"]),
        ("--hidden 16", ["256, 8", "256, 16"]),
        ("--model llama", ["model.embed_tokens.weight.npy"]),
        ("--dtype float32", ["float64", "float32"]),
        ("--vocab-size 300", ["wte.weight.npy", "256, 8", "300, 8"]),
    ],
)
def test_another_model_is_refused_by_a_parameters_file(flags, named, whole):
    refusal = refused(whole, flags)
    assert f"{whole}/{NEWEST}/parameter/" in refusal and all(each in refusal for each in named)


def test_another_text_is_refused(whole, tmp_path):
    (tmp_path / "other.txt").write_text("another text" * 10)
    tokens = load_tokens(str(tmp_path / "other.txt"), vocab_size=256, seq_len=8)
    assert f"{tmp_path}/other.txt" in refused(whole, tokens=tokens)


def test_what_may_change_may_change(whole):
    trainer = accepted(whole, "--steps 4 --lr 0.5 --lr-schedule cosine --weight-decay 0 --clip-grad 1 --dropout 0.1")
    assert [result.step for result in trainer.train()] == [2, 3]
    assert list(accepted(whole).train()) == []  # nothing is left to do: it can be exported still


def test_a_run_does_not_save_among_anothers_later_checkpoints(whole):
    """It would be taken for the newest one by the next `--resume`."""
    with pytest.raises(UsageError, match=f"{whole} .*{NEWEST}"):
        checkpoint.refuse_later(str(whole), 1)
    checkpoint.refuse_later(str(whole), 2)
    checkpoint.refuse_later(f"{whole}/new", 0)


def test_the_program_refuses_in_one_line_with_exit_code_2(copy):
    """On two ranks: a file that is cut, and directories to save in."""
    os.truncate(copy / ARRAY, 100)
    text = copy.parent / "text.txt"
    text.write_bytes(TOKENS.ids.tobytes())
    values = {f"--resume {copy}": ARRAY, f"--save {copy}": str(copy), f"--save {text}": str(text)}
    values |= {f"--export {text}/x": str(text), f"--resume {copy.parent}": str(copy.parent)}
    commands = [f"minipar.train {FLAGS} --data {text} {flags}".split() for flags in values]
    for result, value in zip(run_each(2, commands, 60), values.values(), strict=True):
        assert result.returncode == 2 and result.stdout == ""
        assert result.stderr.count("\n") == 1 and value in result.stderr


def test_run_json_is_what_a_reader_needs(whole):
    """Without ranks, without minipar: JSON and NumPy."""
    run = json.loads((whole / NEWEST / "run.json").read_text())
    assert run["step"] == run["optimizer_steps"] == 2 and run["flags"]["hidden"] == 8
    assert np.load(whole / ARRAY, allow_pickle=False).shape == (8, 24)
