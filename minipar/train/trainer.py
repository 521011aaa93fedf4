"""The training loop: one program for one device and for many, told apart by its mesh alone.

The global batch is cut into `dp` replicas' shares. On a mesh with dp ranks each rank computes one replica; on a mesh of
one, the single device computes all of them, one after another, and adds their gradients in rank order. That is what
`--verify` compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from minipar import backend
from minipar.autograd import flop_counter
from minipar.backend import from_host, xp
from minipar.comm import DeviceMesh, ModelClock
from minipar.memory import enter
from minipar.nn import GPT, AdamW, Deferred, DropoutKeys, GPTConfig, dropping, learning_rate
from minipar.nn.pretrained import load_gpt2
from minipar.parallel.buffers import units
from minipar.parallel.data import accumulate_replicas
from minipar.parallel.fully_sharded import shard
from minipar.parallel.model_state import OF_DTYPE, check_limit
from minipar.parallel.pipeline.split import PipelineParallel, part_groups
from minipar.parallel.tensor import tensor_parallel
from minipar.train.config import TrainConfig
from minipar.train.data import Batches, Tokens
from minipar.train.manifest import Checkpoint
from minipar.train.pipelined import PipelinedStep, schedule_of
from minipar.train.resume import restore_optimizer


@dataclass(frozen=True)
class StepResult:
    """What a step reports, and the fields of a line of `--metrics`."""

    step: int  # counted from 0
    loss: float  # mean over the global batch before the update, nats per token
    grad_norm: float  # before clipping
    seconds: float
    tokens_per_second: float


def make_model(config: TrainConfig, checkpoint: Checkpoint | None = None) -> GPT:
    """The serial model that the configuration describes, or the one in `--init-from`, or in a checkpoint; its numbers
    are not made, or read, yet.
    """
    recompute = config.run.recompute == "full"
    if config.model.init_from is not None:
        return load_gpt2(
            config.model.init_from, config.run.dtype, recompute, deferred=True, dropout=config.optimizer.dropout
        )
    shape = GPTConfig(
        vocab_size=config.model.vocab_size,
        n_positions=config.model.seq_len,
        n_embd=config.model.hidden,
        n_layer=config.model.layers,
        n_head=config.model.heads,
    )
    model = GPT(
        shape if checkpoint is None else GPTConfig(**checkpoint.manifest["model"]),
        seed=config.run.seed,
        dtype=config.run.dtype,
        recompute=recompute,
        deferred=True,
        dropout=config.optimizer.dropout,
    )
    if checkpoint is not None:
        for name, p in model.named_parameters():
            p.deferred = Deferred(p.shape, p.dtype, partial(checkpoint.array, "parameter", name))
    return model


class Trainer:
    """Trains `config` on `mesh`, whose axes have the sizes of config.mesh, or on a mesh of one in its place, from step
    0 or from where `checkpoint` (of any layout) ends.

    On the wire per step and rank: what the ZeRO stage sends over dp (parallel/data.py, zero.py), what the layers send
    over tp (parallel/tensor/plan.py), and one float64 all-reduced for the loss. UsageError if the model state does not
    fit `--memory-limit`.
    """

    def __init__(
        self, config: TrainConfig, mesh: DeviceMesh, tokens: Tokens, checkpoint: Checkpoint | None = None
    ) -> None:
        dp, stage = config.mesh.dp, config.mesh.zero_stage
        assert dp is not None and mesh.dp.size in (1, dp)
        self.config, self.mesh = config, mesh
        self.replicas = range(dp) if mesh.dp.size == 1 else range(mesh.dp.rank, mesh.dp.rank + 1)
        self.checkpoint, self.first_step = checkpoint, 0 if checkpoint is None else checkpoint.step
        self.model = make_model(config, checkpoint)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}  # of the whole model
        self.size = sum(p.size for p in self.model.parameters())  # Psi, of the whole model
        self.tensor = None
        if mesh.tp.size > 1:
            self.tensor = tensor_parallel(self.model, mesh.tp, config.run.reduction, config.mesh.sequence_parallel)
        self.samples_per_microbatch = config.data.global_batch // (dp * config.data.microbatches)
        schedule = schedule_of(config) if config.mesh.pp > 1 else None
        pipeline, groups = None, None
        if schedule is not None:  # one device in the place of a pipeline has the same buckets
            groups = part_groups(self.model)
            if mesh.pp.size > 1:
                pipeline = PipelineParallel(self.model, mesh.pp, schedule, config.model.seq_len)
                groups = pipeline.groups
        if config.mesh.memory_limit is not None:
            check_limit(
                config.mesh.memory_limit,
                [sum(p.size for p in group) for group in groups or units(self.model)],
                mesh.dp.size,
                stage,
                OF_DTYPE[config.run.dtype],
                accumulating=config.data.microbatches > 1 and not config.mesh.sync_every_microbatch,
            )
        self.ddp = shard(
            self.model, mesh.dp, stage, config.run.reduction, dp, self.tensor, pipeline=pipeline, groups=groups
        )
        self.pipelined = None
        if schedule is not None and pipeline is not None:
            length = config.model.seq_len // (mesh.tp.size if config.mesh.sequence_parallel else 1)
            shape = (self.samples_per_microbatch, length, self.model.config.n_embd)
            self.pipelined = PipelinedStep(config, schedule, pipeline, self.ddp, shape)
        self.optimizer = AdamW(
            self.ddp.optimized,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        if checkpoint is not None:
            restore_optimizer(checkpoint, self.model, self.ddp, self.optimizer)
            checkpoint.close()
        self.batches = Batches(
            tokens,
            seq_len=config.model.seq_len,
            global_batch=config.data.global_batch,
            order=config.data.order,
            seed=config.run.seed,
        )
        self.tokens_per_step = config.data.global_batch * config.model.seq_len

    def train(self) -> Iterator[StepResult]:
        """Run the configured steps, from the first that the checkpoint has not, yielding after each."""
        for step in range(self.first_step, self.config.optimizer.steps):
            yield self.step(step)

    def step(self, step: int) -> StepResult:
        """One optimizer step over the global batch; every rank of the mesh calls it with the same `step`.

        On a model clock its matrix products take their operations divided by the clock's speed, the rest no time.
        """
        clock = self.mesh.world.clock
        if not isinstance(clock, ModelClock):
            return self._step(step)
        with flop_counter(lambda flops: clock.advance(flops / clock.flops_per_second)):
            return self._step(step)

    def _step(self, step: int) -> StepResult:
        start = time.perf_counter()
        enter("forward", restart=True)
        losses = dict.fromkeys(self.replicas, 0.0)

        def backward(replica: int, microbatch: int) -> None:
            losses[replica] += self._backward_microbatch(step, replica, microbatch)

        self.ddp.zero_grad()
        if self.pipelined is not None:
            (replica,) = self.replicas
            samples = [self._samples(replica, m) for m in range(self.config.data.microbatches)]
            losses[replica] = self.pipelined.run(step, samples, self.batches.batch, 1 / self.tokens_per_step)
        elif len(self.replicas) > 1 or (self.ddp.stage == 0 and self.config.mesh.sync_every_microbatch):
            self._accumulate_all(backward)
        else:
            self._accumulate_own(backward)
        loss = self._sum_over_replicas(list(losses.values())) / self.tokens_per_step

        optimizer = self.config.optimizer
        with self._region("optimizer"):
            grad_norm = self.ddp.clip_grad_norm(optimizer.clip_grad or None)
            self.optimizer.lr = learning_rate(
                step,
                lr=optimizer.lr,
                schedule=optimizer.lr_schedule,
                warmup_steps=optimizer.warmup_steps,
                total_steps=optimizer.steps,
            )
            self.optimizer.step()
            self.ddp.refresh_parameters()
            backend.synchronize()
        if self.pipelined is not None:  # not in the region: the last stage waits in it and computes nothing
            self.pipelined.pipeline.refresh(self.ddp.whole)
        seconds = time.perf_counter() - start
        return StepResult(step, loss, grad_norm, seconds, self.tokens_per_step / seconds)

    def _accumulate_own(self, backward: Callable[[int, int], None]) -> None:
        """This rank's replica: microbatches add up, and the sum over ranks is taken once, or after each of them."""
        last = self.config.data.microbatches - 1
        for microbatch in range(last + 1):
            if microbatch == last or self.config.mesh.sync_every_microbatch:
                backward(self.replicas[0], microbatch)
                self.ddp.synchronize()
            else:
                with self.ddp.no_sync():
                    backward(self.replicas[0], microbatch)

    def _accumulate_all(self, backward: Callable[[int, int], None]) -> None:
        """One device that keeps nothing sharded, in the place of the ranks: the same sums in the same order."""
        microbatches, buffers = range(self.config.data.microbatches), self.ddp.buffers

        def replica(r: int) -> None:
            for microbatch in microbatches:
                backward(r, microbatch)

        def microbatch(m: int) -> None:
            accumulate_replicas(buffers, self.replicas, lambda r: backward(r, m))

        with self.ddp.no_sync():
            if self.config.mesh.sync_every_microbatch:
                accumulate_replicas(buffers, microbatches, microbatch)
            else:
                accumulate_replicas(buffers, self.replicas, replica)

    def _backward_microbatch(self, step: int, replica: int, microbatch: int) -> float:
        """Forward and backward of one microbatch; returns its summed loss. Gradients accumulate in the buffers.

        The loss of each microbatch is a sum over tokens, and its gradient is scaled by 1 / tokens of the *global*
        batch: contributions then simply add up, over microbatches and over ranks.
        """
        samples = self._samples(replica, microbatch)
        inputs, targets = self.batches.batch(step, samples)
        keys = DropoutKeys(self.config.run.seed, step, samples)
        with self._region("forward"), dropping(keys):
            loss = self.model.loss_sum(from_host(inputs), from_host(targets))
        with self._region("backward"):
            loss.backward(xp.full_like(loss.data, 1 / self.tokens_per_step))
        return loss.item()

    def _samples(self, replica: int, microbatch: int) -> range:
        """Their numbers in the global batch."""
        first = (replica * self.config.data.microbatches + microbatch) * self.samples_per_microbatch
        return range(first, first + self.samples_per_microbatch)

    @contextmanager
    def _region(self, name: str) -> Iterator[None]:
        """A phase of the step, for the trace and for the memory ledger."""
        enter(name)
        with self.mesh.world.tracer.region(name):
            yield

    def _sum_over_replicas(self, losses: list[float]) -> float:
        """The replicas' losses added in rank order, whichever ranks hold them: the same bits in every layout."""
        total = np.array([losses[0]])
        for loss in losses[1:]:
            total += loss
        self.mesh.dp.all_reduce(total, algorithm="ordered")
        return float(total[0])
