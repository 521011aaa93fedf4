"""The training loop: the same program on one device and on any mesh. `Trainer.step` is one step.

The global batch is cut into one share for each data-parallel replica, and each share into
microbatches. `--record` and `--verify` give the trainer functions to call: `gradient_callbacks` and
`step_callbacks`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minipar.autograd import packed
from minipar.backend import from_host, wait_for_device, xp
from minipar.comm.mesh import DeviceMesh
from minipar.comm.trace import unseen
from minipar.nn.layers import DropoutKeys, dropping
from minipar.nn.optim import AdamW, learning_rate
from minipar.parallel import exact_norm
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.state import gather_state
from minipar.parallel.tree import TreeSum
from minipar.train.balance import RouterBalance
from minipar.train.checkpoint import Checkpoint, restore_optimizer, run_flags
from minipar.train.checkpoint import save as write_checkpoint
from minipar.train.data import Batches, Tokens
from minipar.train.from_config import (
    apply_strategies,
    check_model_state,
    make_model,
    refuse_export_of_biases,
    samples_per_microbatch,
)
from minipar.train.leaves import LeafGradients
from minipar.train.phases import model_clock, phase, start_step
from minipar.train.pipeline_pass import run_schedule
from minipar.train.precision import LossScaler, is_finite, refuse_divergence
from minipar.train.settings import TrainConfig


@dataclass(frozen=True)
class StepResult:
    """The result of one step, which is one line of `--metrics`."""

    step: int  # counted from 0
    loss: float  # mean over the global batch before the update, nats per token
    grad_norm: float  # before clipping
    seconds: float
    tokens_per_second: float
    dropped: int | None = None  # with --capacity-factor: assignments of all layers for which experts had no room
    skipped: int | None = None  # steps without an update so far, because a gradient was not finite


class Trainer:
    """The training of `config` on a mesh of config.mesh's sizes, from step 0 or from a checkpoint of any layout.

    A step sends what parallel/traffic.py says. UsageError if the model state does not fit
    `--memory-limit`.
    """

    def __init__(
        self, config: TrainConfig, mesh: DeviceMesh, tokens: Tokens, checkpoint: Checkpoint | None = None
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.checkpoint = checkpoint
        self.first_step = 0 if checkpoint is None else checkpoint.step

        self.model = make_model(config, checkpoint)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}  # the serial model's shapes
        self.size = sum(p.size for p in self.model.parameters())  # Psi, of the serial model
        check_model_state(config, mesh, self.model)
        refuse_export_of_biases(config, self.model)
        strategies, self.executor = apply_strategies(config, mesh, self.model)
        self.leaves: LeafGradients | None = None
        if config.run.reduction == "tree":
            exact_norm.check_size(self.size)
            self.leaves = LeafGradients(strategies)
        self.ddp = strategies.ddp
        self.context = strategies.context
        self.pipeline = strategies.pipeline

        flags = config.optimizer
        self.optimizer = AdamW(self.ddp.parameters(), betas=flags.betas, eps=flags.eps, weight_decay=flags.weight_decay)
        if checkpoint is not None:
            restore_optimizer(checkpoint, self.optimizer)
        self.scaler = LossScaler(config.run, checkpoint)

        self.tokens_per_step = config.data.global_batch * config.model.seq_len
        self.targets = self.tokens_per_step  # in a step; fewer where samples hold several documents
        self.samples_per_microbatch = samples_per_microbatch(config)
        # The gradients are summed over the replicas in the backward of this microbatch.
        self.last_microbatch: int | None = config.data.microbatches - 1
        if self.leaves is not None:
            self.last_microbatch = None  # all gradients are added as a tree first
        self.batches = Batches(
            tokens,
            seq_len=config.model.seq_len,
            global_batch=config.data.global_batch,
            order=config.data.order,
            seed=config.run.seed,
            separator=config.data.pack,
            part=self.context.part,
        )
        self.balance = RouterBalance(self.model, config.model, mesh, self.tokens_per_step)
        self.moes = self.balance.moes

        # Every step calls these functions. Their time and their messages are not the step's.
        self.gradient_callbacks: list[Callable[[], None]] = []  # when gradients are complete and not clipped
        self.step_callbacks: list[Callable[[StepResult], None]] = []  # when the step is over

    def train(self) -> Iterator[StepResult]:
        """Take the configured steps that the checkpoint has not taken, and yield the result of each."""
        for step in range(self.first_step, self.config.optimizer.steps):
            yield self.step(step)

    def step(self, step: int) -> StepResult:
        """Take one optimizer step over the global batch; every rank of the mesh calls it with the same `step`."""
        start = time.perf_counter()
        with model_clock(self.mesh.world):
            loss = self.compute_gradient(step)

            before = time.perf_counter()
            for callback in self.gradient_callbacks:
                with unseen(self.mesh.world):
                    callback()
            start += time.perf_counter() - before

            with phase(self.mesh.world, "optimizer"):
                limit = self.config.optimizer.clip_grad
                grad_norm = self._clip_grad_norm(limit if limit != 0 else None)
                dropped = self.update(step, loss, grad_norm)
                wait_for_device()
            if self.pipeline is not None:  # outside the phase, because the last stage computes nothing here
                self.pipeline.send_tied_weight(self.ddp.gather_parameter)
        seconds = time.perf_counter() - start

        skipped = self.scaler.skipped if self.scaler.can_skip else None
        result = StepResult(step, loss, grad_norm, seconds, self.tokens_per_step / seconds, dropped, skipped)
        for report in self.step_callbacks:
            with unseen(self.mesh.world):
                report(result)
        return result

    def compute_gradient(self, step: int) -> float:
        """Compute the gradient of the global batch's mean loss, not clipped yet; return that loss.

        All ranks call it.
        """
        start_step()
        self.targets = max(1, self.batches.target_count(step))
        self.ddp.zero_grad()
        self.balance.start_step(self.scaler.scale)
        loss = self._forward_backward(step)
        self.scaler.unscale(self.ddp.parameters())
        return loss / self.targets

    def _forward_backward(self, step: int) -> float:
        """Compute the global batch's gradient, times the loss scale; return its summed loss."""
        if self.pipeline is not None:
            loss = self._pipeline_backward(step)
        elif self.leaves is not None:
            loss = self.backward_leaves(step, [self.mesh.dp.rank], self.leaves)
        else:
            loss = 0.0
            for m in range(self.config.data.microbatches):
                sync = m == self.last_microbatch or self.config.mesh.sync_every_microbatch
                with nullcontext() if sync else self.ddp.no_sync():
                    loss += self.backward_microbatch(step, self.mesh.dp.rank, m)
                if sync:
                    self.ddp.synchronize()
        order = "ordered" if self.leaves is None else "tree"
        return float(self.mesh.dp_cp.all_reduce(np.array([loss]), algorithm=order)[0])

    def backward_leaves(self, step: int, replicas: Sequence[int], leaves: LeafGradients) -> float:
        """Compute the gradients of replicas, whose microbatches are the leaves of a tree; return their summed loss."""
        losses = TreeSum()
        number = 0
        with self.ddp.no_sync():
            for replica in replicas:
                for m in range(self.config.data.microbatches):
                    losses.add(number, self.backward_microbatch(step, replica, m))
                    leaves.take(number)
                    number += 1
        leaves.finish(number)
        self.ddp.synchronize()
        return losses.total()

    def backward_microbatch(self, step: int, replica: int, microbatch: int) -> float:
        """Add one microbatch's gradient; return its summed loss.

        The gradient is multiplied by the loss scale / the targets of the global batch, which all ranks
        know: `ddp.loss` would ask them in each microbatch, and would divide by that microbatch's alone.
        """
        samples = self.samples(replica, microbatch)
        inputs, targets = self.batches.batch(step, samples)
        keys = DropoutKeys(self.config.run.seed, step, samples)  # the same masks in every layout
        documents = packed(self.batches.position_ids(step, samples))
        with phase(self.mesh.world, "forward"), dropping(keys), documents:
            loss = self.model.loss_sum(from_host(inputs), from_host(targets))
        with phase(self.mesh.world, "backward"), self.ddp.scaled_backward():
            loss.backward(xp.full_like(loss.data, self.scaler.scale / self.targets))
        return loss.item()

    def _pipeline_backward(self, step: int) -> float:
        """Compute the scaled gradient of this replica's microbatches; return their summed loss."""
        assert self.pipeline is not None and self.executor is not None
        batches = []
        keys = []
        position_ids = []
        # All batches are read before the first action; between two actions, the other ranks would
        # wait for it.
        for m in range(self.config.data.microbatches):
            samples = self.samples(self.mesh.dp.rank, m)
            keys.append(DropoutKeys(self.config.run.seed, step, samples))
            position_ids.append(self.batches.position_ids(step, samples))
            if self.mesh.pp.rank in (self.pipeline.first, self.pipeline.last):
                batches.append(self.batches.batch(step, samples))
        return run_schedule(
            self.executor,
            self.pipeline,
            self.ddp,
            batches=batches,
            keys=keys,
            position_ids=position_ids,
            gradient=self.scaler.scale / self.targets,
            last_microbatch=self.last_microbatch,
            leaves=self.leaves,
        )

    def update(self, step: int, loss: float, grad_norm: float) -> int | None:
        """Update the parameters, unless the step is skipped, and always the routers' biases.

        Return the number of assignments that experts dropped, if they have a capacity.

        A step whose loss or norm is not finite is skipped with `--skip-nonfinite` and in fp16. Else
        UsageError names the first rank and parameter. Sends what the strategy's optimizer step and
        the balance of experts send.
        """
        flags = self.config.optimizer
        self.optimizer.lr = learning_rate(
            step=step, lr=flags.lr, schedule=flags.lr_schedule, warmup_steps=flags.warmup_steps, total_steps=flags.steps
        )
        finite = is_finite(loss, grad_norm)
        goes_on = self.scaler.update(finite)
        if not goes_on:
            refuse_divergence(self.mesh.world, self.ddp.parameters(), step, loss, grad_norm, flags.lr)
        if finite:
            self.optimizer.step()
        return self.balance.finish_step()

    def samples(self, replica: int, microbatch: int) -> range:
        """Return the positions, in the global batch, of a replica's samples in one microbatch."""
        first = (replica * self.config.data.microbatches + microbatch) * self.samples_per_microbatch
        return range(first, first + self.samples_per_microbatch)

    def state_dict(self, gradients: bool = False) -> dict[str, np.ndarray]:
        """Collect the serial model's parameters (or gradients) by name, as host arrays, on rank 0; {} elsewhere."""
        values = [p.grad for p in self.optimizer.parameters] if gradients else self.optimizer.values()
        state = gather_state(self.model, self.optimizer.parameters, self.mesh.world, values)
        return {name: state[name] for name in self.shapes if name in state}  # rank 0 lists its own experts first

    def save(self, directory: str | Path, step: int) -> None:
        """Write a checkpoint after `step` optimizer steps.

        All ranks call it; see `minipar.train.checkpoint.save`.
        """
        history = [] if self.checkpoint is None else self.checkpoint.history
        header = {
            "dtype": self.config.run.dtype,
            "data": self.batches.tokens.fingerprint().hex(),
            "model": self.model.config.to_dict(),
            "parameters": self.shapes,
            "router_bias": [moe.bias.tolist() for moe in self.moes],
            "loss_scale": [self.scaler.scale, self.scaler.good_steps],
            "skipped": self.scaler.skipped,
            "history": [*history, {"step": self.first_step, "flags": run_flags(self.config)}],
        }
        write_checkpoint(self.mesh.world, directory, step, self.optimizer, header)

    def _clip_grad_norm(self, max_norm: float | None) -> float:
        """Scale the gradients down to the norm `max_norm`, and return the norm before.

        All ranks call it.
        """
        mesh = self.mesh
        clip = clip_grad_norm if self.leaves is None else exact_norm.clip_grad_norm
        return clip(self.ddp.parameters(), max_norm, self.ddp.norm_comm, mesh.tp, mesh.pp)
