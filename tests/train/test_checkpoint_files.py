"""Claims about a checkpoint's files: what is not whole, or not ours, is refused by name before anything is loaded."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from launcher import run_each
from safetensors.numpy import load, save
from training import bits, config_for, open_checkpoint, trainer_for

from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import save_pretrained
from minipar.train.checkpoint import Checkpoint, checksum, prepare_directory
from minipar.train.config import parse, resolve, with_shape
from minipar.train.data import Tokens, load_tokens
from minipar.train.lock import saving_alone
from minipar.train.manifest import MOST_BYTES

FLAGS = "--layers 1 --hidden 8 --heads 2 --seq-len 8 --global-batch 4 --steps 2 --dtype float64"
TOKENS = Tokens(load_tokens(None, vocab_size=256, seq_len=8).ids[:5000], "a text", 256)
SECOND = "step-00000002/rank-00001.safetensors"  # of rank 1, in the newer of two


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Checkpoints of steps 1 and 2, written by dp 2 x tp 2 at stage 1: four files each."""
    folder = tmp_path_factory.mktemp("whole")
    config = config_for(f"{FLAGS} --dp 2 --tp 2 --zero-stage 1")

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm)
        for result in trainer.train():
            trainer.save(folder, result.step + 1)

    run_local(4, rank)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def refused(folder, flags="", ranks=2):
    """The message of every rank's error; the trainer is not built yet, so nothing can have been loaded."""
    config = config_for(f"{FLAGS} --resume {folder} {flags}", 1)

    def rank(comm):
        with pytest.raises(UsageError) as caught:
            open_checkpoint(config, TOKENS, comm)
        return str(caught.value)

    messages = run_local(ranks, rank)
    assert len(set(messages)) == 1, messages
    return messages[0]


def save_into(folder):
    """Do what the start of a run with `--save` does."""
    with saving_alone(serial(), str(folder)):
        prepare_directory(str(folder), 2)


