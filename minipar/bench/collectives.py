"""Each collective next to MPI's own, at several sizes, in one run.

minipar and MPI alternate batch by batch, so that other load on the machine affects both. Times are medians over the
batches, of the slowest rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.bench import largest, publish
from minipar.comm.algorithms import ALGORITHMS, chunk_bounds
from minipar.comm.communicator import Communicator, choose
from minipar.comm.traffic import wire_bytes
from minipar.train.flags import count

SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
ITEMSIZE = 4  # arrays are float32
BATCHES = 11
BATCH_SECONDS = 0.01  # calls per batch: as many as take about this long
MOST_CALLS = 200


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench collectives`."""
    names = list(ALGORITHMS)
    parser.add_argument("--ops", nargs="+", choices=names, default=names, help="operations (all)")
    parser.add_argument(
        "--sizes", nargs="+", type=count, default=SIZES, help="bytes of the whole array (1 KiB to 16 MiB)"
    )
    parser.add_argument("--all-algorithms", action="store_true", help="also each algorithm by its name")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure the time, and the bytes on the wire, of each collective next to MPI's own."""
    rows = []
    for op in args.ops:
        algorithms = ["auto"]
        if args.all_algorithms:
            algorithms += ALGORITHMS[op]
        sizes = [0] if op == "barrier" else args.sizes
        for algorithm in algorithms:
            rows += [measure(comm, op, algorithm, nbytes) for nbytes in sizes]
    publish(comm, rows, args.json)


def measure(comm: Communicator, op: str, algorithm: str, nbytes: int) -> dict[str, Any]:
    """Measure one row. Collective. `bytes`: of the whole array; `wire_bytes`: sent by the rank that sends most."""
    n = nbytes // ITEMSIZE
    ours, theirs = _calls(comm, op, algorithm, n)
    runs = choose(op, algorithm, n * ITEMSIZE)
    before = comm.traffic.bytes(op)
    ours()
    sent = comm.traffic.bytes(op) - before
    theirs()
    seconds = _timed(ours, 1)
    calls = int(largest(comm, min(MOST_CALLS, max(1, BATCH_SECONDS / seconds))))
    times = np.array([(_timed(ours, calls), _timed(theirs, calls)) for _ in range(BATCHES)])
    median, mpi_median = (largest(comm, each) for each in np.median(times, axis=0))
    return {
        "op": op,
        "algorithm": algorithm,
        "runs": runs,
        "ranks": comm.size,
        "bytes": n * ITEMSIZE,
        "seconds": median,
        "mpi_seconds": mpi_median,
        "ratio": median / mpi_median,
        "wire_bytes": int(largest(comm, sent)),
        "wire_bytes_expected": int(largest(comm, wire_bytes(op, runs, n, ITEMSIZE, comm.size, comm.rank))),
    }


def _calls(comm: Communicator, op: str, algorithm: str, n: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return our operation on n elements and MPI's, each ready to be called repeatedly."""
    from mpi4py import MPI

    mpi = comm.transport.comm  # type: ignore[attr-defined]
    counts = [stop - start for start, stop in chunk_bounds(n, comm.size)]
    own = counts[comm.rank]
    x, out, chunk, received = (_zeros(size) for size in (n, n, own, own * comm.size))
    ours: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x, algorithm=algorithm),
        "reduce_scatter": lambda: comm.reduce_scatter(x, chunk, algorithm=algorithm),
        "all_gather": lambda: comm.all_gather(chunk, out, algorithm=algorithm),
        "all_to_all": lambda: comm.all_to_all(x, received, algorithm=algorithm),
        "broadcast": lambda: comm.broadcast(x, algorithm=algorithm),
        "barrier": lambda: comm.barrier(algorithm=algorithm),
    }
    theirs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, x),
        "reduce_scatter": lambda: mpi.Reduce_scatter(x, chunk, counts),
        "all_gather": lambda: mpi.Allgatherv(chunk, [out, counts]),
        "all_to_all": lambda: mpi.Alltoallv([x, counts], [received, [own] * comm.size]),
        "broadcast": lambda: mpi.Bcast(x),
        "barrier": mpi.Barrier,
    }
    return ours[op], theirs[op]


def _zeros(n: int) -> np.ndarray:
    """Return zeros that were written, so that every page is a real one. Sums of sums of zeros stay finite."""
    return np.full(n, 0, np.float32)


def _timed(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
