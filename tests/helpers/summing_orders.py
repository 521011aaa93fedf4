"""One device that adds gradients in the order of ranks whose sums `verify` does not promise bit for bit."""

import copy
from argparse import Namespace

import numpy as np

from minipar.comm import DeviceMesh, serial
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.train.data import Tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import OneDevice


class NestedSums(OneDevice):
    """Adds gradients of neighbouring ranks, then of the replicas of their shards, then of passes.

    It runs `passes` microbatches of each rank as replicas of one microbatch, so that it may add each one apart.
    """

    passes = 1
    replicas = 1

    def replica_gradient(self, step: int) -> float:
        ranks = self.args.dp // self.passes
        losses = [0.0] * ranks
        total = 0
        with self.ddp.no_sync():
            for each_pass in range(self.passes):
                of_pass = 0
                for neighbours in np.split(np.arange(ranks), self.replicas):
                    inside = 0
                    for rank in neighbours.tolist():
                        self.ddp.zero_grad()
                        losses[rank] += sum(self.run_schedule(step, rank * self.passes + each_pass))
                        inside = inside + np.concatenate([bucket.complete() for bucket in self.ddp.buckets])
                    of_pass = of_pass + inside
                total = total + of_pass
        start = 0
        for bucket in self.ddp.buckets:
            bucket.complete()[...] = total[start : start + bucket.size]
            start += bucket.size
        self.ddp.synchronize()
        return sum(losses)

    def clip_grad_norm(self, max_norm: float | None) -> float:
        chunks = self.args.dp // self.passes // self.replicas
        return clip_grad_norm(self.ddp.parameters(), max_norm, serial(), chunks=chunks)


def in_the_order_of(args: Namespace, tokens: Tokens) -> Trainer:
    """Make the trainer of one device that adds in the order of the ranks of `args`, with `--reduction ordered`."""
    alone = copy.copy(args)
    alone.zero_stage = 0
    alone.zero_replicas = 1
    alone.sync_every_microbatch = False
    if args.sync_every_microbatch:
        alone.dp = args.dp * args.microbatches
        alone.microbatches = 1
    trainer = NestedSums(alone, DeviceMesh(serial()), tokens)
    trainer.optimizer.eps = args.eps
    trainer.passes = args.microbatches if args.sync_every_microbatch else 1
    trainer.replicas = args.zero_replicas
    return trainer
