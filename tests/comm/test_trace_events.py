"""A trace's events one by one: tracks, times, waits, arrows and the file; and what a trace does not see."""

import json
import threading

import numpy as np
import pytest
from transports import Wrapped

from minipar.comm import DeviceMesh, Network, run_local, save_chrome_trace, start_trace
from minipar.comm.clock import CpuClock, WallClock
from minipar.comm.communicator import Communicator
from minipar.comm.trace import unseen


def line(event):
    """Write all of an event but its process, in seconds."""
    start = f"{event['tid']} at {event['ts'] / 1e6:g}"
    if event["ph"] == "X":
        return f"{start} for {event['dur'] / 1e6:g}: {event['cat']} {event['name']} {event['args']}"
    assert (event["name"], event["cat"]) == ("message", "message")
    end = f"sends {event['args']['bytes']}" if event["ph"] == "s" else f"receives ({event['ph']}, {event['bp']})"
    return f"{start}: {end} {event['id']}"


def arguments(op, algorithm, nbytes, wait):
    return {"op": op, "algorithm": algorithm, "bytes": nbytes, "wait": wait}


def program(comm):
    start_trace(comm)
    with comm.tracer.region("forward", flops=2e12 * (comm.rank + 1)):
        pass
    if comm.rank == 0:
        comm.isend(np.zeros(8, np.uint8), 1, 3).wait()
        comm.isend(np.zeros(16, np.uint8), 1, 4).wait()
    else:
        works = [comm.irecv(np.zeros(size, np.uint8), 0, tag) for tag, size in ((4, 16), (3, 8))]
        for work in works:
            work.wait()
    comm.all_reduce(np.zeros(16, np.uint8), algorithm="ring")
    comm.clock.advance(1.0 * comm.rank)
    comm.broadcast(np.zeros(8, np.uint8), root=1)
    return comm.tracer.chrome_events(comm.rank), comm.clock.now()


def test_every_event_of_a_trace_on_the_model_clock():
    """A message takes 1 s and 1/8 s per byte. The barrier at the start takes 1 s, and a region 1 s for 1e12 flops."""
    (first, first_end), (second, second_end) = run_local(2, program, clock="model", network=Network(1.0, 0.125))
    names = [("process_name", 0, {"name": "rank 1"}), ("process_sort_index", 0, {"sort_index": 1})]
    tracks = ("computation", "communication world, send and receive", "communication world")
    names += [("thread_name", tid, {"name": name}) for tid, name in enumerate(tracks)]
    assert second[:5] == [{"name": name, "ph": "M", "tid": tid, "args": args, "pid": 1} for name, tid, args in names]
    assert {event["pid"] for event in first} == {0} and {event["pid"] for event in second} == {1}
    assert [line(event) for event in first[5:]] == [
        "0 at 1 for 2: computation forward {'flops': 2000000000000.0}",
        "1 at 3: sends 8 world:0>1.3#1",
        f"1 at 3 for 0: communication send {arguments('send', '', 8, 0.0)}",
        "1 at 3: sends 16 world:0>1.4#1",
        f"1 at 3 for 0: communication send {arguments('send', '', 16, 0.0)}",
        "2 at 3: sends 8 world:0>1#2",
        "2 at 8: receives (f, e) world:1>0#2",
        "2 at 8: sends 8 world:0>1#3",
        "2 at 10: receives (f, e) world:1>0#3",
        f"2 at 3 for 7: communication all_reduce {arguments('all_reduce', 'ring', 16, 3.0)}",
        "2 at 13: receives (f, e) world:1>0#4",
        f"2 at 10 for 3: communication broadcast {arguments('broadcast', 'binomial', 0, 1.0)}",
    ]
    assert [line(event) for event in second[5:]] == [
        "0 at 1 for 4: computation forward {'flops': 4000000000000.0}",
        "1 at 6: receives (f, e) world:0>1.4#1",
        f"1 at 5 for 1: communication recv {arguments('recv', '', 0, 0.0)}",
        "1 at 6: receives (f, e) world:0>1.3#1",
        f"1 at 6 for 0: communication recv {arguments('recv', '', 0, 0.0)}",
        "2 at 6: sends 8 world:1>0#2",
        "2 at 6: receives (f, e) world:0>1#2",
        "2 at 8: sends 8 world:1>0#3",
        "2 at 10: receives (f, e) world:0>1#3",
        f"2 at 6 for 4: communication all_reduce {arguments('all_reduce', 'ring', 16, 2.0)}",
        "2 at 11: sends 8 world:1>0#4",
        f"2 at 11 for 0: communication broadcast {arguments('broadcast', 'binomial', 8, 0.0)}",
    ]
    assert (first_end, second_end) == (13.0, 11.0)


