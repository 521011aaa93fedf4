"""The balance of context parallelism: how long the ranks compute and wait in ring attention, on the `cpu` clock.

Each rank computes attention forward and backward for its part of a sequence, in each order of the tokens; messages are
free. Per order, medians over the runs of

    seconds      the time of the slowest rank
    efficiency   the time that a rank computes, on average, divided by the time of the slowest; the rest is waiting
    published    the fraction of the work that causal attention's pairs of tokens give
    of_one       the time of one rank for the whole sequence, divided by the ranks and by the time of the slowest

The efficiency compares times of one run, so other load on the machine acts on both. of_one also has the cost of
merging and of smaller blocks, and one rank's run is slowed by other ranks at other times than the ring is.
"""

from __future__ import annotations

import argparse

import numpy as np

from minipar.autograd.attention import causal_attention
from minipar.autograd.tensor import Tensor
from minipar.backend import from_host
from minipar.bench import check_positive, largest, publish
from minipar.comm.clock import CpuClock
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.more.context.context_parallel import RingAttention, block_attention
from minipar.more.context.token_order import ORDERS, ContextParallel, check_length

WIDTH = 64  # elements of a head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench context`."""
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of the sequence (8192)")
    parser.add_argument("--heads", type=int, default=4, help=f"attention heads of {WIDTH} elements (4)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each order, in turns (5)")


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
    if comm.size < 2:
        raise UsageError("bench context needs at least 2 ranks: mpirun -n 4 python -m minipar.bench context")
    check_positive(args, "seq_len", "heads", "repeat")
    check_length(args.seq_len, comm.size, "zigzag")
    clock = WaitingClock()
    comm = Communicator(comm.transport, clock=clock)
    c, n = comm.size, args.seq_len // comm.size
    qkv = np.random.default_rng(0).standard_normal((1, args.seq_len, 3 * args.heads * WIDTH)).astype(np.float32)
    slowest: dict[str, list[float]] = {"one": [], **{order: [] for order in ORDERS}}
    busy: dict[str, list[float]] = {order: [] for order in slowest}
    for _ in range(args.repeat):
        for order in slowest:
            context = ContextParallel(comm, order=order) if order != "one" else None
            x = Tensor(from_host(qkv if context is None else context.part(qkv)), requires_grad=True)
            comm.barrier()
            start, waited = clock.now(), clock.waited
            if context is not None:
                y = block_attention(RingAttention(context), x, args.heads)
            else:  # every rank alone, one after another on a machine of fewer cores
                y = causal_attention(x, args.heads, method="blockwise")
            y.backward(np.ones_like(y.data))
            seconds = clock.now() - start
            computed = comm.all_reduce(np.array([seconds - (clock.waited - waited)]))
            busy[order].append(float(computed[0]) / c)
            slowest[order].append(largest(comm, seconds))
    published = {"zigzag": 1.0, "contiguous": (c * n + 1) / ((2 * c - 1) * n + 1)}

    def median(times: list[float], order: str) -> float:
        return float(np.median(np.array(times) / slowest[order]))

    rows = [
        {
            "order": order,
            "ranks": c,
            "seq_len": args.seq_len,
            "seconds": float(np.median(slowest[order])),
            "efficiency": median(busy[order], order),
            "published": published[order],
            "of_one": median(slowest["one"], order) / c,
        }
        for order in ORDERS
    ]
    publish(comm, rows, args.json)
