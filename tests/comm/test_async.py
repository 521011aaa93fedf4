"""Asynchronous work: any order of waiting, many at once, and axes issued in different orders."""

import numpy as np
import pytest

from minipar.comm import DeviceMesh, run_local
from minipar.errors import CommunicationError


def test_many_in_flight_waited_for_in_reverse():
    def program(comm):
        arrays = [np.full(100 + k, float(comm.rank + k)) for k in range(20)]
        works = [comm.all_reduce(x, async_op=True, algorithm="ring") for x in arrays]
        for k in reversed(range(20)):
            assert works[k].wait() is arrays[k]
            assert (arrays[k] == sum(r + k for r in range(comm.size))).all()

    run_local(5, program)


def test_a_blocking_call_waits_for_earlier_asynchronous_work():
    def program(comm):
        x = np.full(10, 1.0)
        work = comm.all_reduce(x, async_op=True)
        y = comm.all_reduce(np.full(10, 2.0))
        assert work.done and (x == comm.size).all() and (y == 2 * comm.size).all()
        work.wait()

    run_local(4, program)


def test_every_operation_can_be_asynchronous():
    def program(comm):
        p, r = comm.size, comm.rank
        reduced = comm.reduce_scatter(np.arange(10.0), async_op=True)
        gathered = comm.all_gather(np.full(2, r), async_op=True)
        swapped = comm.all_to_all(np.arange(p) + 10 * r, async_op=True)
        sent = comm.broadcast(np.full(3, r), root=p - 1, async_op=True)
        assert (sent.wait() == p - 1).all()
        assert (swapped.wait() == np.arange(p) * 10 + r).all()
        assert (gathered.wait() == np.repeat(np.arange(p), 2)).all()
        assert (reduced.wait() == np.array_split(np.arange(10.0) * p, p)[r]).all()

    for p in (1, 2, 3):
        run_local(p, program)


def test_progress_alone_finishes_the_work():
    def program(comm):
        work = comm.all_reduce(np.ones(1000), async_op=True, algorithm="ring")
        while not work.done:
            comm.progress()
        assert work.test() and (work.wait() == comm.size).all()

    run_local(4, program)


def test_axes_issued_in_different_orders_do_not_deadlock():
    """Rank 0 waits on dp first, its dp neighbour on tp first: each must advance the other axis while it waits."""

    def program(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        axes = [mesh.dp, mesh.tp] if comm.rank in (0, 3) else [mesh.tp, mesh.dp]
        for _ in range(10):
            works = [axis.all_reduce(np.ones(50), async_op=True, algorithm="ring") for axis in axes]
            for work in works:
                assert (work.wait() == 2).all()

    run_local(4, program)


def test_a_waiting_message_advances_a_collective_of_another_axis():
    """Rank 0 waits for a message that rank 1 sends only after the all-reduce in which rank 0 takes part."""

    def program(comm):
        other = comm.new_group(range(comm.size), "dp")
        work = other.all_reduce(np.ones(100), async_op=True, algorithm="ring")
        if comm.rank == 0:
            comm.irecv(np.empty(1), 1).wait()
        work.wait()
        if comm.rank == 1:
            comm.isend(np.ones(1), 0).wait()

    run_local(3, program)


def test_messages_of_one_tag_arrive_in_order_and_tags_do_not_mix():
    def program(comm):
        if comm.rank == 0:
            sends = [comm.isend(np.array([tag * 10 + k]), 1, tag) for k in range(3) for tag in (7, 8)]
            for message in sends:
                message.wait()
        else:
            eights = [comm.irecv(np.zeros(1, int), 0, 8) for _ in range(3)]
            sevens = [comm.irecv(np.zeros(1, int), 0, 7) for _ in range(3)]
            assert [int(m.wait()[0]) for m in sevens] == [70, 71, 72]
            assert [int(m.wait()[0]) for m in eights] == [80, 81, 82]

    run_local(2, program)


def test_a_message_of_the_wrong_size_names_both_sizes():
    def program(comm):
        if comm.rank == 0:
            comm.isend(np.zeros(4), 1, 5).wait()
        else:
            comm.irecv(np.zeros(3), 0, 5).wait()

    with pytest.raises(CommunicationError, match="rank 1, .*rank 0 .*32 bytes .*tag 5.* 24 "):
        run_local(2, program)
