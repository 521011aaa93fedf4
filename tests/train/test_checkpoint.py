"""Claims about checkpoints: resuming is never having stopped, whatever layout wrote them and whatever goes on."""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import training
from launcher import run_mpi
from training import bits, on_each_rank, open_checkpoint, ranks_of, trainer_for, verdicts

from chapters.support.whole_runs import layer_scales, relative_difference
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn.pretrained import load_pretrained, save_pretrained
from minipar.train.checkpoint import KINDS, MANIFEST, Checkpoint, checkpoints, prepare_directory
from minipar.train.data import Tokens, load_tokens
from minipar.train.progress import Metrics
from minipar.train.resume import same_sums
from minipar.train.trainer import StepResult, Trainer

pytestmark = pytest.mark.sampled(3)

# Heads that 1, 2 and 4 ranks share, and buckets (6,016; 10,740) and a vocabulary that they do not divide.
SHAPE = "--layers 4 --hidden 20 --heads 4 --seq-len 8 --vocab-size 257 --dtype float64 --weight-decay 0.1 --dropout 0.1"
STEPS, SAVED = 4, 2
TOKENS = Tokens(load_tokens(None, vocab_size=257, seq_len=8).ids[:5000], "a text", 257)

SAMPLES = "--global-batch 24 --reduction ordered"
LAYOUTS = {
    "1 rank": "",
    "dp 2": "--dp 2 --microbatches 2",
    "dp 2, stage 1": "--dp 2 --microbatches 2 --zero-stage 1",
    "dp 2, stage 3": "--dp 2 --microbatches 2 --zero-stage 3",
    "dp 2 x pp 2": "--dp 2 --pp 2 --microbatches 2",
    "dp 2 x pp 4, zero bubble, stage 2": "--dp 2 --pp 4 --microbatches 2 --schedule zb-h1 --zero-stage 2",
    "dp 2 x pp 2, interleaved": "--dp 2 --pp 2 --microbatches 2 --schedule interleaved-1f1b --zero-stage 1",
    "dp 3": "--dp 3",
    "dp 3, stage 2, ring": "--dp 3 --zero-stage 2 --reduction ring",
    "tp 4": "--tp 4",
    "tp 2, sequence": "--tp 2 --sequence-parallel",
    "dp 2 x tp 2 x pp 2, stage 3": "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 3",
    "dp 3 x tp 2, stage 1, sequence": "--dp 3 --tp 2 --zero-stage 1 --sequence-parallel",
    "pp 3 x tp 2": "--pp 3 --tp 2 --microbatches 3 --schedule gpipe",
    "dp 8, stage 3": "--dp 8 --zero-stage 3",
    "dp 4, stage 3, two replicas": "--dp 4 --zero-stage 3 --zero-replicas 2",
    "dp 4 x tp 2, stage 1, two replicas": "--dp 4 --tp 2 --zero-stage 1 --zero-replicas 2",
    "cp 2, stage 1": "--dp 1 --cp 2 --zero-stage 1 --context-parallel ulysses",
    "dp 2 x cp 2 x tp 2, stage 3, Ulysses": "--dp 2 --cp 2 --tp 2 --zero-stage 3 --context-parallel ulysses",
}
# Those that add the same numbers in the same order, and so train the same bits as one another.
ALIKE = {name for name, flags in LAYOUTS.items() if "--dp 2" in flags and "--tp" not in flags}
# Written under one and resumed under the other: under itself, and each under two others.
NAMES = list(LAYOUTS)
PAIRS = [(a, NAMES[(i + k) % len(NAMES)]) for i, a in enumerate(NAMES) for k in (0, 1, 4)]


def config_for(flags, steps=STEPS):
    return training.config_for(f"{SHAPE} --steps {steps} {SAMPLES} {flags}")


