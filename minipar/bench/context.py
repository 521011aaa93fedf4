"""The balance of context parallelism: attention over all ranks next to attention on one, on the `cpu` clock.

Each rank computes attention forward and backward for its part of a sequence, in each order of the tokens. The
efficiency is the time of one rank for the whole sequence, divided by the ranks and by the time of the slowest. Messages
are free.
"""

from __future__ import annotations

import argparse

import numpy as np

from minipar.autograd import Tensor, causal_attention
from minipar.backend import from_host
from minipar.bench import check_positive, largest, publish
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.parallel.context import ORDERS, ContextParallel, check_length

WIDTH = 64  # elements of a head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench context`."""
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of the sequence (8192)")
    parser.add_argument("--heads", type=int, default=4, help=f"attention heads of {WIDTH} elements (4)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each order, of which the fastest counts (5)")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure how evenly ring attention's orders divide causal work, next to the published fractions."""
    if comm.size < 2:
        raise UsageError("bench context needs at least 2 ranks: mpirun -n 4 python -m minipar.bench context")
    check_positive(args, "seq_len", "heads", "repeat")
    check_length(args.seq_len, comm.size, "zigzag")
    comm = Communicator(comm.transport, clock="cpu")
    c, n = comm.size, args.seq_len // comm.size
    qkv = np.random.default_rng(0).standard_normal((1, args.seq_len, 3 * args.heads * WIDTH)).astype(np.float32)
    seconds: dict[str, list[float]] = {"one": [], **{order: [] for order in ORDERS}}
    for _ in range(args.repeat):
        for order, measured in seconds.items():
            context = ContextParallel(comm, order=order) if order != "one" else None
            x = Tensor(from_host(qkv if context is None else context.part(qkv)), requires_grad=True)
            comm.barrier()
            start = comm.clock.now()
            if context is not None:
                y = context.block_attention(x, args.heads)
            else:  # every rank alone, one after another on a machine of fewer cores
                y = causal_attention(x, args.heads, method="blockwise")
            y.backward(np.ones_like(y.data))
            measured.append(largest(comm, comm.clock.now() - start))
    published = {"zigzag": 1.0, "contiguous": (c * n + 1) / ((2 * c - 1) * n + 1)}
    one = min(seconds["one"])
    rows = [
        {
            "order": order,
            "ranks": c,
            "seq_len": args.seq_len,
            "seconds": min(seconds[order]),
            "efficiency": one / c / min(seconds[order]),
            "published": published[order],
        }
        for order in ORDERS
    ]
    publish(comm, rows, args.json)