# ---- clocks that a test moves ----------------------------------------------------------------------------------------


class HandWall(WallClock):
    """Real time that a test moves."""

    def __init__(self):
        self.seconds = 100.0
        self.ticks = lambda: self.seconds
        super().__init__()


class HandCpu(CpuClock):
    """CPU time that a test moves."""

    def __init__(self):
        self.seconds = 100.0
        self.ticks = lambda: self.seconds
        super().__init__()


class Slow(Wrapped):
    """A transport whose sends take a second of a clock each."""

    def __init__(self, inner, clock):
        super().__init__(inner)
        self.clock = clock

    def isend(self, *arguments):
        self.clock.seconds += 1.0
        return super().isend(*arguments)


def slices(comm):
    """Return (name, start, duration, wait) of the communication, in seconds."""
    events = [event for event in comm.tracer.events if event["ph"] == "X"]
    return [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"]["wait"]) for event in events]


def test_wall_clocks_start_at_0_after_two_barriers():
    def rank(comm, clock):
        own = Communicator(comm.transport, clock=clock())
        if clock is HandWall:
            own.clock.seconds += 5.0
        start_trace(own)
        return own.clock.now(), own.traffic.messages("barrier"), own.traffic.messages()

    assert run_local(2, rank, HandWall) == [(0.0, 2, 2)] * 2
    assert run_local(2, rank, HandCpu) == [(0.0, 1, 1)] * 2


def test_on_a_wall_clock_a_wait_lasts_until_the_message_is_there():
    called = threading.Event()

    def rank(comm):
        clock = HandWall()
        own = Communicator(comm.transport, clock=clock)
        start_trace(own)
        if comm.rank == 0:
            clock.seconds += 2.0
            work = own.all_reduce(np.zeros(2), algorithm="ring", async_op=True)
            clock.seconds += 3.0
            called.set()
            work.wait()
        else:
            called.wait()
            own.all_reduce(np.zeros(2), algorithm="ring")
        return slices(own)

    assert run_local(2, rank)[0] == [("all_reduce", 2.0, 3.0, 3.0)]


def test_on_a_wall_clock_a_message_is_drawn_from_call_and_wait():
    """A send is drawn from its call to its end, a receive from its wait until the message was there."""

    def rank(comm):
        clock = HandWall()
        own = Communicator(Slow(comm.transport, clock), clock=clock)
        comm.barrier()
        start_trace(own)
        begin = clock.now()
        if comm.rank == 0:
            own.isend(np.zeros(2), 1).wait()
            comm.barrier()
        else:
            work = own.irecv(np.zeros(2), 0)
            comm.barrier()
            clock.seconds += 4.0
            work.wait()
        return [(name, start - begin, duration, wait) for name, start, duration, wait in slices(own)]

    assert run_local(2, rank) == [[("send", 0.0, 1.0, 0.0)], [("recv", 4.0, 0.0, 0.0)]]


def test_calls_take_no_cpu_time_however_long_their_sends_take():
    def rank(comm):
        clock = HandCpu()
        own = Communicator(Slow(comm.transport, clock), clock=clock)
        peer = 1 - comm.rank
        times = [clock.now()]
        work = own.all_reduce(np.zeros(2), algorithm="ring", async_op=True)
        times.append(clock.now())
        while not work.done:
            own.progress()
            times.append(clock.now())
        sent = own.isend(np.zeros(2), peer)
        times.append(clock.now())
        own.irecv(np.zeros(2), peer).wait()
        sent.wait()
        times.append(clock.now())
        own.all_gather_bytes(b"some")
        times.append(clock.now())
        return set(times), clock.seconds > 104

    assert run_local(2, rank) == [({0.0}, True)] * 2


def test_a_test_that_finds_a_collective_done_takes_no_time():
    """Its rank has not waited for it: the time is that of the call."""

    def rank(comm):
        work = comm.all_reduce(np.zeros(2), algorithm="ring", async_op=True)
        while not work.test():
            pass
        tested = comm.clock.now()
        work.wait()
        return tested, comm.clock.now()

    assert run_local(2, rank, clock="model", network=Network(1.0)) == [(0.0, 2.0)] * 2


def test_what_follows_a_message_starts_when_it_arrived():
    """A function that is given later also starts at the arrival, and the rank goes on at its own time."""

    def rank(comm):
        if comm.rank == 0:
            comm.isend(np.zeros(2), 1).wait()
            return None
        times = []
        work = comm.irecv(np.zeros(2), 0)
        work.then(lambda: times.append(comm.clock.now()))
        work.wait()
        comm.clock.advance(10.0)
        work.then(lambda: times.append(comm.clock.now()))
        return times, comm.clock.now()

    assert run_local(2, rank, clock="model", network=Network(3.0))[1] == ([3.0, 3.0], 13.0)


# ---- the file, and what it does not see ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_mesh", [False, True])
def test_the_file_names_the_clock_and_the_mesh(with_mesh, tmp_path):
    """The mesh is written with its slowest axis first."""
    path = tmp_path / "trace.json"

    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        start_trace(comm)
        with comm.tracer.region(f"on {comm.rank}"):
            pass
        save_chrome_trace(str(path), comm, mesh if with_mesh else None)

    run_local(4, rank, clock="model")
    text = json.loads(path.read_text())
    assert list(text) == ["traceEvents", "displayTimeUnit", "otherData"] and text["displayTimeUnit"] == "ms"
    sizes = {"mesh": {"pp": 1, "dp": 2, "cp": 1, "tp": 2}} if with_mesh else {}
    assert json.dumps(text["otherData"]) == json.dumps({"clock": "model"} | sizes)
    assert [event["name"] for event in text["traceEvents"] if event["ph"] == "X"] == [f"on {r}" for r in range(4)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_what_is_unseen_leaves_trace_clock_and_traffic_alone(traced, fails):
    def rank(comm):
        if traced:
            start_trace(comm)
        comm.all_reduce(np.zeros(4))
        before = list(comm.tracer.events), dict(comm.traffic.counts), comm.clock.now()
        try:
            with unseen(comm):
                with comm.tracer.region("inside", flops=1e12):
                    comm.all_reduce(np.zeros(4))
                assert (comm.tracer.enabled, comm.traffic.messages()) == (False, 1)
                if fails:
                    raise KeyError("inside")
        except KeyError:
            assert fails
        assert (comm.tracer.events, comm.traffic.counts, comm.clock.now()) == before
        return comm.tracer.enabled, len(comm.tracer.events)

    assert run_local(2, rank, clock="model", network=Network(1.0)) == [(traced, 3 if traced else 0)] * 2


def test_only_rank_0_gathers_bytes_unless_told_otherwise():
    gathered = run_local(3, lambda comm: comm.gather_bytes(b"x" * comm.rank))
    assert gathered == [[b"", b"x", b"xx"], None, None]
