"""Measure, for section 6b.5, the activations that one layer keeps for backward, with the library's ledger."""

from typing import Any

import numpy as np

from minipar.comm import run_local
from minipar.memory import MemoryLedger
from minipar.nn import GPT, DropoutKeys, GPTConfig, dropping
from minipar.parallel.tensor.plan import tensor_parallel

MEASURED = {"B": 2, "T": 16, "h": 64, "a": 8}  # samples, tokens per sample, hidden size and heads of the model


def kept_by_a_layer(ranks: int, sequence: bool, dropout: float) -> int:
    """Return the bytes that a float32 layer keeps on each of `ranks` threads: a model of two layers less one of one."""
    one, two = (set(run_local(ranks, _held, layers, sequence, dropout)) for layers in (1, 2))
    (one_layer,), (two_layers,) = one, two  # every rank keeps as much
    return two_layers - one_layer


def _held(comm: Any, layers: int, sequence: bool, dropout: float) -> int:
    samples, length, hidden, heads = MEASURED.values()
    model = GPT(GPTConfig(64, length, hidden, layers, heads), dropout=dropout)
    tensor_parallel(model, comm, "ring", sequence)
    ledger = MemoryLedger()
    ids = np.zeros((samples, length), int)
    with ledger.recording(), dropping(DropoutKeys(0, 0, range(samples))):
        loss = model.loss_sum(ids, ids)  # it keeps the graph alive while the ledger is read
        held = int(ledger.held["activations"])
    assert loss.size == 1
    return held
