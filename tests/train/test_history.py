"""Claims about a run that was resumed more than once: its checkpoint remembers each period."""

import hashlib
import json
import os

import numpy as np
import pytest
from training import bits, config_for, open_checkpoint, ranks_of, trainer_for

from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.train.data import Tokens
from minipar.train.resume import repeatable, same_sums

TOKENS = Tokens(np.arange(500, dtype=np.uint8) % 16, "a text", 16)
SMALL = "--layers 1 --hidden 12 --heads 2 --seq-len 8 --vocab-size 16 --global-batch 24 --dtype float64 --dropout 0.1"
ORDERED = f"{SMALL} --reduction ordered --steps 5"


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def period(folder, number, flags):
    """Take step `number` of a run, resumed if it is not the first one, and save."""
    config = config_for(f"{ORDERED} {flags}" + (f" --resume {folder}" if number else ""))

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm)
        trainer.step(number)
        trainer.save(folder, number + 1)
        return trainer.state_dict()

    return run_local(ranks_of(config), rank)[0]


def manifest_of(folder, step):
    return json.loads((folder / f"step-{step:08d}" / "manifest.json").read_text())


def test_the_manifest_keeps_every_period_in_order(tmp_path):
    layouts = ["--dp 2", "--tp 2 --lr 0.01", "--dp 3", "--pp 1"]
    for number, flags in enumerate(layouts):
        period(tmp_path, number, flags)
        history = manifest_of(tmp_path, number + 1)["history"]
        assert [each["step"] for each in history] == list(range(number + 1))
    values = [(each["flags"]["--dp"], each["flags"]["--tp"], each["flags"]["--lr"]) for each in history]
    assert values == [(2, 1, 0.001), (1, 2, 0.01), (3, 1, 0.001), (1, 1, 0.001)]


def test_each_resume_is_never_having_stopped(tmp_path):
    """Parameters, and all that a checkpoint has but the history and its file's size, after each of four periods."""
    whole = trainer_for(config_for(ORDERED), TOKENS)
    for number in range(4):
        state = period(tmp_path / "resumed", number, "")
        whole.step(number)
        whole.save(tmp_path / "whole", number + 1)
        assert bits(state) == bits(whole.state_dict())
        one, other = manifest_of(tmp_path / "resumed", number + 1), manifest_of(tmp_path / "whole", number + 1)
        for manifest in (one, other):
            del manifest["history"], manifest["checksum"]
        assert one == other  # files with their digests, steps of the optimizer, loss scale


@pytest.mark.parametrize("odd", [None, 0, 1, 2])
def test_one_period_with_other_sums_is_enough(odd, tmp_path):
    """... for `--verify` to expect other bits than one device's."""
    for number in range(3):
        period(tmp_path, number, "--dp 3" if number == odd else "--dp 2")
    config = config_for(f"{ORDERED} --dp 2 --resume {tmp_path}")
    outcomes = run_local(2, lambda comm: same_sums(open_checkpoint(config, TOKENS, comm), config))
    assert outcomes == [odd is None] * 2


def starts_at_step_0(folder, flags: str) -> bool:
    """Whether `--verify` trains one device from step 0, and not from the checkpoint."""
    config = config_for(f"{ORDERED} {flags} --resume {folder}")
    return repeatable(open_checkpoint(config, TOKENS, serial()), config)


@pytest.mark.parametrize("odd", [None, 0, 1, 2])
def test_one_period_with_another_update_is_enough(odd, tmp_path):
    """... for `--verify` to start from the checkpoint: one device has one learning rate."""
    for number in range(3):
        period(tmp_path, number, "--lr 0.5" if number == odd else "")
    assert starts_at_step_0(tmp_path, "--lr 0.001") == (odd is None)


def test_a_start_from_a_directory_is_remembered_for_ever(tmp_path):
    """`--verify` starts from the checkpoint at each later resume: the first step is not drawn from the seed."""
    for number in range(3):
        period(tmp_path, number, "")
        assert starts_at_step_0(tmp_path, "") == (number == 0)
        path = tmp_path / f"step-{number + 1:08d}" / "manifest.json"
        manifest = manifest_of(tmp_path, number + 1)
        manifest["history"][0]["flags"]["--init-from"] = "gpt2"
        rest = {key: value for key, value in manifest.items() if key != "checksum"}
        manifest["checksum"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(manifest))
        assert not starts_at_step_0(tmp_path, "")


def bytes_of_arrays(comm) -> int:
    return comm.traffic.bytes() - comm.traffic.bytes("control")


@pytest.mark.parametrize(
    "layout", ["--dp 2 --tp 2 --zero-stage 3", "--layers 2 --dp 3 --pp 2 --microbatches 2", "--dp 4"]
)
def test_neither_a_save_nor_a_resume_sends_parameters(layout, tmp_path):
    """Each rank writes and reads its own. ZeRO and pipelines give one another nothing either."""
    for number in range(2):
        config = config_for(f"{ORDERED} {layout}" + (f" --resume {tmp_path}" if number else ""))

        def rank(comm, config=config, number=number):
            trainer = trainer_for(config, TOKENS, comm)
            resumed = bytes_of_arrays(comm)
            trainer.step(number)
            before = bytes_of_arrays(comm)
            trainer.save(tmp_path, number + 1)
            return resumed, bytes_of_arrays(comm) - before

        assert run_local(ranks_of(config), rank) == [(0, 0)] * ranks_of(config)


# ---- digests on any number of ranks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_eight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    period(folder, 0, "--dp 4 --tp 2 --zero-stage 1")
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 11])
def test_each_files_digest_is_checked_on_any_number_of_ranks(ranks, of_eight):
    """A bit is flipped in one of 8 files after the other, and 1 to 11 ranks resume."""
    config = config_for(f"{ORDERED} --resume {of_eight}", 1)

    def rank(comm):
        with pytest.raises(UsageError) as caught:
            open_checkpoint(config, TOKENS, comm)
        return str(caught.value)

    paths = sorted(of_eight.glob("step-00000001/rank-*.safetensors"))
    assert len(paths) == 8
    for path in paths:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        try:
            messages = run_local(ranks, rank)
        finally:
            path.write_bytes(data)
        assert set(messages) == {f"{path}: its SHA-256 is not that of what was written: the file is corrupted"}
    assert run_local(ranks, lambda comm: open_checkpoint(config, TOKENS, comm).step) == [1] * ranks
