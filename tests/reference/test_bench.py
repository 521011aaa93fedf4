"""The benchmark's PyTorch model is the same model: it trains through the same losses."""

import numpy as np

from minipar.bench.step import torch_step, training_step
from minipar.comm import serial
from minipar.nn import GPT, GPTConfig
from minipar.parallel.ddp import DistributedDataParallel


def test_the_two_steps_of_the_benchmark_train_the_same_model():
    model = GPT(GPTConfig(vocab_size=31, n_positions=12, n_embd=32, n_layer=2, n_head=4), dtype="float64")
    inputs, targets = np.random.Generator(np.random.Philox(2)).integers(0, 31, (2, 3, 12))
    theirs = torch_step(model, inputs, targets)
    ours = training_step(DistributedDataParallel(model, serial()), inputs, targets)
    losses = [(ours(), theirs()) for _ in range(10)]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-9)
    assert losses[-1][0] < losses[0][0]
