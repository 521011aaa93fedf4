"""Claims about the trainer: each sample of a step is trained once, whoever takes it, and two runs have the same bits.

"Equal to one device" cannot see a sample that both sides take twice; the formula of the samples is written out here.
"""

import hashlib
from collections import Counter

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import ranks_of, run_until, trainer_for

from minipar.comm import run_local
from minipar.train.data import Tokens

SEED, BATCH = 3, 72
NUMBERS = np.random.Generator(np.random.Philox(1)).permutation(300)
UNIQUE = Tokens(NUMBERS.astype("<u2"), "a text in which each token occurs once")
STEPS = (0, 1, 5)


def global_batch(order: str, step: int, length: int) -> Counter:
    """The (token, next token) pairs of a step, by a formula of its own."""
    count = len(NUMBERS)
    if order == "sequential":
        firsts = [(step * BATCH + i) * length for i in range(BATCH)]
    else:
        key = int.from_bytes(hashlib.sha256(f"{SEED}:data".encode()).digest()[:16], "little")
        stream = np.random.Philox(key=key, counter=[0, step, 0, 0])
        firsts = [int(draw) % (count - length) for draw in stream.random_raw(BATCH)]
    pairs = Counter()
    for first in firsts:
        for k in range(length):
            place = (first + k) % (count - 1)
            pairs[int(NUMBERS[place]), int(NUMBERS[place + 1])] += 1
    return pairs


def trained_on(args, step: int) -> Counter:
    """The pairs that all ranks together have given to their models in a step."""

    def rank(comm):
        trainer = trainer_for(args, UNIQUE, comm)
        seen = Counter()
        run, criterion = trainer.executor.run, trainer.model.criterion

        def noting(tokens, loss, *rest):
            def noting_loss(m, logits):
                def noting_criterion(logits, targets):
                    seen.update(zip(tokens(m).ravel().tolist(), targets.ravel().tolist(), strict=True))
                    return criterion(logits, targets)

                trainer.model.criterion = noting_criterion
                return loss(m, logits)

            return run(tokens, noting_loss, *rest)

        trainer.executor.run = noting
        trainer.step(step)
        return seen

    return sum(run_local(ranks_of(args), rank), start=Counter())


@pytest.mark.parametrize("order", ["random", "sequential"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize(
    "layout", ["--dp 1", "--dp 2", "--dp 3", "--dp 4 --zero-stage 3 --zero-replicas 2", "--dp 2 --cp 2", "--cp 3"]
)
def test_each_sample_of_a_step_is_trained_once(layout, microbatches, order):
    run = f"--order {order} --seed {SEED} --global-batch {BATCH} --microbatches {microbatches}"
    args = config_of(f"{run} {layout} --steps 9 --layers 1 --vocab-size 300")
    for step in STEPS:
        assert trained_on(args, step) == global_batch(order, step, args.seq_len)


@pytest.mark.parametrize("flags", ["--dp 3 --reduction ring", "--dp 2 --tp 2 --pp 2 --microbatches 2 --seed 3"])
def test_two_runs_of_anything_have_the_same_bits(flags):
    (state, reports), (again, same_reports) = (run_until(TEXT, config_of(flags)) for _ in range(2))
    assert reports == same_reports
    assert all(np.array_equal(state[name], again[name]) for name in state)
