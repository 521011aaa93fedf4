"""Claims about the validation loss: the same in every layout, on text that training does not see."""

from functools import cache

import numpy as np
import pytest
from combinations import value
from training import config_for, ranks_of, reports, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.train.data import SAMPLES, Tokens, load_tokens

SHAPE = "--layers 4 --hidden 24 --heads 4 --seq-len 8 --global-batch 24 --steps 2 --eps 1e-5"
FLAGS = f"{SHAPE} --dtype float64 --reduction ordered"
TEXT = Tokens(load_tokens(None, vocab_size=256, seq_len=8).ids[:5000], "a text")
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
    return config_for(f"{FLAGS} {flags}")


def train(flags, evaluate=True):
    """Every rank's ([loss and norm of each step], [validation loss after each step])."""
    args = config_of(flags)
    tokens, held_out = TEXT.hold_out(args.seq_len)

    def rank(comm):
        trainer, results, losses = trainer_for(args, tokens, comm), [], []
        for result in trainer.train():
            results.append(result)
            if evaluate:
                losses.append(trainer.validation_loss(held_out))
        return reports(results), losses

    return run_local(ranks_of(args), rank)


@cache
def losses_of_one_device(flags):
    return tuple(train(flags)[0][1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports_the_same_validation_loss(layout):
    batch = f"--global-batch {value(layout, '--global-batch', '24')} --dtype {value(layout, '--dtype', 'float64')}"
    expected = losses_of_one_device(batch)
    for _, losses in train(layout):
        assert losses == pytest.approx(expected, rel=1e-12, abs=0)


def test_the_validation_loss_is_the_models_mean_loss():
    trainer = trainer_for(config_of("--dropout 0.1"), TEXT)  # which an evaluation leaves out
    _, held_out = TEXT.hold_out(8)
    expected = trainer.model.loss(held_out[:, :-1], held_out[:, 1:]).item()
    assert trainer.validation_loss(held_out) == pytest.approx(expected, rel=1e-9)
    assert held_out.shape == (62, 9)


@pytest.mark.parametrize("flags", ["--dp 2 --zero-stage 3", "--pp 2 --microbatches 2 --dropout 0.1"])
def test_evaluating_changes_no_bit_of_the_training(flags):
    evaluated = [results for results, _ in train(flags)]
    assert evaluated == [results for results, _ in train(flags, evaluate=False)]


# ---- what is held out ------------------------------------------------------------------------------------------------


def test_the_held_out_text_is_not_trained_on():
    tokens, held_out = TEXT.hold_out(8)
    end = TEXT.ids[-500:].astype(np.int64)
    assert np.array_equal(tokens.ids, TEXT.ids[:-500]) and tokens.name == TEXT.name
    assert np.array_equal(held_out[0], end[:9])
    assert np.array_equal(held_out[-1], end[488:497]) and len(held_out) == 62
    numbered = Tokens(np.arange(60_000, dtype=np.uint16), "a long text")
    rest, held_out = numbered.hold_out(8)
    assert len(rest.ids) == 60_000 - (SAMPLES * 8 + 1)
    assert np.array_equal(held_out, 60_000 - 513 + np.arange(SAMPLES)[:, None] * 8 + np.arange(9))


@pytest.mark.parametrize(
    ("tokens", "kept", "starts"), [(90, 9, [0]), (169, 16, [0]), (170, 17, [0, 8]), (259, 25, [0, 8, 16])]
)
def test_a_tenth_is_held_out_in_whole_samples(tokens, kept, starts):
    """A sample of 8 tokens needs the token after it, too; the samples are spread from the first token to the last."""
    rest, held_out = Tokens(np.arange(tokens, dtype=np.uint16), "a text").hold_out(8)
    assert len(rest.ids) == tokens - kept
    assert (held_out[:, 0] - (tokens - kept)).tolist() == starts


def test_a_text_too_short_to_hold_out_is_refused():
    with pytest.raises(UsageError, match="a text .* 9"):
        Tokens(TEXT.ids[:89], "a text").hold_out(8)
