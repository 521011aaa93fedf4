"""Train pipelines for chapter 7: with replicas on the model clock (7.7), with mistakes (7.8); count memory (7.4)."""

from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np

from chapters.support.pipeline_runs import CLOCK_RUN, ELEMENT
from chapters.support.training import make_trainer
from minipar.autograd import Tensor
from minipar.comm import Communicator, DeviceMesh, ModelClock, Network, run_local
from minipar.memory import KINDS, MemoryLedger
from minipar.nn import GPT, GPTConfig
from minipar.parallel.pipeline.stage import PipelineStage
from minipar.train.data import Tokens
from minipar.train.trainer import Trainer


def peak_activations(alive: int, blocks: int, recompute: bool) -> float:
    """Count the most activations while a stage does `alive` forwards, then as many backwards; in inputs of a block."""
    length, hidden = 16, 16
    config = GPTConfig(vocab_size=256, n_positions=length, n_embd=hidden, n_layer=blocks, n_head=2)
    stage = PipelineStage(GPT(config, dtype="float64", recompute=recompute).segments[1 : 1 + blocks])
    ledger = MemoryLedger()
    with ledger.recording():
        for i in range(alive):
            stage.forward(i, Tensor(np.ones((1, length, hidden)), requires_grad=True))
        for i in range(alive):
            stage.backward(i, np.ones((1, length, hidden)))
    peak = max(held[KINDS.index("activations")] for _, held in ledger.moments)
    return peak / (length * hidden * ELEMENT)


class SumsAtTheEnd(Trainer):
    """A trainer in which no gradient travels before all backwards are done."""

    def run_schedule(self, step: int, replica: int) -> list[float]:
        with self.ddp.no_sync():
            return super().run_schedule(step, replica)


def step_with_replicas(overlap: bool) -> float:
    """Return the seconds of a step of two pipelines of two ranks, 1F1B, m = 8, on the model clock and a slow network.

    With `overlap` a gradient travels as soon as it is complete, in the cool-down; without it, after all backwards.
    """
    speed = 1e9  # operations per second

    def step(comm: Communicator) -> float:
        kind = Trainer if overlap else SumsAtTheEnd
        make_trainer(comm, f"{CLOCK_RUN} --global-batch 16 --dp 2 --pp 2 --schedule 1f1b", kind).step(0)
        return comm.clock.now()

    network = Network(alpha=5e4 / speed, beta=6 / speed)
    return max(run_local(4, step, clock=partial(ModelClock, speed), network=network))


class CountsTwice(Trainer):
    """A trainer that gives microbatch 1 the samples of microbatch 0."""

    def samples(self, replica: int, microbatch: int) -> Any:
        return super().samples(replica, 0 if microbatch == 1 else microbatch)


class DropsTied(Trainer):
    """A trainer whose last stage keeps the head's contribution to the token embedding's gradient."""

    def __init__(self, args: Namespace, mesh: DeviceMesh, tokens: Tokens) -> None:
        super().__init__(args, mesh, tokens)
        if self.pipeline is not None:
            self.pipeline.fetch_tied_gradient = lambda: None
