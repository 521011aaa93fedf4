"""The same collectives over MPI: against NumPy, against MPI's own, and with the counts of the closed forms."""

import json

import pytest
from launcher import run_mpi

PROGRAM = """
import itertools
import numpy as np
from minipar.comm import ALGORITHMS, DeviceMesh, chunk_bounds, main, messages, wire_bytes

def numbers(n, rank, dtype):
    return ((np.arange(n) * 7 + rank * 3) % 13).astype(dtype)

def program(comm):
    p, r = comm.size, comm.rank
    sizes, dtypes = (0, 1, 3, p - 1, 1000, 100_000), ("float16", "float32", "float64", "int64", "uint8")
    for n, dtype in itertools.product(sizes, dtypes):
        chunk = slice(*chunk_bounds(n, p)[r])
        inputs = [numbers(n, rank, dtype) for rank in range(p)]
        total, most = np.sum(inputs, axis=0, dtype=dtype), np.max(inputs, axis=0)
        for op in ALGORITHMS:
            for algorithm in ALGORITHMS[op]:
                comm.traffic.reset()
                x = inputs[r].copy()
                if op == "all_reduce":
                    assert np.array_equal(comm.all_reduce(x, algorithm=algorithm), total), (algorithm, n, dtype)
                elif op == "reduce_scatter":
                    assert np.array_equal(comm.reduce_scatter(x, algorithm=algorithm), total[chunk])
                    comm.traffic.reset()
                    assert np.array_equal(comm.reduce_scatter(x, op="max", algorithm=algorithm), most[chunk])
                elif op == "all_gather":
                    out = np.zeros(n, dtype)
                    assert np.array_equal(comm.all_gather(inputs[0][chunk].copy(), out, algorithm=algorithm), inputs[0])
                elif op == "all_to_all":
                    expected = np.concatenate([other[chunk] for other in inputs])
                    assert np.array_equal(comm.all_to_all(x, algorithm=algorithm), expected)
                elif op == "broadcast":
                    assert np.array_equal(comm.broadcast(x, root=p - 1, algorithm=algorithm), inputs[p - 1])
                else:
                    comm.barrier(algorithm=algorithm)
                where = {"root": p - 1} if op == "broadcast" else {}
                assert comm.traffic.bytes(op) == wire_bytes(op, algorithm, n, x.itemsize, p, r, **where)
                assert comm.traffic.messages(op) == messages(op, algorithm, p, r, **where)

    from mpi4py import MPI
    own = MPI.COMM_WORLD  # MPI's own collectives give what NumPy gave above
    for n, dtype in itertools.product(sizes, dtypes[1:]):  # MPI has no float16
        counts = [stop - start for start, stop in chunk_bounds(n, p)]
        chunk = slice(*chunk_bounds(n, p)[r])
        x, kind = numbers(n, r, dtype), np.dtype(dtype).char
        both = [comm.all_reduce(x.copy()), x.copy()]
        own.Allreduce(MPI.IN_PLACE, [both[1], kind])
        assert np.array_equal(*both)
        for op, reduction in (("sum", MPI.SUM), ("max", MPI.MAX)):
            both = [comm.reduce_scatter(x, op=op), np.empty(counts[r], dtype)]
            own.Reduce_scatter([x, kind], [both[1], kind], counts, reduction)
            assert np.array_equal(*both)
        both = [comm.all_gather(x[chunk].copy(), np.zeros(n, dtype)), np.zeros(n, dtype)]
        own.Allgatherv([x[chunk], kind], [both[1], counts, kind])
        assert np.array_equal(*both)
        both = [comm.broadcast(x.copy(), root=p - 1), x.copy()]
        own.Bcast([both[1], kind], root=p - 1)
        assert np.array_equal(*both)

    for seed, columns in ((1, 1), (2, 1000)):  # some ranks send or receive nothing
        sizes = columns * np.random.default_rng(seed).integers(0, 4, (p, p))
        sizes[p // 2] = sizes[:, p // 3] = 0
        sends, receives = sizes[r], sizes[:, r]
        x, expected = np.random.default_rng(r).standard_normal(sends.sum()), np.zeros(receives.sum())
        MPI.COMM_WORLD.Alltoallv([x, sends.tolist()], [expected, receives.tolist()])
        for algorithm in ALGORITHMS["all_to_all"]:
            comm.traffic.reset()
            assert np.array_equal(comm.all_to_all(x, algorithm=algorithm, counts=(sends, receives)), expected)
            assert comm.traffic.bytes("all_to_all") == 8 * (sends.sum() - sends[r])
            assert comm.traffic.messages("all_to_all") == p - 1

    x = [np.random.default_rng(rank).standard_normal(1001) for rank in range(p)]
    expected = x[0].copy()
    for other in x[1:]:
        expected += other
    assert comm.all_reduce(x[r].copy(), algorithm="ordered").tobytes() == expected.tobytes()
    part = comm.reduce_scatter(x[r], algorithm="ring")
    both = comm.all_gather(part, np.empty(1001), algorithm="ring")
    assert comm.all_reduce(x[r].copy(), algorithm="ring").tobytes() == both.tobytes()

    if p % 2 == 0:  # asynchronous, two axes, in different orders on different ranks, beyond any eager limit
        mesh = DeviceMesh(comm, tp=2)
        axes = [mesh.dp, mesh.tp] if (mesh.coordinates["tp"] + mesh.coordinates["dp"]) % 2 else [mesh.tp, mesh.dp]
        arrays = [np.ones(50_000) for _ in range(6)]
        works = [axes[k % 2].all_reduce(arrays[k], async_op=True, algorithm="ring") for k in range(6)]
        for k in reversed(range(6)):
            assert (works[k].wait() == axes[k % 2].size).all()
    peer, source = (r + 1) % p, (r - 1) % p
    sends = [comm.isend(np.full(20_000, r), peer, tag) for tag in (1, 2)]
    received = [comm.irecv(np.empty(20_000, int), source, tag).wait() for tag in (2, 1)]
    assert all((array == source).all() for array in received)
    for message in sends:
        message.wait()
    if r == 0:
        print("every claim holds")

main(program)
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("p", [1, 2, 3, 4, *(pytest.param(p, marks=pytest.mark.long) for p in (5, 8))])
def test_collectives_over_mpi(p):
    result = run_mpi(p, PROGRAM, timeout=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "every claim holds\n"


def test_the_trace_and_the_cpu_clock_over_mpi(tmp_path):
    path = tmp_path / "trace.json"
    script = f"""
