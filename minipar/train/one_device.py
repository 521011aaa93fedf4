"""One device that trains what a mesh of ranks trains, with the same sums: what `--verify` compares with."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minipar.backend import Array, xp
from minipar.comm.mesh import DeviceMesh
from minipar.comm.threads import serial
from minipar.memory import hold
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.train.checkpoint import Checkpoint
from minipar.train.data import Tokens
from minipar.train.settings import TrainConfig
from minipar.train.trainer import StepResult, Trainer


class OneDevice(Trainer):
    """A trainer that computes all replicas and microbatches one after another on one device, with the same sums.

    It adds the replicas' gradients in rank order, as the `ordered` all-reduce does, to the bit.
    That needs two more arrays of all gradients (three with `--sync-every-microbatch`, and one more
    for the groups of `--zero-replicas`).
    """

    def __init__(self, config: TrainConfig, tokens: Tokens, checkpoint: Checkpoint | None = None) -> None:
        mesh = replace(
            config.mesh, cp=1, ep=1, tp=1, etp=None, sequence_parallel=False, zero_stage=0, memory_limit=None
        )
        run = replace(config.run, reduce_dtype=config.run.gradients)  # what is summed below is not rounded again
        super().__init__(replace(config, mesh=mesh, run=run), DeviceMesh(serial()), tokens, checkpoint)
        self.layout = config.mesh  # the ranks' layout
        self.reduce_dtype = config.run.reduce_dtype or config.run.dtype
        self.replicas = range(config.mesh.dp or 1)
        self.shards = len(self.replicas) // config.mesh.zero_replicas

    def _forward_backward(self, step: int) -> float:
        """Compute the gradient of each replica in turn, and add them as the ranks do; return the summed loss."""
        assert isinstance(self.ddp, DistributedDataParallel)
        if self.leaves is not None:
            return self.backward_leaves(step, self.replicas, self.leaves)
        microbatches = range(self.config.data.microbatches)
        passes: list[Sequence[int]] = [microbatches]
        if self.config.mesh.sync_every_microbatch:
            passes = [[m] for m in microbatches]
        losses = dict.fromkeys(self.replicas, 0.0)
        total: Array = None
        with self.ddp.no_sync():
            for each in passes:
                sum_of_pass: Array = None
                # Hybrid sharding sums first within groups of `shards` replicas, then over the
                # groups.
                for first in self.replicas[:: self.shards]:
                    sum_of_group: Array = None
                    for replica in self.replicas[first : first + self.shards]:
                        self.ddp.zero_grad()
                        for m in each:
                            losses[replica] += self.backward_microbatch(step, replica, m)
                        sum_of_group = add(sum_of_group, self._copy_of_gradients())
                    sum_of_pass = add(sum_of_pass, sum_of_group)
                total = add(total, sum_of_pass.astype(self.ddp.gradient_dtype, copy=False))
        start = 0
        for bucket in self.ddp.buckets:
            bucket.complete()[...] = total[start : start + bucket.size]
            start += bucket.size
        self.ddp.synchronize()
        summed_loss = 0.0
        for loss in losses.values():
            summed_loss += loss
        return summed_loss

    def _copy_of_gradients(self) -> Array:
        """Return the gradients that are here, of all buckets one after another, as they would travel."""
        own = [bucket.complete().astype(self.reduce_dtype, copy=False) for bucket in self.ddp.buckets]
        copy = xp.concatenate(own)
        hold("buffers", copy)
        return copy

    def _clip_grad_norm(self, max_norm: float | None) -> float:
        if self.leaves is not None:
            return super()._clip_grad_norm(max_norm)
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.mesh.dp, chunks=self.shards)


def add(total: Array, term: Array) -> Array:
    """Add a term to the sum of those before it, in the sum's memory; the first term is the first sum."""
    if total is None:
        return term
    total += term
    return total


def train_on_one_device(config: TrainConfig, tokens: Tokens) -> tuple[dict[str, np.ndarray], list[StepResult]]:
    """Train all steps on one device; return the parameters by name, and the result of each step."""
    single = OneDevice(config, tokens)
    results = list(single.train())
    return single.state_dict(), results
