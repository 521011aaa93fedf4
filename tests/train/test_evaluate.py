"""Claims about the validation loss: the same in every layout to the last digit, on text that training does not see."""

import json
from functools import cache

import numpy as np
import pytest
from launcher import run_each
from training import ranks_of, trainer_for

from minipar.autograd import Tensor
from minipar.comm import DeviceMesh, run_local, serial
from minipar.errors import UsageError
from minipar.train.config import parse, resolve
from minipar.train.data import SAMPLES, Tokens, hold_out, load_tokens
from minipar.train.evaluate import DIGITS, validation_loss
from minipar.train.trainer import Trainer

pytestmark = pytest.mark.sampled(3)

SHAPE = "--layers 4 --hidden 24 --heads 4 --seq-len 8 --global-batch 24 --steps 2 --eps 1e-5 --dropout 0.1"
FLAGS = f"{SHAPE} --dtype float64 --reduction ordered --eval-every 1"
TEXT = Tokens(load_tokens(None, vocab_size=256, seq_len=8).ids[:5000], "a text", 256)
LAYOUTS = {
    "dp 2": "--dp 2",
    "dp 3, stage 1": "--dp 3 --zero-stage 1",
    "dp 5, stage 3, a last sample for one rank of five alone": "--dp 5 --zero-stage 3 --global-batch 30",
    "tp 4": "--tp 4",
    "tp 2, sequence": "--tp 2 --sequence-parallel",
    "pp 4": "--pp 4 --microbatches 2",
    "interleaved, stage 3": "--dp 2 --pp 2 --microbatches 2 --schedule interleaved-1f1b --zero-stage 3",
    "zbv": "--pp 2 --microbatches 2 --schedule zbv",
    "3D, sequence, stage 3": "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 3 --sequence-parallel",
    "recompute": "--recompute full",
    "cp 2 x dp 2": "--cp 2 --dp 2 --context-parallel ulysses",
    "cp 2 x pp 2, stage 3": "--cp 2 --dp 1 --pp 2 --microbatches 2 --zero-stage 3 --context-parallel ulysses",
}


def config_of(flags):
    words = f"{FLAGS} {flags}".split()
    mesh = parse(words).mesh
    return resolve(parse(words), (mesh.dp or 1) * mesh.cp * mesh.tp * mesh.pp)


def train(flags, steps=2):
    """Every rank's ([loss and norm of each step], [validation loss after each step])."""
    config = config_of(flags)
    tokens, evaluation = hold_out(config, TEXT)

    def rank(comm):
        trainer, results, losses = trainer_for(config, tokens, comm), [], []
        for step in range(steps):
            result = trainer.step(step)
            results.append((result.loss, result.grad_norm))
            losses.append(validation_loss(trainer, evaluation) if evaluation is not None else None)
        return results, losses

    return run_local(ranks_of(config), rank)


