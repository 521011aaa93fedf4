"""What every collective does over MPI, as a program that asserts it on each rank: `main(program)` under mpirun."""

import itertools

import numpy as np
from mpi4py import MPI
from transports import OURS, Late, collective, hierarchical_all_reduce

from minipar.comm import ALGORITHMS, Communicator, DeviceMesh, chunk_bounds, messages, wire_bytes

WORLD = MPI.COMM_WORLD
DTYPES = ("float16", "float32", "float64", "int64", "uint8")


def program(comm):
    equal_to_numpy(comm)
    equal_to_mpi(comm)
    unequal_counts(comm)
    stated_orders(comm)
    asynchronous(comm)
    late(comm)
    if comm.rank == 0:
        print("every claim holds")


def cases(p, dtypes=DTYPES):
    return itertools.product((0, 1, 3, p - 1, 1000, 100_000), dtypes)


def integers(n, rank, dtype):
    """Numbers whose sums are exact in every dtype, so that any order of addition gives the same bits."""
    return ((np.arange(n) * 7 + rank * 3) % 13).astype(dtype)


def fractions(n, rank):
    """Numbers whose sum depends on the order of addition."""
    return np.random.default_rng(rank).standard_normal(n) * 10.0 ** (rank % 5)


def equal_to_numpy(comm):
    """Each algorithm; its bytes and messages are the closed forms."""
    p, r = comm.size, comm.rank
    for n, dtype in cases(p):
        chunk = slice(*chunk_bounds(n, p)[r])
        inputs = [integers(n, rank, dtype) for rank in range(p)]
        total = np.sum(inputs, axis=0, dtype=dtype)
        expected = {
            "all_reduce": total,
            "reduce_scatter": total[chunk],
            "all_gather": inputs[0],
            "all_to_all": np.concatenate([other[chunk] for other in inputs]),
            "broadcast": inputs[p - 1],
        }
        for op, algorithm in OURS:
            where = {"root": p - 1} if op == "broadcast" else {}
            x = inputs[r].copy()
            comm.traffic.reset()
            if op == "barrier":
                comm.barrier(algorithm=algorithm)
            elif op == "all_gather":
                result = comm.all_gather(inputs[0][chunk].copy(), np.zeros(n, dtype), algorithm=algorithm)
            else:
                result = getattr(comm, op)(x, algorithm=algorithm, **where)
            assert op == "barrier" or np.array_equal(result, expected[op]), (op, algorithm, n, dtype)
            assert comm.traffic.bytes(op) == wire_bytes(op, algorithm, n, x.itemsize, p, r, **where)
            assert comm.traffic.messages(op) == messages(op, algorithm, p, r, **where)


def equal_to_mpi(comm):
    """MPI's own collectives, whose order of addition is not stated: on numbers with exact sums."""
    p, r = comm.size, comm.rank
    for n, dtype in cases(p, DTYPES[1:]):  # MPI has no float16
        counts = [stop - start for start, stop in chunk_bounds(n, p)]
        chunk = slice(*chunk_bounds(n, p)[r])
        x, kind = integers(n, r, dtype), np.dtype(dtype).char
        ours, theirs = comm.all_reduce(x.copy()), x.copy()
        WORLD.Allreduce(MPI.IN_PLACE, [theirs, kind])
        assert np.array_equal(ours, theirs)
        for op, reduction in (("sum", MPI.SUM), ("max", MPI.MAX)):
            ours, theirs = comm.reduce_scatter(x, op=op), np.empty(counts[r], dtype)
            WORLD.Reduce_scatter([x, kind], [theirs, kind], counts, reduction)
            assert np.array_equal(ours, theirs)
        ours, theirs = comm.all_gather(x[chunk].copy(), np.zeros(n, dtype)), np.zeros(n, dtype)
        WORLD.Allgatherv([x[chunk], kind], [theirs, counts, kind])
        assert np.array_equal(ours, theirs)
        ours, theirs = comm.broadcast(x.copy(), root=p - 1), x.copy()
        WORLD.Bcast([theirs, kind], root=p - 1)
        assert np.array_equal(ours, theirs)


def unequal_counts(comm):
    """An all-to-all in which some ranks send or receive nothing, against MPI's own."""
    p, r = comm.size, comm.rank
    for seed, columns in ((1, 1), (2, 1000)):
        sizes = columns * np.random.default_rng(seed).integers(0, 4, (p, p))
        sizes[p // 2] = sizes[:, p // 3] = 0
        sends, receives = sizes[r], sizes[:, r]
        x, expected = fractions(sends.sum(), r), np.zeros(receives.sum())
        WORLD.Alltoallv([x, sends.tolist()], [expected, receives.tolist()])
        for algorithm in ALGORITHMS["all_to_all"]:
            comm.traffic.reset()
            assert np.array_equal(comm.all_to_all(x, algorithm=algorithm, counts=(sends, receives)), expected)
            assert comm.traffic.bytes("all_to_all") == 8 * (sends.sum() - sends[r])
            assert comm.traffic.messages("all_to_all") == p - 1


def stated_orders(comm):
    """Bit for bit: `ordered` adds from left to right, in two levels as well; a ring is its two halves."""
    p, r = comm.size, comm.rank
    arrays = [fractions(1001, rank) for rank in range(p)]
    assert comm.all_reduce(arrays[r].copy(), algorithm="ordered").tobytes() == sum(arrays).tobytes()
    part = comm.reduce_scatter(arrays[r], algorithm="ring")
    halves = comm.all_gather(part, np.empty(1001), algorithm="ring")
    assert comm.all_reduce(arrays[r].copy(), algorithm="ring").tobytes() == halves.tobytes()
    if p % 2 == 0:
        inside, across = comm.split_into(2)
        nested = sum(arrays[: p // 2]) + sum(arrays[p // 2 :])
        assert hierarchical_all_reduce(arrays[r].copy(), inside, across, "ordered").tobytes() == nested.tobytes()


def asynchronous(comm):
    """Two axes in different orders on different ranks, beyond any eager limit; progress alone finishes work."""
    p, r = comm.size, comm.rank
    if p % 2 == 0:
        mesh = DeviceMesh(comm, tp=2)
        axes = [mesh.dp, mesh.tp] if (mesh.tp.rank + mesh.dp.rank) % 2 else [mesh.tp, mesh.dp]
        works = [axes[k % 2].all_reduce(np.ones(50_000), async_op=True, algorithm="ring") for k in range(6)]
        for k in reversed(range(6)):
            assert (works[k].wait() == axes[k % 2].size).all()
    work = comm.all_reduce(np.ones(100_000), async_op=True, algorithm="ring")
    while not work.done:
        comm.progress()
    assert (work.wait() == p).all()
    after, before = (r + 1) % p, (r - 1) % p
    sends = [comm.isend(np.full(20_000, 10 * r + tag), after, tag) for tag in (1, 2)]
    for tag in (2, 1):
        assert (comm.irecv(np.empty(20_000, int), before, tag).wait() == 10 * before + tag).all()
    for message in sends:
        message.wait()


def late(comm):
    """Messages that come late, in another order, change no bit."""

    def results(comm):
        return [np.asarray(collective(comm, *each, n), float).tobytes() for each in OURS for n in (0, 257, 1001)]

    transport = Late(comm.transport, seed=0)
    found = results(Communicator(transport))
    transport.close()
    assert found == results(comm)
    assert transport.outbox.overtaken > 0 or comm.size < 3
