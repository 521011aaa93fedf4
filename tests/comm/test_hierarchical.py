"""Claims about two levels of ranks: what an all-reduce sends inside hosts and across, its messages, and its bits."""

import functools
import operator

import numpy as np
import pytest
from transports import hierarchical_all_reduce

from minipar.comm import ModelClock, Network, chunk_bounds, messages, run_local, wire_bytes
from minipar.errors import UsageError

GRIDS = [(1, 4), (2, 2), (2, 4), (3, 2), (4, 1)]  # hosts, ranks per host
ALGORITHMS = ["ring", "ordered"]


def fractions(n, rank):
    """Values whose sum depends on the order of addition."""
    return np.random.default_rng(rank).standard_normal(n) * 10.0 ** (rank % 5)


def summed(comm, hosts, n, algorithm):
    inside, across = comm.split_into(hosts)
    x = fractions(n, comm.rank)
    comm.traffic.reset()
    assert hierarchical_all_reduce(x, inside, across, algorithm) is x
    counts = {op: tuple(count) for (op, _), count in comm.traffic.counts.items()}
    return x, counts, (inside.rank, across.rank)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("hosts", "near"), GRIDS)
def test_bytes_and_messages_of_each_level_are_the_formulas(hosts, near, algorithm):
    """n bytes, s ranks on each of q hosts: 2n(s-1)/s inside and 2(n/s)(q-1)/q across, in 2(s-1) + 2(q-1) messages."""
    n = 3 * hosts * near  # elements, of which every chunk of a chunk is whole
    for _, counts, _ in run_local(hosts * near, summed, hosts, n, algorithm):
        sent = {op: counts.get(op, (0, 0)) for op in ("reduce_scatter", "all_gather", "all_reduce")}
        inside, across = sent["reduce_scatter"][1] + sent["all_gather"][1], sent["all_reduce"][1]
        assert inside == 2 * 8 * n * (near - 1) // near
        assert across == 2 * (8 * n // near) * (hosts - 1) // hosts
        assert sum(count for count, _ in sent.values()) == 2 * (near - 1) + 2 * (hosts - 1)
        assert sum(count for count, _ in sent.values()) <= messages("all_reduce", "ring", hosts * near, 0)


@pytest.mark.parametrize("n", [0, 1, 5, 23, 1000])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_and_bytes_of_any_size_are_those_of_the_parts(algorithm, n):
    results = run_local(6, summed, 2, n, algorithm)
    assert len({x.tobytes() for x, _, _ in results}) == 1
    for x, counts, (place, host) in results:
        np.testing.assert_allclose(x, sum(fractions(n, rank) for rank in range(6)), rtol=1e-12)
        start, stop = chunk_bounds(n, 3)[place]
        assert counts["reduce_scatter"][1] == wire_bytes("reduce_scatter", algorithm, n, 8, 3, place)
        assert counts["all_gather"][1] == wire_bytes("all_gather", "pairwise", n, 8, 3, place)
        assert counts["all_reduce"][1] == wire_bytes("all_reduce", algorithm, stop - start, 8, 2, host)


@pytest.mark.parametrize("n", [1, 7, 1000])
@pytest.mark.parametrize(("hosts", "near"), GRIDS)
def test_ordered_is_one_device_that_adds_in_the_nested_order(hosts, near, n):
    """Each host's ranks from left to right, then the hosts; other bits than all ranks from left to right."""

    def add(arrays):
        return functools.reduce(operator.add, arrays)

    arrays = [fractions(n, rank) for rank in range(hosts * near)]
    of_each_host = [add(arrays[host * near : (host + 1) * near]) for host in range(hosts)]
    expected = add(of_each_host)
    results = run_local(hosts * near, summed, hosts, n, "ordered")
    assert {x.tobytes() for x, _, _ in results} == {expected.tobytes()}
    if n == 1000 and hosts > 1 and near > 1:
        assert expected.tobytes() != add(arrays).tobytes()


def test_any_shape_works_and_what_is_not_contiguous_is_refused():
    def program(comm):
        inside, across = comm.split_into(2)
        x = np.full((3, 5), comm.rank)
        assert (hierarchical_all_reduce(x, inside, across) == 6).all() and x.shape == (3, 5)
        with pytest.raises(ValueError):
            hierarchical_all_reduce(x.T, inside, across)

    run_local(4, program)


@pytest.mark.parametrize(("ranks", "hosts"), [(6, 4), (4, 3)])
def test_groups_of_unequal_size_are_refused_with_the_arithmetic(ranks, hosts):
    def program(comm):
        comm.split_into(hosts)

    with pytest.raises(UsageError, match=f"{ranks}/{hosts} is not a whole number"):
        run_local(ranks, program)


def test_over_slow_links_between_hosts_it_is_quicker_than_a_ring():
    """Two hosts of four ranks, 8 MB. Only a quarter crosses, on each of four links: the time falls by as much."""
    n, near, slow = 2**20, Network(0.0, 1e-10), 1e-8
    hosts = Network(near.alpha, near.beta, between=Network(0.0, slow), per_host=4)

    def seconds(comm, hierarchical):
        x = np.ones(n)
        if hierarchical:
            hierarchical_all_reduce(x, *comm.split_into(2))
        else:
            comm.all_reduce(x, algorithm="ring")
        return comm.clock.now()

    flat, nested = (max(run_local(8, seconds, way, clock=ModelClock.name, network=hosts)) for way in (False, True))
    inside, across = 2 * 8 * n * 3 / 4 * near.beta, 2 * (8 * n / 4) / 2 * slow
    assert nested == pytest.approx(inside + across, rel=1e-12)
    assert flat == pytest.approx(2 * 8 * n * 7 / 8 * slow, rel=1e-12) and flat > 5 * nested
