"""Chapter 13's small GPT: its runs are the trainer's, and each of the two changed trainers changes what it says."""

import numpy as np
import pytest

from chapters.support.ch13 import train
from minipar.comm import DeviceMesh, run_local
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens

SHORT = "--global-batch 8 --lr 5e-4 --steps 4"


def test_without_masters_weights_of_one_stay():
    (with_masters, moved), (without, untouched) = (
        train.train_precision("--dtype bf16", masters, run=SHORT) for masters in (True, False)
    )
    assert untouched == 1 > moved and with_masters[0] == without[0] and with_masters != without


def test_masters_matter_only_in_two_bytes():
    runs = [train.train_precision("", masters, run=SHORT) for masters in (True, False)]
    assert runs[0] == runs[1]


def test_sums_over_ranks_are_those_of_the_flags():
    """In fp32 they differ from one rank's by rounding, in bf16 by more."""
    losses = [
        np.array(train.train_precision(f"--dtype bf16 {flags}", ranks=ranks, run=SHORT)[0])
        for flags, ranks in (("", 1), ("", 4), ("--reduce-dtype bf16 --gradients bf16", 4))
    ]
    assert np.allclose(losses[1], losses[0], rtol=1e-3) and np.allclose(losses[2], losses[0], rtol=1e-3)
    assert losses[1].tolist() != losses[2].tolist()


def test_a_scale_is_taken_out_of_the_gradient_again():
    plain, scaled = (train.first_gradient("float32", scale) for scale in (1.0, 2.0**10))
    assert np.allclose(plain, scaled, rtol=1e-5, atol=1e-9) and np.isfinite(plain).all()


@pytest.mark.parametrize(("scale", "lost"), [(2.0**-20, True), (2.0**12, False)])
def test_fp16_loses_gradients_without_a_scale(scale, lost):
    exact, narrow = train.first_gradient("float32"), train.first_gradient("fp16", scale)
    assert (np.linalg.norm(narrow - exact) > 0.5 * np.linalg.norm(exact)) == lost


def test_too_large_a_scale_is_an_infinity_not_an_error():
    assert not np.isfinite(train.first_gradient("fp16", 2.0**30)).all()


def test_gradients_of_samples_add_up_to_the_batchs():
    each = train.sample_gradients(4)
    assert each.shape == (4, 4096) and len({row.tobytes() for row in each}) == 4
    whole = train.first_gradient("float32", samples=4)
    start = next(i for i in range(len(whole)) if np.allclose(whole[i : i + 4096], each.sum(0), rtol=1e-4, atol=1e-7))
    assert start > 0


@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_overflows_and_all_skip(stage):
    flags = f"--dp 2 --zero-stage {stage} --global-batch 2 --steps 3 --dtype fp16"
    config = resolve(parse(f"{train.MODEL} {flags}".split()), 2)
    tokens = load_tokens(None, vocab_size=256, seq_len=32)

    def rank(comm):
        return [result.skipped for result in train.OverflowingTrainer(config, DeviceMesh(comm, dp=2), tokens).train()]

    assert run_local(2, rank) == [[0, 1, 1], [0, 1, 1]]


def test_gradients_of_activations_are_small():
    """Half of them are below 2^-15, and some of them below half of fp16's smallest value."""
    sizes = train.activation_gradients()
    assert np.isfinite(sizes).all() and sizes.size > 100_000
    assert np.median(sizes) < -15 and 0.01 < (sizes < -25).mean() < 0.05