import numpy as np
from minipar.comm import Communicator, main, save_chrome_trace, start_trace
def program(comm):
    comm = Communicator(comm.transport, clock="cpu")
    start_trace(comm)
    with comm.tracer.region("forward"):
        comm.all_reduce(np.ones(1000), algorithm="ring")
    save_chrome_trace({str(path)!r}, comm)
main(program)
"""
    result = run_mpi(3, script)
    assert result.returncode == 0, result.stderr
    events = json.loads(path.read_text())["traceEvents"]
    starts = {event["id"] for event in events if event["ph"] == "s"}
    assert len(starts) == 3 * 4 and starts == {event["id"] for event in events if event["ph"] == "f"}


@pytest.mark.long
def test_bench_collectives_counts_what_the_formulas_say():
    argv = ["-m", "minipar.bench", "collectives", "--json", "-", "--sizes", "1K,40000", "--algorithms", "all"]
    result = run_mpi(3, argv)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert {row["op"] for row in rows} == {
        "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"
    }  # fmt: skip
    for row in rows:
        assert row["wire_bytes"] == row["wire_bytes_expected"]
        assert row["ranks"] == 3 and row["seconds"] > 0 and row["ratio"] == row["seconds"] / row["mpi_seconds"]
    ring = next(row for row in rows if (row["op"], row["algorithm"], row["bytes"]) == ("all_reduce", "ring", 40000))
    assert ring["wire_bytes"] == 2 * 40000 - 2 * 4 * 3333  # 10,000 elements in chunks of 3334, 3333 and 3333
