"""Claims about the trainer: each sample of a step is trained once, whoever takes it, and a step's time is all of it.

"Equal to one device" cannot see a sample that both sides take twice; the formula of the samples is written out here.
"""

import hashlib
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import ranks_of, run_until, trainer_for

from minipar.comm import Network, run_local
from minipar.nn import GPT, GPTConfig
from minipar.parallel.ddp import DistributedDataParallel
from minipar.train import trainer as trainer_module
from minipar.train.data import Tokens
from minipar.train.phases import model_clock

# ---- samples ---------------------------------------------------------------------------------------------------------

SEED, BATCH = 3, 72
NUMBERS = np.random.Generator(np.random.Philox(1)).permutation(300)
UNIQUE = Tokens(NUMBERS.astype("<u2"), "a text in which each token occurs once", 300)
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


def trained_on(config, step: int) -> Counter:
    """The pairs that all ranks together have given to their models in a step."""

    def rank(comm):
        trainer = trainer_for(config, UNIQUE, comm)
        seen = Counter()
        loss_sum = trainer.model.loss_sum

        def noting(inputs, targets):
            seen.update(zip(inputs.ravel().tolist(), targets.ravel().tolist(), strict=True))
            return loss_sum(inputs, targets)

        trainer.model.loss_sum = noting
        trainer.step(step)
        return seen

    return sum(run_local(ranks_of(config), rank), start=Counter())


@pytest.mark.parametrize("order", ["random", "sequential"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize(
    "layout", ["--dp 1", "--dp 2", "--dp 3", "--dp 4 --zero-stage 3 --zero-replicas 2", "--dp 2 --cp 2", "--cp 3"]
)
def test_each_sample_of_a_step_is_trained_once(layout, microbatches, order):
    run = f"--order {order} --seed {SEED} --global-batch {BATCH} --microbatches {microbatches}"
    config = config_of(f"{run} {layout} --steps 9 --layers 1 --vocab-size 300")
    for step in STEPS:
        assert trained_on(config, step) == global_batch(order, step, config.model.seq_len)


# ---- what a step reports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["--dp 3 --reduction ring", "--dp 2 --tp 2 --pp 2 --microbatches 2 --seed 3"])
def test_two_runs_of_anything_have_the_same_bits(flags):
    (state, reports), (again, same_reports) = (run_until(TEXT, config_of(flags)) for _ in range(2))
    assert reports == same_reports
    assert all(np.array_equal(state[name], again[name]) for name in state)


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
    config = config_of("--dp 2 --microbatches 3 --global-batch 12")

    def rank(comm):
        clock.now = 100.0
        trainer = trainer_for(config, TEXT, comm)
        trainer.model.loss_sum = taking(1.0, trainer.model.loss_sum)
        trainer.optimizer.step = taking(10.0, trainer.optimizer.step)
        return [(result.seconds, result.tokens_per_second) for result in trainer.train()]

    assert run_local(2, rank) == [[(18.0, 12 * 8 / 18.0)] * 2] * 2


def seconds_of_backward(bucket_bytes):
    """Each rank's end of a backward on the model clock, on a network that takes about as long."""

    def rank(comm):
        model = GPT(GPTConfig(vocab_size=256, n_positions=8, n_embd=16, n_layer=4, n_head=2), dtype="float64")
        sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
        ddp = DistributedDataParallel(model, comm, **sizes)
        tokens = np.arange(16).reshape(2, 8)
        with model_clock(comm):
            ddp.loss(tokens, tokens + 1).backward()
        return comm.clock.now()

    return run_local(4, rank, clock="model", network=Network(alpha=1e-9, beta=2e-11))


def test_buckets_travel_while_backward_computes():
    one_bucket = seconds_of_backward(2**30)
    assert one_bucket == seconds_of_backward(2**30)
    assert max(seconds_of_backward(4096)) < 0.9 * min(one_bucket)