def accepted(folder, flags=""):
    return trainer_for(config_for(f"{FLAGS} --resume {folder} {flags}"), TOKENS)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def as_link(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    shutil.move(target, path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def replace_by(other):
    return lambda path: shutil.copy(path.parents[1] / other, path)


DAMAGE = {
    "a bit flipped in the numbers": lambda path: flip(path, -9),
    "a bit flipped in the header": lambda path: flip(path, 20),
    "the last byte cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": lambda path: path.unlink(),
    "a link": as_link,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "the same rank's of another step": replace_by("step-00000001/rank-00001.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name(damage, copy):
    DAMAGE[damage](copy / SECOND)
    assert str(copy / SECOND) in refused(copy)
    assert accepted(copy / "step-00000001").first_step == 1  # the one before is whole


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_each_file_is_checked_on_any_number_of_ranks(ranks, whole):
    paths = sorted(whole.glob("step-00000002/rank-*.safetensors"))
    assert len(paths) == 4
    for path in paths:
        flip(path, -1)
        try:
            assert str(path) in refused(whole, ranks=ranks)
        finally:
            flip(path, -1)


def test_a_file_that_is_not_of_the_checkpoint_is_left_alone(copy):
    (copy / "step-00000002" / "notes.txt").write_text("")
    assert accepted(copy).first_step == 2


MANIFESTS = {
    "cut in the middle": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "not text": lambda text: b"\xff\xfe\x00",
    "very deep": lambda text: b"[" * 100_000,
    "a list": lambda text: b"[]",
    "another program's": lambda text: b'{"metadata": {}, "weight_map": {}}',
    "of a later version": lambda text: text.replace(b'"version": 1', b'"version": 2'),
    "with one digit changed": lambda text: text.replace(b'"step": 2', b'"step": 1'),
    "with one name changed": lambda text: text.replace(b"ln_f.bias", b"ln_f.bjas", 1),
    "too large": lambda text: text + b" " * MOST_BYTES,
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_damaged_manifest_is_refused_by_name(damage, copy):
    path = copy / "step-00000002" / "manifest.json"
    path.write_bytes(MANIFESTS[damage](path.read_bytes()))
    refusal = refused(copy)
    assert refusal.startswith(f"{path}") and "\n" not in refusal


# ---- what somebody wrote on purpose, with a checksum that fits -------------------------------------------------------

FIRST = "files.0.pieces.0"  # of wte.weight, whose shape is (256, 8)
IMPOSSIBLE = {
    "step": [-1, "2", 10**30],
    "optimizer_steps": [3],
    "skipped": [3],
    "dtype": ["float32", "U5"],
    "data": ["0" * 31],
    "loss_scale": [[0.5, 0], [float("nan"), 0]],
    "router_bias": [[[1.0]]],
    "model": [None],
    "model.n_layer": [10**8],
    "model.n_embd": [16],
    "model.n_head": [3],
    "model.layer_norm_epsilon": [float("inf")],
    "model.more": [1],
    "parameters": [{}],
    "parameters.wte\\weight": [[10**15]],
    "history": [[]],
    "history.0.step": [1],
    "history.0.flags.--layers": [2],
    "history.0.flags.--lr": [-1],
    "history.0.flags.--betas": [[0.9]],
    "history.0.flags.--reduction": ["x"],
    "history.0.flags.--data": [5],
    "files": [[]],
    "files.1.name": ["../step-00000001/rank-00001.safetensors", "/etc/passwd", "rank-00000.safetensors"],
    "files.0.bytes": [100],
    "files.0.sha256": ["G" * 64],
    "files.0.pieces": [[]],
    f"{FIRST}.name": ["nothing"],
    f"{FIRST}.start": [1],  # a gap
    f"{FIRST}.stop": [10**15],
    f"{FIRST}.cut": [None],
    f"{FIRST}.cut.rank": [1],  # twice
    f"{FIRST}.cut.dim": [7],
}
CASES = [(path, value) for path, values in IMPOSSIBLE.items() for value in values]


def changed(manifest, path, value):
    """Put a value at a place of a manifest: for "files.0.bytes", of its first file."""
    *keys, last = (key.replace("\\", ".") for key in path.split("."))
    place = manifest
    for key in keys:
        place = place[int(key) if isinstance(place, list) else key]
    place[last] = value
    return manifest


def signed(manifest) -> bytes:
    return json.dumps(manifest | {"checksum": checksum(manifest)}).encode()


@pytest.mark.parametrize(("path", "value"), CASES)
def test_a_value_that_cannot_be_is_refused_in_one_line(path, value, whole):
    place = whole / "step-00000002"
    manifest = json.loads((place / "manifest.json").read_text())
    Checkpoint(place, signed(manifest))
    with pytest.raises(UsageError) as caught:
        Checkpoint(place, signed(changed(manifest, path, value)))
    message = str(caught.value)
    assert message.startswith(f"{place}/manifest.json: ") and "\n" not in message and len(message) < 1000


def test_what_an_older_version_did_not_write_may_be_missing(whole):
    place = whole / "step-00000002"
    manifest = json.loads((place / "manifest.json").read_text())
    for key in ("loss_scale", "router_bias", "skipped"):
        del manifest[key]
    assert Checkpoint(place, signed(manifest | {"a key of a later version": [None]})).step == 2


KEY = "exp_avg/wte.weight"
FORGED = {
    "longer": lambda tensors: tensors | {KEY: np.zeros(tensors[KEY].size + 1)},
    "2-D": lambda tensors: tensors | {KEY: tensors[KEY][None]},
    "another dtype": lambda tensors: tensors | {KEY: tensors[KEY].astype(np.int64)},
    "missing": lambda tensors: {"x" + key if key == KEY else key: tensors[key] for key in tensors},
}


@pytest.mark.parametrize("case", FORGED)
def test_a_file_without_what_the_manifest_says_is_refused(case, copy):
    place = copy / "step-00000002"
    path, manifest = place / "rank-00000.safetensors", json.loads((place / "manifest.json").read_text())
    data = save(FORGED[case](load(path.read_bytes())))
    path.write_bytes(data)
    manifest["files"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (place / "manifest.json").write_bytes(signed(manifest))
    with pytest.raises(UsageError) as caught:
        accepted(copy)
    assert str(path) in str(caught.value) and KEY in str(caught.value)


# ---- directories and flags -------------------------------------------------------------------------------------------


def test_a_directory_without_a_checkpoint_is_refused_by_name(copy, tmp_path):
    newest = copy / "step-00000002"
    assert f"{tmp_path}/nowhere" in refused(tmp_path / "nowhere")
    (tmp_path / "empty" / "step-00000007.partial").mkdir(parents=True)
    assert f"{tmp_path}/empty" in refused(tmp_path / "empty")
    (newest / "manifest.json").unlink()
    assert f"{newest}/manifest.json" in refused(copy)
    shutil.rmtree(newest)
    newest.symlink_to(copy / "step-00000001")
    assert str(newest) in refused(copy)
    newest.unlink()
    newest.write_text("")
    assert str(newest) in refused(copy)


@pytest.mark.parametrize(
    ("flags", "then"),
    [
        ("--seed 1", ["--seed 0"]),
        ("--order sequential --betas 0.8 0.9", ["--order random", "--betas [0.9, 0.999]"]),
        ("--layers 2 --hidden 16", ["--layers 1", "--hidden 8"]),
        ("--dtype float32", ["--dtype float64"]),
        ("--global-batch 8", ["--global-batch 4"]),
        ("--model llama --ffn 8", ["--model gpt2"]),
        ("--pack 5", ["--pack None"]),
        ("--steps 1", ["step 2"]),
    ],
)
def test_another_run_is_refused_with_each_difference(flags, then, whole):
    refusal = refused(whole, flags)
    assert f"{whole}/step-00000002/manifest.json" in refusal
    assert all(each in refusal for each in then)


def test_another_text_is_refused(whole, tmp_path):
    (tmp_path / "other.txt").write_text("another text" * 10)
    config = config_for(f"{FLAGS} --resume {whole}")
    with pytest.raises(UsageError, match="other.txt"):
        open_checkpoint(config, load_tokens(str(tmp_path / "other.txt"), vocab_size=256, seq_len=8), serial())


def test_what_may_change_may_change(whole):
    trainer = accepted(whole, "--steps 4 --lr 0.5 --lr-schedule cosine --weight-decay 0 --clip-grad 1 --dropout 0.1")
    assert [result.step for result in trainer.train()] == [2, 3]
    assert list(accepted(whole).train()) == []  # nothing is left to do: it can be exported or verified still


def test_a_checkpoint_keeps_positions_beyond_its_sequence(tmp_path):
    shape = GPTConfig(256, 32, 8, 1, 2)
    save_pretrained(GPT(shape), tmp_path / "gpt2")
    words = "--seq-len 8 --global-batch 4 --steps 1 --dtype float64"
    config = parse(f"{words} --init-from {tmp_path}/gpt2".split())
    config = resolve(with_shape(config, shape), 1)
    trainer = trainer_for(config, TOKENS)
    list(trainer.train())
    trainer.save(tmp_path / "run", 1)
    resumed = accepted(tmp_path / "run")
    assert resumed.model.config.n_positions == 32
    assert bits(resumed.state_dict()) == bits(trainer.state_dict())


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--save .*file/x"):
        save_into(tmp_path / "file/x")
    for place in (tmp_path / "file/x", "/proc/self/fd"):  # in which even root makes no directory
        with pytest.raises(UsageError, match=f"--save {place} "):
            prepare_directory(str(place), 2)


def test_a_checkpoint_cannot_be_saved_into_a_checkpoint(copy):
    """It would be refused from then on, for a file that is not its own; also under another name."""
    place = copy / "step-00000001"
    place.rename(copy / "best")
    (copy / "link").symlink_to(copy / "best")
    (copy / "deep").symlink_to(copy / "best" / "deep")
    ways = ("step-00000002", "step-00000002/new", "best", "best/new/deep", "link/../best", "deep", "step-00000003")
    for inside in ways:
        with pytest.raises(UsageError, match=f"--save {copy}/{inside}"):
            save_into(copy / inside)
    (copy / "best").rename(place)
    assert sorted(path.name for path in copy.iterdir()) == ["deep", "link", "step-00000001", "step-00000002"]
    assert accepted(copy).first_step == 2
    save_into(copy)


def test_only_a_checkpoints_own_files_are_ever_removed(tmp_path):
    kept = tmp_path / "step-00000001.partial"
    kept.mkdir()
    (kept / "rank-00000.safetensors").write_text("")
    (kept / "thesis.tex").write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "rank-00000.safetensors").write_text("")
    (tmp_path / "step-00000002.partial").symlink_to(tmp_path / "outside")
    prepare_directory(str(tmp_path), 0)
    with pytest.raises(UsageError, match="step-00000001.partial"):
        trainer_for(config_for(FLAGS), TOKENS).save(tmp_path, 1)
    assert len(list(kept.iterdir())) == 2 and len(list((tmp_path / "outside").iterdir())) == 1


def test_the_program_refuses_in_one_line_with_exit_code_2(copy):
    os.truncate(copy / SECOND, 100)
    text = copy.parent / "text.txt"
    text.write_bytes(TOKENS.ids.tobytes())
    command = f"minipar.train {FLAGS} --data {text}"
    commands = [f"{command} {flag} {copy}".split() for flag in ("--resume", "--save")]
    for result, value in zip(run_each(2, commands, 30), (SECOND, "step 2"), strict=True):
        assert result.returncode == 2 and result.stdout == ""
        assert result.stderr.count("\n") == 1 and value in result.stderr


def test_a_checkpoint_is_read_without_ranks(whole):
    """What the docstring promises: whoever sees the directory can read it."""
    place = whole / "step-00000002"
    checkpoint = Checkpoint(place, (place / "manifest.json").read_bytes())
    assert checkpoint.step == 2 and checkpoint.array("exp_avg_sq", "h.0.attn.c_attn.weight").shape == (8, 24)
    assert (checkpoint.array("exp_avg_sq", "wte.weight") >= 0).all()


def test_a_checkpoint_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """Otherwise a power cut can leave the name with files that are empty."""
    events, sync, rename = [], os.fsync, os.rename

    def note_sync(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def note_rename(old, new):
        events.append("rename")
        rename(old, new)

    config = config_for(f"{FLAGS} --dp 2 --zero-stage 1")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    run_local(2, lambda comm: trainer_for(config, TOKENS, comm).save(tmp_path, 1))
    checkpoint = tmp_path / "step-00000001"
    files = {path.stat().st_ino for path in checkpoint.iterdir()}
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert len(files) == 3 and files <= set(before[:-1])
    assert before[-1] == checkpoint.stat().st_ino and after == [tmp_path.stat().st_ino]
