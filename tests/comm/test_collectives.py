"""Every collective, every algorithm, over threads: equal to NumPy, at 1 to 8 ranks, at every awkward size."""

import itertools
import threading

import numpy as np
import pytest
from transports import Done, Wrapped

import minipar.more.tree.tree_collectives  # noqa: F401 adds an algorithm
from minipar.comm import ALGORITHMS, Communicator, chunk_bounds, messages, run_local, wire_bytes
from minipar.comm.communicator import choose
from minipar.comm.traffic import sent
from minipar.errors import CommunicationError

RANKS = range(1, 9)
DTYPES = ["float16", "float32", "float64", "int32", "int64", "uint8", "uint16"]


def ours(op):
    return ("auto", *ALGORITHMS[op])


def sizes(p):
    return sorted({0, 1, 3, max(p - 1, 0), p, 1000})


def small_integers(n, rank, dtype):
    """Numbers whose sums are exact in every dtype, so that any order of addition gives the same bits."""
    return ((np.arange(n) * 7 + rank * 3) % 13).astype(dtype)


def fractions(n, rank):
    """Numbers whose sum depends on the order of addition."""
    return np.random.default_rng(rank).standard_normal(n) * 10.0 ** (rank % 5)


@pytest.mark.parametrize("p", RANKS)
def test_all_reduce_equals_numpy(p):
    def program(comm):
        for algorithm, n, dtype in itertools.product(ours("all_reduce"), sizes(p), DTYPES):
            for op, combine in (("sum", np.add), ("max", np.maximum)):
                x = small_integers(n, comm.rank, dtype)
                result = comm.all_reduce(x, op=op, algorithm=algorithm)
                expected = combine.reduce([small_integers(n, r, dtype) for r in range(p)], dtype=dtype)
                assert result is x
                np.testing.assert_array_equal(x, expected, err_msg=f"{algorithm} {n} {dtype} {op}")

    run_local(p, program)


@pytest.mark.parametrize("p", RANKS)
def test_reduce_scatter_gives_each_rank_its_chunk(p):
    def program(comm):
        for algorithm, n, dtype in itertools.product(ours("reduce_scatter"), sizes(p), DTYPES):
            x = small_integers(n, comm.rank, dtype)
            start, stop = chunk_bounds(n, p)[comm.rank]
            out = comm.reduce_scatter(x, algorithm=algorithm)
            total = np.sum([small_integers(n, r, dtype) for r in range(p)], axis=0, dtype=dtype)
            np.testing.assert_array_equal(out, total[start:stop], err_msg=f"{algorithm} {n} {dtype}")
            np.testing.assert_array_equal(x, small_integers(n, comm.rank, dtype))

    run_local(p, program)


@pytest.mark.parametrize("p", RANKS)
def test_all_gather_puts_every_chunk_in_its_place(p):
    def program(comm):
        for algorithm, n, dtype in itertools.product(ours("all_gather"), sizes(p), DTYPES):
            whole = small_integers(n, 0, dtype)
            start, stop = chunk_bounds(n, p)[comm.rank]
            out = np.zeros(n, dtype)
            assert comm.all_gather(whole[start:stop].copy(), out, algorithm=algorithm) is out
            np.testing.assert_array_equal(out, whole)
            in_place = np.zeros(n, dtype)
            in_place[start:stop] = whole[start:stop]
            comm.all_gather(in_place[start:stop], in_place, algorithm=algorithm)
            np.testing.assert_array_equal(in_place, whole)
            equal = comm.all_gather(np.full(3, comm.rank, dtype), algorithm=algorithm)
            np.testing.assert_array_equal(equal, np.repeat(np.arange(p), 3).astype(dtype))

    run_local(p, program)


@pytest.mark.parametrize("p", RANKS)
def test_all_to_all_transposes_chunks(p):
    def program(comm):
        for algorithm, n in itertools.product(ours("all_to_all"), sizes(p)):
            out = comm.all_to_all(small_integers(n, comm.rank, "int64"), algorithm=algorithm)
            start, stop = chunk_bounds(n, p)[comm.rank]
            expected = [small_integers(n, r, "int64")[start:stop] for r in range(p)]
            np.testing.assert_array_equal(out, np.concatenate(expected))

    run_local(p, program)


