"""Claims about what a resumed run reads and repeats: which checkpoint, and whether one device could have its bits."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from training import config_for, trainer_for

from minipar.comm import serial
from minipar.errors import UsageError
from minipar.train import resume
from minipar.train.checkpoint import run_flags
from minipar.train.config import parse
from minipar.train.data import Tokens
from minipar.train.resume import find_checkpoint, leaves, repeatable, same_sums

TOKENS = Tokens(np.arange(500, dtype=np.uint8) % 16, "a text", 16)
SMALL = "--layers 1 --hidden 8 --heads 2 --seq-len 8 --vocab-size 16 --global-batch 16 --dtype float64 --steps 2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = trainer_for(config_for(SMALL), TOKENS)
    for result in trainer.train():
        trainer.save(folder, result.step + 1)
    return folder


def found(*words):
    checkpoint = find_checkpoint(parse([str(word) for word in words]), serial())
    return None if checkpoint is None else checkpoint.directory


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_resumed_unless_one_is_named(saved):
    assert found() is None
    assert found("--resume", saved) == saved / "step-00000002"
    assert found("--resume", saved / "step-00000001") == saved / "step-00000001"
    assert found("--resume", "auto", "--save", saved) == saved / "step-00000002"


def test_a_checkpoint_under_another_name_is_resumed(saved, tmp_path):
    (tmp_path / "best").mkdir()
    for path in (saved / "step-00000001").iterdir():
        (tmp_path / "best" / path.name).write_bytes(path.read_bytes())
    assert found("--resume", tmp_path / "best") == tmp_path / "best"
    with pytest.raises(UsageError, match="^--resume .*: no checkpoint in it"):
        found("--resume", tmp_path)


def test_a_checkpoint_without_its_manifest_is_named(tmp_path):
    place = tmp_path / "step-00000001"
    place.mkdir()
    with pytest.raises(UsageError) as caught:
        found("--resume", place)
    assert str(caught.value) == f"{place}/manifest.json: No such file or directory"


def test_what_is_no_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place, why in (("file", "Not a directory"), ("nowhere", "No such file or directory")):
        with pytest.raises(UsageError) as caught:
            found("--resume", tmp_path / place)
        assert str(caught.value) == f"--resume {tmp_path}/{place}: {why}"
    with pytest.raises(UsageError) as caught:
        found("--resume", "auto", "--save", tmp_path / "file")
    assert str(caught.value) == f"--resume {tmp_path}/file: Not a directory"


def test_a_manifest_of_the_largest_size_is_read(saved, monkeypatch):
    size = os.path.getsize(saved / "step-00000002" / "manifest.json")
    monkeypatch.setattr(resume, "MOST_BYTES", size)
    assert found("--resume", saved) is not None
    monkeypatch.setattr(resume, "MOST_BYTES", size - 1)
    with pytest.raises(UsageError, match=f"manifest.json has {size:,} bytes, expected at most {size - 1:,}$"):
        found("--resume", saved)


def test_a_manifest_is_a_text_that_people_read(saved):
    text = (saved / "step-00000002" / "manifest.json").read_text()
    first, second, *_, last = text.splitlines()
    assert (first, second.strip(), last) == ("{", '"format": "minipar checkpoint",', "}") and text.endswith("}\n")
    assert json.loads(text)["optimizer_steps"] == 2


# ---- what one device repeats -----------------------------------------------------------------------------------------

ORDERED = f"{SMALL} --reduction ordered"
TREE = f"{SMALL} --reduction tree"


def before(*periods):
    """A checkpoint of a run that had these flags, period by period."""
    return SimpleNamespace(flags=[run_flags(config_for(flags)) for flags in periods])


SUMS = [
    ([], f"{ORDERED} --dp 2", True),
    ([f"{ORDERED} --dp 2"], f"{ORDERED} --dp 2", True),
    ([f"{ORDERED} --dp 2", f"{ORDERED} --dp 4"], f"{ORDERED} --dp 2", False),
    ([f"{ORDERED} --dp 4"], f"{ORDERED} --dp 2", False),
    ([f"{ORDERED} --dp 2 --microbatches 2"], f"{ORDERED} --dp 2", False),
    ([f"{SMALL} --dp 2"], f"{ORDERED} --dp 2", False),
    ([f"{ORDERED} --dp 2 --zero-stage 2"], f"{ORDERED} --dp 2 --zero-stage 1", True),
    ([f"{ORDERED} --dp 2 --zero-stage 2 --zero-replicas 2"], f"{ORDERED} --dp 2 --zero-stage 2", False),
    ([f"{ORDERED} --pp 1"], f"{ORDERED} --pp 2", True),
    ([f"{ORDERED} --pp 1"], f"{ORDERED} --pp 2 --clip-grad 1", False),  # the norm is summed in another order
    ([f"{ORDERED} --pp 2"], f"{ORDERED} --pp 1 --clip-grad 1", False),
    ([f"{ORDERED} --pp 2"], f"{ORDERED} --pp 4 --layers 4 --clip-grad 1", True),
    ([f"{ORDERED} --pp 1"], f"{ORDERED} --clip-grad 1", True),
    ([f"{TREE} --dp 4 --microbatches 2"], f"{TREE} --dp 2 --microbatches 4", True),
    ([f"{TREE} --dp 4 --microbatches 2"], f"{TREE} --dp 2 --microbatches 2", False),
    ([f"{ORDERED} --dp 4 --microbatches 2"], f"{TREE} --dp 4 --microbatches 2", False),
    ([f"{TREE} --dp 4", f"{ORDERED} --dp 4"], f"{TREE} --dp 4", False),
]


@pytest.mark.parametrize(("periods", "now", "same"), SUMS)
def test_sums_are_the_same_if_every_period_had_the_layouts(periods, now, same):
    assert same_sums(before(*periods) if periods else None, config_for(now)) is same


MIXTRAL = f"{ORDERED} --model mixtral --experts 2 --ffn 8"
UPDATES = [
    ("", "", True),
    ("--lr 0.5", "", False),
    ("--weight-decay 0.5", "", False),
    ("--steps 3", "", True),
    ("--steps 3 --lr-schedule cosine", "--lr-schedule cosine", False),
    ("--lr-schedule cosine", "--lr-schedule cosine", True),
    ("--lr-schedule cosine", "", False),
    ("--dp 2", "", False),
]


@pytest.mark.parametrize(("then", "now", "same"), UPDATES)
def test_one_device_repeats_what_had_the_same_updates(then, now, same):
    assert repeatable(before(f"{ORDERED} {then}"), config_for(f"{ORDERED} {now}")) is same
    assert repeatable(before(ORDERED, f"{ORDERED} {then}"), config_for(f"{ORDERED} {now}")) is (
        same and ("cosine" not in now)
    )


def test_what_experts_drop_depends_on_the_microbatches():
    """This holds with sums as a tree, too, which would allow others. Without a capacity nothing is dropped."""
    for flags, same in (("--capacity-factor 1", False), ("", True)):
        config = config_for(f"{MIXTRAL} {flags} --dp 2")
        assert repeatable(before(f"{MIXTRAL} {flags} --dp 2"), config)
        tree = replace(config, run=replace(config.run, reduction="tree"))
        then = SimpleNamespace(flags=[run_flags(tree) | {"--dp": 1, "--microbatches": 2}])
        assert repeatable(then, tree) is same


def test_leaves_are_the_microbatches_of_all_replicas():
    assert leaves({"--dp": 4, "--microbatches": 2}) == leaves({"--dp": 2, "--microbatches": 4}) == 8