def run(flags, save_to=None, resume=None, steps=STEPS, stop=None):
    """Rank 0's (parameters, losses and norms, optimizer steps), after the run and a save in step `stop` or at its end.

    Every rank's optimizer state is compared too: it is what a checkpoint of the final step holds.
    """
    config = config_for(f"{flags} --resume {resume}" if resume else flags, steps)

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm)
        results = []
        for result in trainer.train():
            results.append((result.step, result.loss, result.grad_norm))
            if save_to is not None and result.step + 1 in (stop, steps):
                trainer.save(save_to, result.step + 1)
        exact = same_sums(trainer.checkpoint, config)
        return trainer.state_dict(), results, trainer.optimizer.steps, exact

    return run_local(ranks_of(config), rank)[0]


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    """Nobody cuts the power in here; under mpirun below files are synced."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """layout -> (what a run of all steps gives, its directory with checkpoints of steps SAVED and STEPS)."""

    @cache
    def of(layout):
        folder = tmp_path_factory.mktemp("whole")
        return run(LAYOUTS[layout], folder, stop=SAVED), folder

    return of


def contents(folder, step):
    """Everything that a checkpoint holds, as the serial model's arrays."""
    place = folder / f"step-{step:08d}"
    checkpoint = Checkpoint(place, (place / MANIFEST).read_bytes())
    return {f"{kind}/{name}": checkpoint.array(kind, name) for kind in KINDS for name in checkpoint.shapes}


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_resuming_under_any_layout_is_never_having_stopped(saved, resumed, never_stopped, tmp_path):
    """To the bit where the layout is the same or adds in the same order; else within the bound of so many steps."""
    _, folder = never_stopped(saved)
    (state, results, _, _), whole = never_stopped(resumed)
    path = folder / f"step-{SAVED:08d}"
    resumed_state, resumed_results, steps, promised = run(LAYOUTS[resumed], tmp_path, resume=path)
    assert steps == STEPS and [step for step, *_ in resumed_results] == [2, 3]
    exact = saved == resumed or {saved, resumed} <= ALIKE
    assert promised == exact  # what --verify will hold it to
    if exact:
        assert bits(resumed_state) == bits(state) and resumed_results == results[SAVED:]
        assert bits(contents(tmp_path, STEPS)) == bits(contents(whole, STEPS))
        return
    scales = layer_scales(state)
    assert max(relative_difference(resumed_state[name], state[name], scales[name]) for name in state) <= 1e-12 * STEPS
    np.testing.assert_allclose(resumed_results, results[SAVED:], rtol=1e-12 * STEPS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_loaded_is_what_was_saved_to_the_bit(layout, never_stopped, tmp_path):
    """... under any layout and through two of them: saved by one, by the next without a step, and compared whole."""
    config = config_for(f"{LAYOUTS[layout]} --resume {never_stopped('dp 3')[1]}")

    run_local(ranks_of(config), lambda comm: trainer_for(config, TOKENS, comm).save(tmp_path, STEPS))
    assert bits(contents(tmp_path, STEPS)) == bits(contents(never_stopped("dp 3")[1], STEPS))


def test_a_device_saves_and_resumes_too(device, tmp_path):
    trainer = trainer_for(config_for("--steps 3"), TOKENS)
    trainer.step(0)
    trainer.save(tmp_path, 1)
    again = trainer_for(config_for(f"--steps 3 --resume {tmp_path}"), TOKENS)
    for each in (trainer, again):
        each.step(1)
    assert bits(again.state_dict()) == bits(trainer.state_dict())


def test_clipping_is_the_same_sum_only_with_the_same_buckets(tmp_path):
    """A pipeline's buckets are other ones, and the norm is summed by bucket."""
    run("--pp 2 --microbatches 2", tmp_path, steps=1)
    for flags, alike in (("--pp 4", True), ("", True), ("--clip-grad 1", False), ("--pp 4 --clip-grad 1", True)):
        config = config_for(f"{flags} --microbatches 2 --resume {tmp_path}")
        outcomes = run_local(ranks_of(config), lambda comm, c=config: same_sums(open_checkpoint(c, TOKENS, comm), c))
        assert set(outcomes) == {alike}


def test_every_rank_writes_its_share_and_none_twice(never_stopped):
    for layout in LAYOUTS:
        config, place = config_for(LAYOUTS[layout]), never_stopped(layout)[1] / f"step-{STEPS:08d}"
        manifest = json.loads((place / "manifest.json").read_text())
        files = manifest["files"]
        assert len(files) == ranks_of(config)
        counts = [sum(piece["stop"] - piece["start"] for piece in file["pieces"]) for file in files]
        padded = 3 * 20 if config.mesh.tp == 4 else 20 if config.mesh.tp == 2 else 0  # 257 rows, made divisible
        assert sum(counts) == 257 * 20 + 8 * 20 + 40 + 4 * 5060 + padded
        shards = counts[: len(counts) // config.mesh.zero_replicas]
        assert config.mesh.zero_replicas == 1 or not any(counts[len(shards) :])  # the first of equal shards are written
        if config.mesh.tp == config.mesh.pp == 1:  # the same work for all, in stage 0 too, within one for each bucket
            assert max(shards) - min(shards) <= 5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_export_is_the_serial_model_from_dp_x_tp_x_pp(stage, tmp_path):
    config = config_for(f"--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage {stage} --dropout 0")
    one_state, *_ = run("--dropout 0")

    def export(trainer, results):
        state = trainer.state_dict()
        if trainer.mesh.world.rank == 0:
            save_pretrained(trainer.model, tmp_path, state)

    on_each_rank(config, TOKENS, export)
    exported = load_pretrained(tmp_path, dtype="float64").state_dict()
    scales = layer_scales(one_state)
    assert list(exported) == list(one_state)
    for name, array in one_state.items():
        assert relative_difference(exported[name], array, scales[name]) <= 1e-12 * STEPS


# ---- on the way ------------------------------------------------------------------------------------------------------


def test_the_last_two_checkpoints_are_kept_and_a_leftover_goes(tmp_path):
    leftover = tmp_path / "step-00000001.partial"
    leftover.mkdir()
    (leftover / "rank-00000.safetensors").write_bytes(b"half of")
    (tmp_path / "metrics.jsonl").write_text("not a checkpoint, and not ours to remove\n")
    config = config_for("--dp 2", steps=4)

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm)
        for result in trainer.train():
            trainer.save(tmp_path, result.step + 1)

    run_local(2, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "step-00000003", "step-00000004"]


def test_a_run_does_not_save_among_the_checkpoints_of_another(tmp_path, never_stopped):
    run("", tmp_path, steps=3)
    with pytest.raises(UsageError, match="holds a checkpoint of step 3, but this run starts at step 2: --resume that"):
        prepare_directory(str(tmp_path), 2)
    prepare_directory(str(tmp_path), 3)


def test_the_directories_above_the_checkpoints_are_made(tmp_path):
    prepare_directory(str(tmp_path / "runs" / "first"), 0)
    assert (tmp_path / "runs" / "first").is_dir()


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
    config = config_for("--dp 3", steps=2)

    def rank(comm):
        trainer = trainer_for(config, TOKENS, comm)
        try:
            for result in trainer.train():
                trainer.save(tmp_path, result.step + 1)
        except UsageError as error:
            return str(error)

    errors = run_local(3, rank)
    assert len(set(errors)) == 1 and "rank 1: [Errno 28] No space left on device" in errors[0]
    assert [step for step, _ in checkpoints(tmp_path)] == [1]
    assert run("--dp 3", resume=tmp_path)[2] == STEPS


def test_the_command_line_resumes_under_another_layout(tmp_path):
    common = f"{SHAPE} --global-batch 8 --reduction ordered --metrics {tmp_path}/m.jsonl".split()
    first = f"--dp 2 --microbatches 2 --save {tmp_path}/a --steps 4 --save-every 3".split()
    result = run_mpi(2, ["-m", "minipar.train", *common, *first], timeout=60)
    assert result.returncode == 0, result.stderr
    assert [step for step, _ in checkpoints(tmp_path / "a")] == [3, 4]
    then = f"--resume {tmp_path}/a/step-00000003 --dp 2 --pp 2 --microbatches 2 --steps 6 --verify --zero-stage 2"
    result = run_mpi(4, ["-m", "minipar.train", *common, *then.split()], timeout=60)
    assert result.returncode == 0, result.stderr
    assert "verify: 4 ranks = 1 device, bit for bit" in result.stdout
    assert "in each of 3 steps, resumed after 3, as one device that never stopped" in result.stdout
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == list(range(6))


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
def test_verify_catches_state_that_is_not_resumed(kind, never_stopped):
    config = config_for(f"--dp 3 --verify --resume {never_stopped('dp 3')[1]}/step-{SAVED:08d}")
    for verdict in verdicts(config, TOKENS, kind):
        assert not verdict.passed and "FAILED" in verdict.line