@cache
def losses_of_one_device(flags):
    return tuple(train(flags)[0][1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports_the_same_validation_loss(layout):
    flags = LAYOUTS[layout]
    batch = "--global-batch 30" if "30" in flags else ""
    assert {tuple(losses) for _, losses in train(flags)} == {losses_of_one_device(batch)}


def test_the_validation_loss_is_the_models_mean_loss():
    config = config_of("")
    tokens, evaluation = hold_out(config, TEXT)
    trainer = Trainer(config, DeviceMesh(serial()), tokens)
    inputs = np.stack([evaluation.tokens.ids[s : s + 8] for s in evaluation.starts]).astype(np.int64)
    targets = np.stack([evaluation.tokens.ids[s + 1 : s + 9] for s in evaluation.starts]).astype(np.int64)
    assert validation_loss(trainer, evaluation) == pytest.approx(trainer.model.loss(inputs, targets).item(), rel=1e-9)
    assert len(evaluation.starts) == 62 and len(evaluation.tokens.ids) == 500


def test_losses_are_added_in_the_order_of_the_samples():
    """From left to right 1 is left. From right to left it would be 0, and in pairs 2."""
    config = config_of("--dp 1")
    tokens, evaluation = hold_out(config, TEXT)
    trainer = trainer_for(config, tokens)
    losses = iter([1e16, 1.0, -1e16, 1.0, *[0.0] * 58])
    trainer.model.loss_sum = lambda x, y: Tensor(np.array(next(losses)))
    assert validation_loss(trainer, evaluation) == pytest.approx(1 / (62 * 8), rel=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "digits"), [("bf16", 3), ("fp16", 4), ("float32", 5), ("float64", 10)])
def test_the_loss_has_the_digits_that_every_layout_agrees_on(dtype, digits):
    config = config_of(f"--dtype {dtype}")
    tokens, evaluation = hold_out(config, TEXT)
    trainer = trainer_for(config, tokens)
    trainer.model.loss_sum = lambda x, y: Tensor(np.array(8 * 1.23456789012345))
    assert validation_loss(trainer, evaluation) == float(f"{1.23456789012345:.{digits}g}")


@pytest.mark.parametrize("flags", ["--dp 2 --zero-stage 3", "--pp 2 --microbatches 2"])
def test_evaluating_changes_no_bit_of_the_training(flags, tmp_path):
    (tmp_path / "eval.txt").write_bytes(TEXT.ids[:1000].tobytes())
    evaluated = train(f"{flags} --eval-data {tmp_path}/eval.txt --eval-every 1")
    config = config_of(flags)

    def rank(comm):
        trainer = Trainer(config, DeviceMesh(comm, dp=config.mesh.dp, pp=config.mesh.pp), TEXT)
        return [(result.loss, result.grad_norm) for result in trainer.train()]

    assert [results for results, _ in evaluated] == run_local(2, rank)


def test_the_held_out_text_is_not_trained_on():
    config = config_of("")
    tokens, evaluation = hold_out(config, TEXT)
    assert np.array_equal(np.concatenate([tokens.ids, evaluation.tokens.ids]), TEXT.ids)
    long = Tokens(np.zeros(10**6, np.uint8), "a long text", 256)
    assert len(hold_out(config, long)[1].tokens.ids) == SAMPLES * 8 + 1
    assert np.diff(hold_out(config, long)[1].starts).tolist() == [8] * (SAMPLES - 1)
    assert hold_out(resolve(parse([]), 1), TEXT) == (TEXT, None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tokens", "kept", "starts"), [(90, 9, [0]), (169, 16, [0]), (170, 17, [0, 8]), (259, 25, [0, 8, 16])]
)
def test_a_tenth_is_held_out_in_whole_samples(tokens, kept, starts):
    """A sample of 8 tokens needs the token after it, too; the samples are spread from the first token to the last."""
    text = Tokens(np.zeros(tokens, np.uint8), "a text", 256)
    rest, evaluation = hold_out(config_of(""), text)
    assert (len(rest.ids), len(evaluation.tokens.ids)) == (tokens - kept, kept)
    assert evaluation.starts.tolist() == starts


def test_a_text_too_short_to_hold_out_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a tenth of the 89 tokens of a text is less than a sample, seq-len . 1 = 9"):
        hold_out(config_of(""), Tokens(TEXT.ids[:89], "a text", 256))
    with pytest.raises(UsageError, match="^--eval-data x does nothing without --eval-every K$"):
        parse(["--eval-data", "x"])
    (tmp_path / "short").write_bytes(b"12345678")
    with pytest.raises(UsageError, match="holds 8 tokens"):
        hold_out(config_of(f"--eval-data {tmp_path}/short"), TEXT)
    with pytest.raises(UsageError, match="^--eval-data .*nowhere cannot be read: No such file"):
        hold_out(config_of(f"--eval-data {tmp_path}/nowhere"), TEXT)


@pytest.mark.long
def test_the_command_line_reports_the_validation_loss(tmp_path):
    """Under mpirun, over a resume that repeats no flag, in the metrics and on the screen."""
    flags = f"{SHAPE} --dtype float64 --eval-every 2 --steps 3".split()
    losses = []
    for ranks, layout in ((1, []), (2, ["--tp", "2"])):
        path, run = tmp_path / f"{ranks}.jsonl", tmp_path / f"run{ranks}"
        first = [*flags, *layout, "--metrics", str(path), "--save", str(run), "--verify"]
        then = ["--resume", str(run), "--steps", "4", "--metrics", str(path), *layout]
        before, result = run_each(ranks, [["minipar.train", *first], ["minipar.train", *then]])
        assert before.returncode == 0, before.stderr
        assert result.returncode == 0 and result.stderr == "", result.stderr
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert ["eval_loss" in line for line in lines] == [False, True, True, True]
        assert f"  eval loss {lines[-1]['eval_loss']:g}\n" in result.stdout
        losses.append([line.get("eval_loss") for line in lines])
    assert losses[0] == losses[1] and DIGITS["float64"] == 10