def counts_between(p, seed=1):
    """counts[i, j]: what rank i sends to rank j. Some ranks send or receive nothing."""
    counts = np.random.default_rng(seed).integers(0, 4, (p, p))
    counts[p // 2] = counts[:, p // 3] = 0
    return counts


@pytest.mark.parametrize("p", RANKS)
def test_an_all_to_all_takes_unequal_counts(p):
    counts, columns = counts_between(p), 3

    def message(source, dest):
        return 100 * source + 10 * dest + np.arange(columns * counts[source, dest])

    def program(comm):
        r = comm.rank
        x = np.concatenate([message(r, j) for j in range(p)]).reshape(-1, columns)
        expected = np.concatenate([message(i, r) for i in range(p)])
        sizes = columns * counts[r], columns * counts[:, r]
        np.testing.assert_array_equal(comm.all_to_all(x, counts=sizes), expected)
        work = comm.all_to_all(x, np.zeros(expected.size, int), async_op=True, counts=sizes)
        np.testing.assert_array_equal(work.wait(), expected)
        assert comm.traffic.bytes("all_to_all") == 2 * 8 * columns * (counts[r].sum() - counts[r, r])
        assert comm.traffic.messages("all_to_all") == 2 * (p - 1)

    run_local(p, program)


@pytest.mark.parametrize("p", RANKS)
def test_broadcast_from_every_root(p):
    def program(comm):
        for root, n in itertools.product(range(p), sizes(p)):
            x = small_integers(n, comm.rank, "float32").reshape(1, n)
            comm.broadcast(x, root=root)
            np.testing.assert_array_equal(x[0], small_integers(n, root, "float32"))

    run_local(p, program)


@pytest.mark.parametrize("root", [-1, 2, 3])
def test_a_broadcast_needs_a_root_that_exists(root):
    with pytest.raises(ValueError, match=rf"broadcast: rank {root} .*2 ranks"):
        run_local(2, lambda comm: comm.broadcast(np.zeros(3), root=root))


class Eager(Wrapped):
    """A transport whose sends are done at once, as MPI's small ones.

    Between threads a send waits for its receiver, so there a rank hears from both sides in each round.
    """

    def isend(self, array, dest, tag, owner):
        super().isend(array, dest, tag, owner)
        return Done()


def returns_early(p, late):
    """Whether any rank returns within 20 ms from a barrier that rank `late` has not called yet; one takes 1 ms."""
    early, called = threading.Event(), threading.Event()
    found = []

    def program(comm):
        comm = Communicator(Eager(comm.transport))
        if comm.rank == late:
            found.append(early.wait(0.02))
            called.set()
        comm.barrier()
        if not called.is_set():
            early.set()

    run_local(p, program)
    return found[0]


@pytest.mark.parametrize("p", RANKS)
def test_no_rank_leaves_a_barrier_before_all_have_called(p):
    assert not any(returns_early(p, late) for late in range(p))


@pytest.mark.parametrize("p", RANKS)
def test_ordered_sums_from_left_to_right_bit_for_bit(p):
    def program(comm):
        for n in (1, p - 1, 257):
            expected = fractions(n, 0)
            for rank in range(1, p):
                expected += fractions(n, rank)
            x = comm.all_reduce(fractions(n, comm.rank), algorithm="ordered")
            start, stop = chunk_bounds(n, p)[comm.rank]
            part = comm.reduce_scatter(fractions(n, comm.rank), algorithm="ordered")
            assert x.tobytes() == expected.tobytes()
            assert part.tobytes() == expected[start:stop].tobytes()

    run_local(p, program)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_tree_sums_are_those_of_recursive_doubling(p):
    def program(comm):
        for n in (1, p - 1, 257):
            subtrees = [fractions(n, rank) for rank in range(p)]
            while len(subtrees) > 1:
                pairs = zip(subtrees[0::2], subtrees[1::2], strict=True)
                subtrees = [left + right for left, right in pairs]
            expected = subtrees[0]
            for algorithm in ("tree", "recursive_doubling"):
                x = comm.all_reduce(fractions(n, comm.rank), algorithm=algorithm)
                assert x.tobytes() == expected.tobytes()
            start, stop = chunk_bounds(n, p)[comm.rank]
            part = comm.reduce_scatter(fractions(n, comm.rank), algorithm="tree")
            assert part.tobytes() == expected[start:stop].tobytes()

    run_local(p, program)


@pytest.mark.parametrize("p", RANKS)
def test_the_ring_has_the_bits_of_its_two_halves(p):
    def program(comm):
        for n in (1, p - 1, 257):
            x = comm.all_reduce(fractions(n, comm.rank), algorithm="ring")
            part = comm.reduce_scatter(fractions(n, comm.rank), algorithm="ring")
            both = comm.all_gather(part, np.empty(n), algorithm="ring")
            assert x.tobytes() == both.tobytes()

    run_local(p, program)


@pytest.mark.parametrize("algorithm", ours("all_reduce"))
def test_every_rank_ends_with_the_same_bits(algorithm):
    for p in RANKS:
        results = run_local(p, lambda comm: comm.all_reduce(fractions(257, comm.rank), algorithm=algorithm).tobytes())
        assert len(set(results)) == 1


@pytest.mark.parametrize("p", RANKS)
def test_counted_messages_and_bytes_equal_the_closed_forms(p):
    """`==`, for every algorithm, rank and size, chunks of unequal length included."""

    def program(comm):
        def check(op, algorithm, n, call, **where):
            comm.traffic.reset()
            call()
            context = (op, algorithm, n, p, comm.rank)
            algorithm = "ordered" if algorithm == "tree" else algorithm  # a tree sends as many
            assert comm.traffic.bytes(op) == wire_bytes(op, algorithm, n, 8, p, comm.rank, **where), context
            assert comm.traffic.messages(op) == messages(op, algorithm, p, comm.rank, **where), context
            assert comm.traffic.bytes() == comm.traffic.bytes(op, axis="world")

        for n in sizes(p):
            x = np.zeros(n)
            start, stop = chunk_bounds(n, p)[comm.rank]
            for name in ours("all_reduce")[1:]:
                check("all_reduce", name, n, lambda x=x, name=name: comm.all_reduce(x, algorithm=name))
            for name in ours("reduce_scatter")[1:]:
                check("reduce_scatter", name, n, lambda x=x, name=name: comm.reduce_scatter(x, algorithm=name))
            for name in ours("all_gather")[1:]:
                part = x[start:stop]
                check("all_gather", name, n, lambda c=part, x=x, name=name: comm.all_gather(c, x, algorithm=name))
            check("all_to_all", "pairwise", n, lambda x=x: comm.all_to_all(x))
            for root in range(p):
                check("broadcast", "binomial", n, lambda x=x, root=root: comm.broadcast(x, root=root), root=root)
        check("barrier", "dissemination", 0, comm.barrier)

    run_local(p, program)


def test_equal_chunks_reach_the_lower_bound_of_bytes():
    """2n(p-1)/p for all_reduce, n(p-1)/p for its halves (Patarasuk and Yuan 2009)."""
    for p in (2, 4, 8):
        n = 840
        for name in ("ring", "ordered", "recursive_halving"):
            assert wire_bytes("all_reduce", name, n, 4, p, p - 1) == 2 * n * 4 * (p - 1) // p
            assert wire_bytes("reduce_scatter", name, n, 4, p, p - 1) == n * 4 * (p - 1) // p
        assert wire_bytes("all_reduce", "recursive_doubling", n, 4, p, 0) == n * 4 * (p.bit_length() - 1)


def test_chunks_are_cut_as_numpy_cuts_them():
    for n, p in itertools.product((0, 1, 5, 17, 64), RANKS):
        assert [stop - start for start, stop in chunk_bounds(n, p)] == [len(a) for a in np.array_split(np.empty(n), p)]


@pytest.mark.parametrize("few", [True, False])
def test_auto_takes_few_steps_below_256_kib_of_the_whole(few):
    """Each of 4 ranks sends 2 messages below 256 KiB, and 6 or 3, in the ranks' order, from there on; a gather 3."""
    size = 2**18 - 4 if few else 2**18

    def program(comm):
        comm.all_reduce(np.zeros(size, np.uint8))
        comm.reduce_scatter(np.zeros(size, np.uint8))
        comm.all_gather(np.zeros(size // 4, np.uint8))
        return [comm.traffic.messages(op) for op in ("all_reduce", "reduce_scatter", "all_gather")]

    assert run_local(4, program) == [[2, 2, 3] if few else [6, 3, 3]] * 4
    assert choose("all_reduce", "auto", size) == ("recursive_doubling" if few else "ordered")


@pytest.mark.parametrize("algorithm", ours("all_reduce"))
@pytest.mark.parametrize("p", [2, 3, 8])
def test_wrong_sizes_end_every_rank_with_an_error(p, algorithm):
    def program(comm):
        comm.all_reduce(np.zeros(1000 if comm.rank else 1001), algorithm=algorithm)

    with pytest.raises(CommunicationError):
        run_local(p, program)


def test_an_array_that_is_not_contiguous_is_rejected():
    with pytest.raises(ValueError):
        run_local(2, lambda comm: comm.all_reduce(np.zeros((3, 4)).T))


@pytest.mark.parametrize("algorithm", ["auto", "mpi"])
def test_what_is_not_minipars_algorithm_has_no_closed_form(algorithm):
    for form in (sent, lambda *arguments: wire_bytes(*arguments[:3], 8, *arguments[3:])):
        with pytest.raises(ValueError, match=f"all_reduce {algorithm}"):
            form("all_reduce", algorithm, 12, 4, 0)
