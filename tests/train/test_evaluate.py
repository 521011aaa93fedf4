"""Claims about the validation loss: the same in every layout to the last digit, on text that training does not see."""

import json
from functools import cache

import numpy as np
import pytest
from training import ranks_of, trainer_for

from minipar.autograd import Tensor
from minipar.comm import DeviceMesh, run_local, serial
from minipar.errors import UsageError
from minipar.train import __main__ as program
from minipar.train.config import parse, resolve
from minipar.train.data import SAMPLES, Tokens, hold_out, load_tokens
from minipar.train.evaluate import validation_loss
from minipar.train.trainer import Trainer

SHAPE = "--layers 4 --hidden 24 --heads 4 --seq-len 8 --global-batch 24 --steps 2 --eps 1e-5 --dropout 0.1"
FLAGS = f"{SHAPE} --dtype float64 --reduction ordered --eval-every 1"
TEXT = Tokens(load_tokens(None, vocab_size=256, seq_len=8).ids[:5000], "a text", 256)
LAYOUTS = [
    "--dp 3 --zero-stage 1",
    "--dp 5 --zero-stage 3 --global-batch 30",  # a last sample for one rank of five alone
    "--tp 2 --sequence-parallel",
    "--pp 4 --microbatches 2",
    "--dp 2 --pp 2 --microbatches 2 --schedule interleaved-1f1b --zero-stage 3",
    "--pp 2 --microbatches 2 --schedule zbv --recompute full",
    "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 3 --sequence-parallel",
    "--cp 2 --pp 2 --microbatches 2 --zero-stage 3 --context-parallel ulysses",
]


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports_the_same_validation_loss(layout):
    batch = "--global-batch 30" if "30" in layout else ""
    assert {tuple(losses) for _, losses in train(layout)} == {losses_of_one_device(batch)}


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
    with pytest.raises(UsageError, match="89 tokens.* 9"):
        hold_out(config_of(""), Tokens(TEXT.ids[:89], "a text", 256))
    (tmp_path / "short").write_bytes(b"12345678")
    with pytest.raises(UsageError, match="short holds 8 tokens"):
        hold_out(config_of(f"--eval-data {tmp_path}/short"), TEXT)
    with pytest.raises(UsageError, match="--eval-data .*nowhere"):
        hold_out(config_of(f"--eval-data {tmp_path}/nowhere"), TEXT)


def test_a_resumed_run_goes_on_evaluating(tmp_path):
    """Over a resume that repeats no flag, in another layout, in the metrics."""
    flags = f"{SHAPE} --dtype float64 --steps 3 --eval-every 2 --vocab-size 256"
    (tmp_path / "text").write_bytes(TEXT.ids.tobytes())
    first = f"{flags} --data {tmp_path}/text --metrics {tmp_path}/m.jsonl --save {tmp_path}/run"
    then = f"--resume {tmp_path}/run --steps 4 --metrics {tmp_path}/m.jsonl"
    with np.errstate():  # the program changes the process's settings
        for words in (first, then):
            assert program.run_job(parse(words.split()), serial()) == 0
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert ["eval_loss" in line for line in lines] == [False, True, True, True]
