"""The training loop: one program for one device and for many, told apart by its mesh alone.

The global batch is cut into `dp` replicas' shares. On a mesh with dp ranks each rank computes one replica; on a mesh of
one, the single device computes all of them, one after another, and adds their gradients in rank order. That is what
`--verify` compares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from minipar import backend
from minipar.backend import from_host, xp
from minipar.comm import DeviceMesh, ModelClock
from minipar.nn import GPT, AdamW, GPTConfig, clip_grad_norm, learning_rate
from minipar.nn.pretrained import load_gpt2
from minipar.parallel.data import DistributedDataParallel, accumulate_replicas
from minipar.train.config import TrainConfig
from minipar.train.data import Batches, Tokens


@dataclass(frozen=True)
class StepResult:
    """What a step reports, and the fields of a line of `--metrics`."""

    step: int  # counted from 0
    loss: float  # mean over the global batch before the update, nats per token
    grad_norm: float  # before clipping
    seconds: float
    tokens_per_second: float


def make_model(config: TrainConfig) -> GPT:
    """The serial model that the configuration describes, or the one in `--init-from`."""
    recompute = config.run.recompute == "full"
    if config.model.init_from is not None:
        return load_gpt2(config.model.init_from, config.run.dtype, recompute)
    shape = GPTConfig(
        vocab_size=config.model.vocab_size,
        n_positions=config.model.seq_len,
        n_embd=config.model.hidden,
        n_layer=config.model.layers,
        n_head=config.model.heads,
    )
    return GPT(shape, seed=config.run.seed, dtype=config.run.dtype, recompute=recompute)


class Trainer:
    """Trains `config` on `mesh`, whose dp size is config.mesh.dp or 1.

    On the wire per step and rank: what DistributedDataParallel sends, about 2 Psi (dp-1)/dp elements, and one float64
    all-reduced for the loss.
    """

    def __init__(self, config: TrainConfig, mesh: DeviceMesh, tokens: Tokens) -> None:
        dp = config.mesh.dp
        assert dp is not None and mesh.dp.size in (1, dp)
        self.config, self.mesh = config, mesh
        self.replicas = range(dp) if mesh.dp.size == 1 else range(mesh.dp.rank, mesh.dp.rank + 1)
        self.model = make_model(config)
        self.samples_per_microbatch = config.data.global_batch // (dp * config.data.microbatches)
        if isinstance(mesh.world.clock, ModelClock):
            self._charge_backward(mesh.world.clock)
        self.ddp = DistributedDataParallel(self.model, mesh.dp, algorithm=config.run.reduction)
        self.parameters = self.model.parameters()
        self.optimizer = AdamW(
            self.parameters,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        self.batches = Batches(
            tokens,
            seq_len=config.model.seq_len,
            global_batch=config.data.global_batch,
            order=config.data.order,
            seed=config.run.seed,
        )
        self.tokens_per_step = config.data.global_batch * config.model.seq_len

    def train(self) -> Iterator[StepResult]:
        """Run the configured steps, yielding after each."""
        for step in range(self.config.optimizer.steps):
            yield self.step(step)

    def step(self, step: int) -> StepResult:
        """One optimizer step over the global batch; every rank of the mesh calls it with the same `step`."""
        start = time.perf_counter()
        losses: list[float] = []

        def backward(replica: int) -> None:
            losses.append(self._backward_replica(step, replica))

        if len(self.replicas) > 1:  # one device in the place of several ranks
            with self.ddp.no_sync():
                accumulate_replicas(self.ddp.buffers, self.replicas, backward)
        else:
            self.model.zero_grad()
            backward(self.replicas[0])
            self.ddp.synchronize()
        loss = self._sum_over_replicas(losses) / self.tokens_per_step

        optimizer = self.config.optimizer
        with self.mesh.world.tracer.region("optimizer"):
            grad_norm = clip_grad_norm(self.parameters, optimizer.clip_grad or None)
            self.optimizer.lr = learning_rate(
                step,
                lr=optimizer.lr,
                schedule=optimizer.lr_schedule,
                warmup_steps=optimizer.warmup_steps,
                total_steps=optimizer.steps,
            )
            self.optimizer.step()
            backend.synchronize()
        seconds = time.perf_counter() - start
        return StepResult(step, loss, grad_norm, seconds, self.tokens_per_step / seconds)

    def _backward_replica(self, step: int, replica: int) -> float:
        """Forward and backward of one replica's microbatches; returns its summed loss. Gradients accumulate in the
        buffers.

        The loss of each microbatch is a sum over tokens, and its gradient is scaled by 1 / tokens of the *global*
        batch: contributions then simply add up, over microbatches and over ranks.
        """
        tracer, microbatches = self.mesh.world.tracer, self.config.data.microbatches
        flops = self.model.config.forward_flops(self.samples_per_microbatch, self.config.model.seq_len)
        total = 0.0
        for microbatch in range(microbatches):
            first = (replica * microbatches + microbatch) * self.samples_per_microbatch
            inputs, targets = self.batches.batch(step, range(first, first + self.samples_per_microbatch))
            with tracer.region("forward", flops=flops):
                loss = self.model.loss_sum(from_host(inputs), from_host(targets))
            last = microbatch == microbatches - 1
            with nullcontext() if last else self.ddp.no_sync(), tracer.region("backward"):
                loss.backward(xp.full_like(loss.data, 1 / self.tokens_per_step))
            total += loss.item()
        return total

    def _charge_backward(self, clock: ModelClock) -> None:
        """On a model clock backward takes twice forward's operations, spread over the parameters as they are completed:
        so that a bucket that is ready early also travels early. (These hooks come before those that start the
        buckets.)"""
        flops = 2 * self.model.config.forward_flops(self.samples_per_microbatch, self.config.model.seq_len)
        parameters = self.model.parameters()
        per_element = flops / clock.flops_per_second / sum(p.size for p in parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda leaf: clock.advance(per_element * leaf.size))

    def _sum_over_replicas(self, losses: list[float]) -> float:
        """The replicas' losses added in rank order, whichever ranks hold them: the same bits in every layout."""
        total = np.array([losses[0]])
        for loss in losses[1:]:
            total += loss
        self.mesh.dp.all_reduce(total, algorithm="ordered")
        return float(total[0])
