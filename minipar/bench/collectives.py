"""Each collective next to MPI's own, at several sizes, in one run; and collectives of hundreds of ranks in one thread.

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
from minipar.errors import UsageError

SIZES = "1K,4K,16K,64K,1M,4M,16M"
BATCHES = 11
BATCH_SECONDS = 0.01  # calls per batch: as many as take about this long
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench collectives`."""
    parser.add_argument("--ops", default="all_reduce,reduce_scatter,all_gather,all_to_all,broadcast,barrier")
    parser.add_argument("--sizes", default=SIZES, help="bytes of the whole array, with K, M, G for binary multiples")
    parser.add_argument("--algorithms", choices=("auto", "all"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "float64", "int32", "int64"), default="float32")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure the time, and the bytes on the wire, of each collective next to MPI's own."""
    ops = args.ops.split(",")
    for op in ops:
        if op not in ALGORITHMS:
            raise UsageError(f"--ops {op}: expected some of {','.join(ALGORITHMS)}")
    sizes = [parse_size(text) for text in args.sizes.split(",")]
    rows = []
    for op in ops:
        names = ["auto"] if args.algorithms == "auto" else ["auto", *ALGORITHMS[op]]
        for algorithm in names:
            for nbytes in sizes if op != "barrier" else [0]:
                rows.append(measure(comm, op, algorithm, nbytes, np.dtype(args.dtype)))
    publish(comm, rows, args.json)


def parse_size(text: str) -> int:
    """Read bytes with a binary multiple: "64K" is 65536. UsageError when the text is not a size."""
    unit = text[-1:].upper()
    digits = text[:-1] if unit in UNITS else text
    if not (digits.isdecimal() and len(digits) < 16):
        raise UsageError(f"--sizes {text}: expected bytes, such as 4096, 64K or 1M")
    return int(digits) * UNITS.get(unit, 1)


def measure(comm: Communicator, op: str, algorithm: str, nbytes: int, dtype: np.dtype) -> dict[str, Any]:
    """Measure one row. Collective. `bytes`: of the whole array; `wire_bytes`: sent by the rank that sends most."""
    n = nbytes // dtype.itemsize
    ours, theirs = _calls(comm, op, algorithm, n, dtype)
    runs = choose(op, algorithm, n * dtype.itemsize)
    before = comm.traffic.bytes(op)
    seconds = _timed(ours, 1)
    sent = comm.traffic.bytes(op) - before
    expected = wire_bytes(op, runs, n, dtype.itemsize, comm.size, comm.rank)
    if theirs is not None:
        theirs()
        seconds = max(seconds, _timed(ours, 1))
    calls = int(largest(comm, min(200, max(1, BATCH_SECONDS / max(seconds, 1e-7)))))
    times: list[float] = []
    mpi_times: list[float] = []
    for _ in range(BATCHES):
        times.append(_timed(ours, calls))
        if theirs is not None:
            mpi_times.append(_timed(theirs, calls))
    median = largest(comm, float(np.median(times)))
    mpi_median = largest(comm, float(np.median(mpi_times))) if mpi_times else None
    return {
        "op": op,
        "algorithm": algorithm,
        "runs": runs,
        "ranks": comm.size,
        "bytes": n * dtype.itemsize,
        "seconds": median,
        "mpi_seconds": mpi_median,
        "ratio": median / mpi_median if mpi_median else None,
        "wire_bytes": int(largest(comm, sent)),
        "wire_bytes_expected": int(largest(comm, expected)),
    }


def _calls(
    comm: Communicator, op: str, algorithm: str, n: int, dtype: np.dtype
) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Return our operation and MPI's, each ready to be called repeatedly (None for one process without MPI)."""
    mpi = getattr(comm.transport, "comm", None)
    bounds = chunk_bounds(n, comm.size)
    counts = [stop - start for start, stop in bounds]
    own = counts[comm.rank]
    x = np.full(n, 0, dtype)  # zeros, written: sums of sums stay finite, and every page is a real one
    chunk = np.full(own, 0, dtype)
    out = np.full(n, 0, dtype)
    received = np.full(own * comm.size, 0, dtype)
    ours: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x, algorithm=algorithm),
        "reduce_scatter": lambda: comm.reduce_scatter(x, chunk, algorithm=algorithm),
        "all_gather": lambda: comm.all_gather(chunk, out, algorithm=algorithm),
        "all_to_all": lambda: comm.all_to_all(x, received, algorithm=algorithm),
        "broadcast": lambda: comm.broadcast(x, algorithm=algorithm),
        "barrier": lambda: comm.barrier(algorithm=algorithm),
    }
    if mpi is None:
        return ours[op], None
    from mpi4py import MPI

    theirs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, x),
        "reduce_scatter": lambda: mpi.Reduce_scatter(x, chunk, counts),
        "all_gather": lambda: mpi.Allgatherv(chunk, [out, counts]),
        "all_to_all": lambda: mpi.Alltoallv([x, counts], [received, [own] * comm.size]),
        "broadcast": lambda: mpi.Bcast(x),
        "barrier": mpi.Barrier,
    }
    return ours[op], theirs[op]


def _timed(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
