"""Claims about a run that `--verify` cannot check: its times, limits, refusals and and files."""

import json
import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from training import config_for, on_each_rank, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.train import __main__ as program
from minipar.train import trainer as trainer_module
from minipar.train.data import Tokens
from minipar.train.trainer import Trainer

TEXT = Tokens(np.random.Generator(np.random.Philox(6)).integers(0, 11, 200).astype(np.uint8), "random text", 11)
FLAGS = "--layers 2 --hidden 12 --heads 2 --seq-len 8 --vocab-size 11 --global-batch 12 --steps 2 --dtype float64"


def run_program(flags, ranks, folder, monkeypatch):
    """Run `python -m minipar.train` with these flags in this process, on threads."""
    (folder / "text").write_bytes(TEXT.ids.tobytes())
    monkeypatch.setattr(sys, "argv", ["minipar.train", *f"{FLAGS} --data {folder}/text {flags}".split()])
    with np.errstate():  # the program changes the process's settings
        return run_local(ranks, program.run)


# ---- what a step reports ---------------------------------------------------------------------------------------------


def test_seconds_are_a_whole_steps_and_tokens_all_replicas(monkeypatch):
    """On a clock that only a microbatch's forward (1 s), the optimizer (10 s) and a wait for the device (5 s) move."""
    clock = threading.local()
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def taking(seconds, function):
        def timed(*args):
            clock.now += seconds
            return function(*args)

        return timed

    def wait_for_device():
        clock.now += 5.0

    monkeypatch.setattr(trainer_module, "wait_for_device", wait_for_device)

    def rank(comm):
        clock.now = 100.0
        trainer = trainer_for(config, TEXT, comm)
        trainer.model.loss_sum = taking(1.0, trainer.model.loss_sum)
        trainer.optimizer.step = taking(10.0, trainer.optimizer.step)
        return [(result.seconds, result.tokens_per_second) for result in trainer.train()]

    config = config_for(f"{FLAGS} --dp 2 --microbatches 3")
    assert run_local(2, rank) == [[(18.0, 12 * 8 / 18.0)] * 2] * 2


# ---- what is refused -------------------------------------------------------------------------------------------------


def updated(flags):
    """How many elements each rank's optimizer updates."""
    config = config_for(f"{FLAGS} {flags}")
    return on_each_rank(config, TEXT, lambda trainer, results: sum(p.size for p in trainer.optimizer.parameters))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("other", ["--tp 2", "--pp 2 --microbatches 2"])
def test_the_memory_limit_is_for_a_rank_of_dp_not_of_the_world(other, stage):
    """The model state: parameters and gradients, and two means of the elements that are this rank's to update."""
    flags = f"--dp 2 {other}"
    pairs = zip(updated(flags), updated(f"{flags} --zero-stage {stage}"), strict=True)
    needed = 8 * max(2 * whole + 2 * own for whole, own in pairs)
    flags += f" --zero-stage {stage} --memory-limit"
    on_each_rank(config_for(f"{FLAGS} {flags} {needed}"), TEXT, lambda *_: None)
    with pytest.raises(UsageError, match=f"stage {stage} on 2 data-parallel ranks .* = {needed:,} bytes"):
        on_each_rank(config_for(f"{FLAGS} {flags} {needed - 1}"), TEXT, lambda *_: None)


@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
def test_ranks_that_read_different_texts_are_refused(flag, tmp_path):
    """Of the same length, under the same name: as a copy of a file that is stale on one host."""
    stale = TEXT.ids.copy()
    stale[77] += 1 if stale[77] < 10 else -1
    for rank, ids in enumerate((TEXT.ids, TEXT.ids, stale)):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "text").write_bytes(ids.tobytes())
        (tmp_path / f"{rank}" / "other").write_bytes(TEXT.ids.tobytes())

    def rank(comm, last):
        data, other = (tmp_path / str(min(comm.rank, last)) / name for name in ("text", "other"))
        files = (data, other) if flag == "--data" else (other, data)
        flags = f"{FLAGS} --eval-every 1 --data {files[0]} --eval-data {files[1]}"
        return program.prepare(config_for(flags, comm.size), None, comm)

    assert len(run_local(3, rank, 1)) == 3
    with pytest.raises(UsageError, match=f"not the same text on every rank; give {flag} a file that all hosts share"):
        run_local(3, rank, 2)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_norm_that_is_not_finite_ends_the_run(value, tmp_path, monkeypatch, capsys):
    """The loss is finite: it is that of the parameters before the update."""

    class Overflows(Trainer):
        def _clip_grad_norm(self, max_norm):
            return super()._clip_grad_norm(max_norm) if self.optimizer.steps == 0 else value

    monkeypatch.setattr(program, "Trainer", Overflows)
    with pytest.raises(UsageError, match=rf"diverged: loss 2\.\d+ and gradient norm {value} in step 2"):
        run_program("", 1, tmp_path, monkeypatch)
    assert "step 1/2" in capsys.readouterr().out


def test_values_that_an_exports_dtype_cannot_hold_are_refused(tmp_path, monkeypatch):
    """One step moves each parameter by about the learning rate, which is more than fp16 can hold."""
    flags = f"--lr 1e6 --steps 1 --export {tmp_path}/model --export-dtype fp16"
    with pytest.raises(UsageError, match=r"--export: \S+ has values that are too large for float16"):
        run_program(flags, 1, tmp_path, monkeypatch)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_networks_prices_are_alpha_and_then_beta(tmp_path, monkeypatch):
    """Of every message in the trace, which is a second under way, and a microsecond for each of its bytes."""
    path = tmp_path / "trace.json"
    run_program(f"--clock model --network 1 1e-6 --trace {path}", 2, tmp_path, monkeypatch)
    ends = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["name"] == "message":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    late = [pair["f"]["ts"] - pair["s"]["ts"] - (1e6 + pair["s"]["args"]["bytes"]) for pair in ends.values()]
    assert len(late) > 10 and min(late) > -1.0  # microseconds; later only where a rank waits for another message too
    assert sum(abs(each) < 1.0 for each in late) > len(late) / 2


def test_a_checkpoint_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """Otherwise a power cut can leave the name with files that are empty."""
    events, sync, rename = [], os.fsync, os.rename

    def note_sync(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def note_rename(old, new):
        events.append("rename")
        rename(old, new)

    def save(comm):
        trainer_for(config, TEXT, comm).save(tmp_path, 1)

    config = config_for(f"{FLAGS} --dp 2 --zero-stage 1")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    run_local(2, save)
    checkpoint = tmp_path / "step-00000001"
    files = {path.stat().st_ino for path in checkpoint.iterdir()}
    assert len(files) == 3 and events.count("rename") == 1
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert files <= set(before[:-1]) and before[-1] == checkpoint.stat().st_ino  # the directory after its files
    assert after == [tmp_path.stat().st_ino]
