"""The balance of context parallelism: how long the ranks compute and wait in ring attention, on the `cpu` clock.

Each rank computes attention forward and backward for its part of a sequence, in each order of the tokens; messages are
free. Per order, medians over the runs of

    seconds      the time of the slowest rank
    efficiency   the time that a rank computes, on average, divided by the time of the slowest; the rest is waiting
    published    the fraction of the work that causal attention's pairs of tokens give

The efficiency compares times of one run, so other load on the machine acts on both.
"""

from __future__ import annotations

import argparse

import numpy as np

from minipar.autograd.tensor import Tensor
from minipar.backend import from_host
from minipar.bench import add_sizes, largest, publish
from minipar.comm.clock import CpuClock
from minipar.comm.communicator import Communicator
from minipar.more.context.context_parallel import RingAttention, block_attention
from minipar.more.context.token_order import ORDERS, ContextParallel, check_length

WIDTH = 64  # elements of a head


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench context`; a head has 64 elements."""
    add_sizes(parser, seq_len=8192, heads=4, repeat=5)


class WaitingClock(CpuClock):
    """A `cpu` clock that also adds up how long its rank has waited for messages."""

    waited = 0.0

    def now(self) -> float:
        self._called = super().now()
        return self._called

    def resume(self, at: float) -> None:
        self.waited += at - self._called  # a communication call asks for the time when it begins
        self._called = at
        super().resume(at)


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure how evenly ring attention's orders divide causal work, next to the published fractions."""
    check_length(args.seq_len, comm.size, "zigzag")
    clock = WaitingClock()
    comm = Communicator(comm.transport, clock=clock)
    c, n = comm.size, args.seq_len // comm.size
    qkv = np.random.default_rng(0).standard_normal((1, args.seq_len, 3 * args.heads * WIDTH)).astype(np.float32)
    slowest: dict[str, list[float]] = {order: [] for order in ORDERS}
    efficiency: dict[str, list[float]] = {order: [] for order in ORDERS}
    for _ in range(args.repeat):
        for order in ORDERS:
            context = ContextParallel(comm, order=order)
            x = Tensor(from_host(context.part(qkv)), requires_grad=True)
            comm.barrier()
            start, waited = clock.now(), clock.waited
            y = block_attention(RingAttention(context), x, args.heads)
            y.backward(np.ones_like(y.data))
            seconds = clock.now() - start
            computed = comm.all_reduce(np.array([seconds - (clock.waited - waited)]))
            slowest[order].append(largest(comm, seconds))
            efficiency[order].append(float(computed[0]) / c / slowest[order][-1])
    published = {"zigzag": 1.0, "contiguous": (c * n + 1) / ((2 * c - 1) * n + 1)}
    rows = []
    for order in ORDERS:
        row = {"order": order, "ranks": c, "seq_len": args.seq_len, "seconds": float(np.median(slowest[order]))}
        rows.append(row | {"efficiency": float(np.median(efficiency[order])), "published": published[order]})
    publish(comm, rows, args.json)
