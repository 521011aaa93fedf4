"""The model clock is exact: times of collectives equal the formulas of the literature, with ==, every time."""

import time

import numpy as np
import pytest

from minipar.comm import DeviceMesh, Network, run_local, start_trace
from minipar.comm.clock import CpuClock
from minipar.comm.communicator import Communicator
from minipar.comm.threads import ThreadTransport

ALPHA, BETA = 1.0, 0.125  # powers of two: sums of them are exact in binary
NETWORK = Network(alpha=ALPHA, beta=BETA)


def model_times(p, program):
    """Each rank's clock after `program`."""

    def timed(comm):
        program(comm)
        return comm.clock.now()

    return run_local(p, timed, clock="model", network=NETWORK)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_ring_all_reduce_takes_its_formula_on_every_rank(p):
    n = 16 * p  # bytes, so that a chunk has 16
    for _ in range(3):
        times = model_times(p, lambda comm: comm.all_reduce(np.zeros(n, np.uint8), algorithm="ring"))
        assert times == [2 * (p - 1) * (ALPHA + n / p * BETA)] * p


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_other_algorithms_take_their_formulas(p):
    n, lg = 16 * p, p.bit_length() - 1
    halved = n * (p - 1) / p * BETA
    x = lambda: np.zeros(n, np.uint8)  # noqa: E731
    costs = {
        lg * (ALPHA + n * BETA): lambda c: c.all_reduce(x(), algorithm="recursive_doubling"),
        2 * lg * ALPHA + 2 * halved: lambda c: c.all_reduce(x(), algorithm="recursive_halving"),
        (p - 1) * ALPHA + halved: lambda c: c.reduce_scatter(x(), algorithm="ordered"),
        2 * (p - 1) * ALPHA + 2 * halved: lambda c: c.all_reduce(x(), algorithm="ordered"),
    }
    for cost, program in costs.items():
        assert model_times(p, program) == [cost] * p
    pairwise = model_times(p, lambda c: c.all_gather(np.zeros(16, np.uint8), algorithm="pairwise"))
    assert pairwise == [(p - 1) * ALPHA + halved] * p
    assert model_times(p, lambda c: c.all_to_all(x())) == [(p - 1) * ALPHA + halved] * p
    assert max(model_times(p, lambda c: c.broadcast(x()))) == lg * (ALPHA + n * BETA)
    assert model_times(p, lambda c: c.barrier()) == [lg * ALPHA] * p


@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2), (4, 1)])
def test_a_ring_across_hosts_takes_the_slow_networks_time(dp, tp):
    """Two hosts of two ranks: a ring over both of them ends at the pace of its slowest link, one inside a host does not
    touch it."""
    n, slow = 64, Network(alpha=8.0, beta=0.5)
    hosts = Network(ALPHA, BETA, between=slow, per_host=2)

    def program(comm):
        mesh = DeviceMesh(comm, dp=dp, tp=tp)
        times = []
        for axis in (mesh.tp, mesh.dp):
            start = comm.clock.now()
            axis.all_reduce(np.zeros(n, np.uint8), algorithm="ring")
            times.append(comm.clock.now() - start)
        return times

    def ring(size, link):
        return 2 * (size - 1) * (link.alpha + n / size * link.beta)

    fast = Network(ALPHA, BETA)
    expected = [ring(tp, slow if tp > 2 else fast), ring(dp, slow)]
    times = run_local(4, program, clock="model", network=hosts)
    assert [max(axis) for axis in zip(*times, strict=True)] == expected


def test_only_messages_between_hosts_take_the_slow_price():
    hosts = Network(ALPHA, BETA, between=Network(alpha=8.0, beta=0.5), per_host=4)
    slow, fast = 8.0 + 16 * 0.5, ALPHA + 16 * BETA
    pairs = {(0, 3): fast, (3, 4): slow, (4, 3): slow, (4, 7): fast, (0, 4): slow, (9, 10): fast}
    assert {pair: hosts.seconds(16, *pair) for pair in pairs} == pairs
    by_default = Network(between=Network(alpha=8.0))  # messages are free, and hosts have 8 ranks
    assert [by_default.seconds(10**9, *pair) for pair in ((0, 7), (7, 8), (8, 15), (16, 15))] == [0, 8, 0, 8]


@pytest.mark.parametrize(("receiver", "goes_on"), [(1.0, 5.0 + ALPHA + 8 * BETA), (50.0, 50.0)])
def test_a_receiver_continues_no_earlier_than_the_arrival(receiver, goes_on):
    """A rank that comes after it waits for nothing."""

    def program(comm):
        if comm.rank == 0:
            comm.clock.advance(5.0)
            comm.isend(np.zeros(8, np.uint8), 1).wait()
        else:
            comm.clock.advance(receiver)
            comm.irecv(np.zeros(8, np.uint8), 0).wait()
        return comm.clock.now()

    assert run_local(2, program, clock="model", network=NETWORK) == [5.0, goes_on]


