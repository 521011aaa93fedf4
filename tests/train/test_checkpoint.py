"""Claims about checkpoints: resuming is never having stopped, whatever layout wrote them and whatever goes on.

tests/release/train/test_checkpoint.py has more pairs of layouts.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import bits, on_each_rank, open_checkpoint, ranks_of, run_until, trainer_for, verdicts

from chapters.support.whole_runs import layer_scales, relative_difference
from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.nn.pretrained import load_pretrained
from minipar.parallel.state import gather_state
from minipar.train.checkpoint import checkpoints, prepare_directory
from minipar.train.config import parse
from minipar.train.progress import Metrics, write_export
from minipar.train.resume import continued, find_checkpoint, repeatable, same_sums
from minipar.train.settings import TrainConfig, flags
from minipar.train.trainer import StepResult, Trainer

RUN = "--layers 4 --hidden 20 --heads 4 --global-batch 24 --steps 4 --weight-decay 0.1 --dropout 0.1"
BITS = "bit for bit"
THREE_AXES = "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 3"
ULYSSES = "--cp 2 --context-parallel ulysses"
PAIRS = [  # written under one and resumed under the other
    ("", "", BITS),
    ("--dp 3", "--dp 3", BITS),
    ("--dp 8 --zero-stage 3", "--dp 8 --zero-stage 3", BITS),
    (THREE_AXES, THREE_AXES, BITS),
    ("--dp 2 --microbatches 2 --zero-stage 1", "--dp 2 --pp 4 --microbatches 2 --schedule zb-h1 --zero-stage 2", BITS),
    ("--dp 2 --pp 2 --microbatches 2 --schedule interleaved-1f1b", "--dp 2 --microbatches 2 --zero-stage 3", BITS),
    ("--dp 3 --zero-stage 2 --reduction ring", "--tp 2 --sequence-parallel", ""),
    ("--tp 4", THREE_AXES, ""),
    ("--dp 3 --tp 2 --zero-stage 1 --sequence-parallel", "--dp 4 --zero-stage 3 --zero-replicas 2", ""),
    ("--pp 3 --tp 2 --microbatches 3 --schedule gpipe", "--dp 8 --zero-stage 3", ""),
    (f"{ULYSSES} --zero-stage 1", f"{ULYSSES} --tp 2", ""),
]


def config_for(flags):
    return config_of(f"{RUN} --seq-len 8 {flags}")


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(("saved", "resumed", "how"), PAIRS)
def test_resuming_under_any_layout_is_never_having_stopped(saved, resumed, how, tmp_path):
    """To the bit where the layout is the same or adds in the same order; else within the bound of so many steps."""
    state, whole = run_until(TEXT, config_for(resumed))
    run_until(TEXT, config_for(saved), tmp_path, 2)
    config = config_for(f"{resumed} --resume {tmp_path}")
    again, later = run_until(TEXT, config)
    if how == BITS:
        assert bits(again) == bits(state) and later == whole[2:]
        return
    scales = layer_scales(state)
    assert max(relative_difference(again[name], state[name], scales[name]) for name in state) <= 4e-12
    np.testing.assert_allclose(later, whole[2:], rtol=4e-12)


def test_a_device_saves_and_resumes_too(device, tmp_path):
    state, whole = run_until(TEXT, config_for("--dp 2 --zero-stage 2"))
    run_until(TEXT, config_for("--dp 2 --zero-stage 2"), tmp_path, 1)
    again, later = run_until(TEXT, config_for(f"--dp 2 --zero-stage 2 --resume {tmp_path}"))
    assert bits(again) == bits(state) and later == whole[1:]


# ---- the state -------------------------------------------------------------------------------------------------------


def all_state(trainer):
    """Every field of the state of optimizer and loss scale, on rank 0: arrays of the serial model, and numbers."""
    optimizer, world = trainer.optimizer, trainer.mesh.world
    kept = [optimizer.moments(i) for i in range(len(optimizer.parameters))]
    arrays = {"value": optimizer.values()}
    for kind in kept[0]:
        arrays[kind] = [moments[kind] for moments in kept]
    found = {}
    for kind, values in arrays.items():
        whole = gather_state(trainer.model, optimizer.parameters, world, values)
        found |= {f"{kind} of {name}": array.tobytes() for name, array in whole.items()}
    for owner in (optimizer, trainer.scaler):
        for name, number in vars(owner).items():
            if isinstance(number, int | float | tuple) and name != "lr":  # the schedule sets it in each step
                found[f"{type(owner).__name__}.{name}"] = number
    return found


WRITERS = {
    "float64": "--betas 0.8 0.95",
    "fp16, whose first steps are skipped": "--dtype fp16 --skip-nonfinite --dropout 0",
}


READERS = ["--dp 2 --zero-stage 1", "--dp 1", "--dp 3 --zero-stage 3", "--tp 4", "--pp 2 --dp 2"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("writer", WRITERS)
def test_each_field_of_the_state_is_that_of_the_writer(writer, tmp_path):
    """Values, moments, masters, the count of updates, the loss scale with its counts: in the same and other layouts."""
    flags = WRITERS[writer]

    def write(comm):
        trainer = trainer_for(config_for(f"{flags} --dp 2 --zero-stage 1"), TEXT, comm)
        if "fp16" in writer:
            trainer.scaler.scale = 2.0**22  # so that gradients overflow at first
        for step in range(3):
            trainer.step(step)
        trainer.save(tmp_path, 3)
        return all_state(trainer)

    written = run_local(2, write)[0]
    if "fp16" in writer:
        assert 0 < written["AdamW.steps"] < 3 == written["AdamW.steps"] + written["LossScaler.skipped"]
        assert any(name.startswith("master of ") for name in written)
    for reader in READERS:
        config = config_for(f"{flags} {reader} --resume {tmp_path}")
        read = run_local(ranks_of(config), lambda comm, c=config: all_state(trainer_for(c, TEXT, comm)))[0]
        assert {name for name in written if read[name] != written[name]} == set(), reader
        assert set(read) == set(written)


LAYOUTS = ["--dp 8 --zero-stage 3", "--dp 4 --tp 2 --zero-stage 1 --zero-replicas 2", "--pp 2 --tp 2 --microbatches 2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_writes_its_share_and_none_twice(layout, tmp_path):
    config = config_for(f"{layout} --steps 1")
    run_local(ranks_of(config), lambda comm: trainer_for(config, TEXT, comm).save(tmp_path, 1))
    files = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["files"]
    counts = [sum(piece["stop"] - piece["start"] for piece in file["pieces"]) for file in files]
    padded = 20 if config.mesh.tp == 2 else 0  # 11 rows, made divisible
    assert sum(counts) == (11 + 8 + 2) * 20 + 4 * (12 * 20 * 20 + 13 * 20) + padded
    shards = counts[: len(counts) // config.mesh.zero_replicas]
    assert config.mesh.zero_replicas == 1 or not any(counts[len(shards) :])  # the first of equal shards are written
    if config.mesh.pp == 1 and config.mesh.tp == 1:
        assert max(shards) - min(shards) <= 5


@pytest.mark.parametrize("layout", ["--dp 2 --tp 2 --zero-stage 3", "--dp 3 --pp 2 --microbatches 2", "--dp 4"])
def test_neither_a_save_nor_a_resume_sends_parameters(layout, tmp_path):
    """Each rank writes and reads its own."""

    def arrays_sent(comm):
        return comm.traffic.bytes() - comm.traffic.bytes("control")

    for step in range(2):
        config = config_for(layout + (f" --resume {tmp_path}" if step else ""))

        def rank(comm, config=config, step=step):
            trainer = trainer_for(config, TEXT, comm)
            resumed = arrays_sent(comm)
            trainer.step(step)
            before = arrays_sent(comm)
            trainer.save(tmp_path, step + 1)
            return resumed, arrays_sent(comm) - before

        assert run_local(ranks_of(config), rank) == [(0, 0)] * ranks_of(config)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_export_from_three_axes_is_the_serial_model(stage, tmp_path):
    single, _ = run_until(TEXT, config_for(""))

    def export(trainer, results):
        state = trainer.state_dict()
        if state:
            write_export(trainer.model, str(tmp_path), state)

    on_each_rank(config_for(f"--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage {stage}"), TEXT, export)
    exported = load_pretrained(tmp_path, dtype="float64").state_dict()
    scales = layer_scales(single)
    assert list(exported) == list(single)
    assert all(relative_difference(exported[name], single[name], scales[name]) <= 4e-12 for name in single)


# ---- the directory ---------------------------------------------------------------------------------------------------


def test_the_last_two_checkpoints_are_kept_and_a_leftover_goes(tmp_path):
    leftover = tmp_path / "step-00000001.partial"
    leftover.mkdir()
    (leftover / "rank-00000.safetensors").write_bytes(b"half of")
    (tmp_path / "metrics.jsonl").write_text("not a checkpoint, and not ours to remove\n")

    def rank(comm):
        trainer = trainer_for(config_for("--dp 2"), TEXT, comm)
        for result in trainer.train():
            trainer.save(tmp_path, result.step + 1)

    run_local(2, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "step-00000003", "step-00000004"]


def test_a_run_does_not_save_among_the_checkpoints_of_another(tmp_path):
    run_until(TEXT, config_for(""), tmp_path, 3)
    with pytest.raises(UsageError, match="step 3.* step 2"):
        prepare_directory(str(tmp_path), 2)
    prepare_directory(str(tmp_path), 3)


def test_a_resumed_run_appends_to_its_metrics(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)]
    for first, kept in ((0, 0), (3, 3), (9, 5)):
        path.write_text("".join(lines) + '{"step": 5, "lo')  # killed while it wrote
        metrics = Metrics(str(path), first)
        metrics.write(StepResult(first, 0.5, 1.0, 0.1, 10.0))
        written = path.read_text().splitlines(keepends=True)  # a line is in the file when its step has ended
        metrics.close()
        assert written[:-1] == lines[:kept] and json.loads(written[-1])["step"] == first


def test_a_failed_write_is_every_ranks_error_and_harms_nothing(tmp_path, monkeypatch):
    whole = Path.write_bytes

    def full(path, data):
        if path.parent.name == "step-00000002.partial" and path.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device", str(path))
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)

    def rank(comm):
        trainer = trainer_for(config_for("--dp 3"), TEXT, comm)
        with pytest.raises(UsageError) as caught:
            for result in trainer.train():
                trainer.save(tmp_path, result.step + 1)
        return str(caught.value)

    errors = run_local(3, rank)
    assert len(set(errors)) == 1 and "rank 1" in errors[0] and "No space left on device" in errors[0]
    assert [step for step, _ in checkpoints(tmp_path)] == [1]
    assert len(run_until(TEXT, config_for(f"--dp 3 --resume {tmp_path}"))[1]) == 3


# ---- periods and flags -----------------------------------------------------------------------------------------------


def period(folder, number, flags):
    """Take step `number` of a run, resumed if it is not the first one, and save."""
    resume = f"--resume {folder}" if number else ""
    run_until(TEXT, config_for(f"{flags} {resume}"), folder, number + 1)


@pytest.mark.parametrize(("change", "odd"), [("", None), ("--dp 3", 0), ("--dp 3", 2), ("--lr 0.5", 1)])
def test_one_odd_period_is_enough_for_other_bits(change, odd, tmp_path):
    """One device that starts at step 0 has others: those of sums in another order, or of another update."""
    for number in range(3):
        period(tmp_path, number, f"--dp 2 {change if number == odd else ''}")
    config = config_for(f"--dp 2 --resume {tmp_path}")
    checkpoint = open_checkpoint(config, TEXT, serial())
    assert repeatable(checkpoint, config) == (odd is None)
    assert same_sums(checkpoint, config) == (change != "--dp 3")


def test_a_resumed_run_takes_all_that_decides_its_values(tmp_path):
    given = (
        "--order sequential --lr 3e-3 --lr-schedule cosine --warmup-steps 2 --betas 0.8 0.95 --eps 1e-7 "
        "--weight-decay 0.2 --dropout 0.2 --clip-grad 1 --seed 7 --eval-every 3"
    )
    written = config_for(f"--dp 2 --microbatches 2 {given}")
    run_until(TEXT, written, tmp_path, 2)
    config = parse(["--resume", str(tmp_path)])
    taken = continued(config, find_checkpoint(config, serial()))
    free = {"--dp", "--microbatches", "--resume"}
    for (_, _, flag, before), (_, _, _, after) in zip(flags(written), flags(taken), strict=True):
        assert before == after or flag in free, flag
    default = {flag: value for _, _, flag, value in flags(TrainConfig())}
    assert all(default[flag] != value for _, _, flag, value in flags(taken) if flag in given.split())
    config = parse(["--resume", str(tmp_path), "--steps", "9", "--lr", "0.5", "--tp", "4"])
    changed = continued(config, find_checkpoint(config, serial()))
    assert changed.optimizer == replace(taken.optimizer, steps=9, lr=0.5) and changed.mesh.tp == 4


def test_auto_starts_and_then_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse("--resume auto --save run".split())
    assert find_checkpoint(config, serial()) is None and not (tmp_path / "run").exists()
    run_until(TEXT, config_for(""), tmp_path / "run", 2)
    assert find_checkpoint(config, serial()).step == 2
    (tmp_path / "auto").symlink_to(tmp_path / "run")
    assert find_checkpoint(parse(["--resume", "./auto"]), serial()).step == 2


class ForgetsTheSecondMean(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        for mean in self.optimizer.exp_avg_sq:
            mean[...] = 0


class ForgetsTheStepCount(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.optimizer.steps = 0


@pytest.mark.parametrize("kind", [ForgetsTheSecondMean, ForgetsTheStepCount])
def test_verify_catches_state_that_is_not_resumed(kind, tmp_path):
    run_until(TEXT, config_for("--dp 3"), tmp_path, 2)
    for verdict in verdicts(config_for(f"--dp 3 --resume {tmp_path}"), TEXT, kind):
        assert not verdict.passed