@pytest.mark.parametrize("computing", [0.0, 3.0, 100.0])
def test_asynchronous_work_overlaps_with_computation_exactly(computing):
    """Two all-reduces one after the other on a stream beside the computation: max(computing, both)."""
    one = 2 * (ALPHA + 8 * BETA)

    def program(comm):
        works = [comm.all_reduce(np.zeros(16, np.uint8), algorithm="ring", async_op=True) for _ in range(2)]
        assert comm.clock.now() == 0.0
        comm.clock.advance(computing)
        comm.progress()
        works[0].wait()
        assert comm.clock.now() == max(computing, one)
        works[1].wait()

    for _ in range(5):
        assert model_times(2, program) == [max(computing, 2 * one)] * 2


@pytest.mark.parametrize("wait_for_each", [False, True])
def test_the_messages_of_a_rank_leave_one_after_the_other(wait_for_each):
    """Also from one collective to the next: a broadcast's root is done at once, its message is not through."""

    def program(comm):
        works = []
        for _ in range(3):
            works.append(comm.broadcast(np.zeros(8, np.uint8), async_op=True))
            if wait_for_each:
                works[-1].wait()
        for work in works:
            work.wait()

    assert model_times(2, program) == [0.0, 3 * (ALPHA + 8 * BETA)]


def test_streams_of_two_axes_run_side_by_side():
    def program(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        axes = (mesh.dp, mesh.tp)
        works = [axis.all_reduce(np.zeros(16, np.uint8), algorithm="ring", async_op=True) for axis in axes]
        for work in works:
            work.wait()

    assert model_times(4, program) == [2 * (ALPHA + 8 * BETA)] * 4


def test_making_a_mesh_takes_no_time():
    assert model_times(4, lambda comm: DeviceMesh(comm, dp=2, tp=2)) == [0.0] * 4


def test_a_region_takes_the_time_of_its_flops():
    def program(comm):
        comm.clock.flops_per_second = 4.0
        start_trace(comm)
        with comm.tracer.region("outer"):
            with comm.tracer.region("inner", flops=2.0):
                pass
        return comm.clock.now(), [(event["name"], event["dur"], event["args"]) for event in comm.tracer.events]

    expected = [("inner", 0.5e6, {"flops": 2.0}), ("outer", 0.5e6, {})]
    assert run_local(1, program, clock="model") == [(0.5, expected)]


def test_clock_headers_are_not_traffic():
    def program(comm):
        comm.all_reduce(np.zeros(10), algorithm="ring")
        return comm.traffic.bytes(), comm.traffic.messages()

    assert run_local(2, program, clock="model") == run_local(2, program) == [(80, 2)] * 2


def test_the_cpu_clock_counts_neither_sleep_nor_waiting():
    def program(comm):
        if comm.rank == 0:
            start = time.thread_time()
            while time.thread_time() - start < 0.1:
                pass
            time.sleep(0.2)
        comm.barrier()
        return comm.clock.now()

    worker, waiter = run_local(2, program, clock="cpu")
    assert 0.1 <= worker < 0.18
    assert worker <= waiter + 0.02 and waiter < 0.18


class PollingClock(CpuClock):
    """A clock on which each look at a missing message takes a second of CPU time, and nothing else takes any."""

    def __init__(self):
        self.looks = 0
        self.ticks = lambda: self.looks
        self.asked = 0.0
        self.went_back = 0
        super().__init__()

    def now(self):
        self.asked = super().now()
        return self.asked

    def resume(self, at):
        self.went_back += at < self.asked
        super().resume(at)


def every_kind_of_call(comm):
    """Blocking and asynchronous calls, on two communicators, whose partner comes late."""
    inside, _ = comm.split_into(1)
    for wait in (0.0, 0.02):
        time.sleep(wait if comm.rank == 0 else 0.0)
        comm.barrier()
        pending = inside.all_reduce(np.ones(4), async_op=True)
        sent = comm.isend(np.ones(3), (comm.rank + 1) % comm.size)
        received = comm.irecv(np.empty(3), (comm.rank - 1) % comm.size)
        time.sleep(wait if comm.rank == 1 else 0.0)
        for work in (received, sent, pending):
            work.wait()
        comm.all_reduce(np.ones(5), algorithm="ring")


@pytest.mark.parametrize("p", [2, 3, 4])
def test_looking_for_messages_takes_no_cpu_time(p, monkeypatch):
    """However often a rank looks, it goes on at the time of its call or of the message, and never before its call."""
    clocks_of = {}  # by rank
    pause = ThreadTransport.pause

    def looking(self, attempt, waiting_for):
        clocks_of[self.rank].looks += 1
        pause(self, attempt, waiting_for)

    monkeypatch.setattr(ThreadTransport, "pause", looking)

    def rank(comm):
        clock = PollingClock()
        clocks_of[comm.rank] = clock
        own = Communicator(comm.transport, clock=clock)
        every_kind_of_call(own)
        return clock.now(), clock.went_back

    assert run_local(p, rank) == [(0.0, 0)] * p
    assert sum(clock.looks for clock in clocks_of.values()) > p
