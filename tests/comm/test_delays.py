"""Messages that come late: to different ranks and of different groups in any order. No result depends on it."""

import sys

import numpy as np
import pytest
from combinations import TEXT, Combination
from launcher import run_mpi
from training import bits, reports, trainer_for
from transports import OURS, collective, in_order_of_arrival, run_late

from minipar.comm import run_local
from minipar.comm.communicator import GENERATORS

RANKS = [2, 3, 5, 8]
SEEDS = range(2)


@pytest.fixture(autouse=True)
def threads_change_often():
    """Python switches between threads after 20 us instead of 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(20e-6)
    yield
    sys.setswitchinterval(usual)


# ---- the transport itself --------------------------------------------------------------------------------------------


def test_late_messages_of_one_pair_stay_in_order():
    """Also those that their receiver asks for by one tag; or it would be the wrong transport for MPI's rules."""

    def program(comm):
        arrays = [np.full(1, i) for i in range(50)]
        if comm.rank == 0:
            for message in [comm.isend(array, 1) for array in arrays]:
                message.wait()
            return None
        return [int(comm.irecv(np.empty(1, int), 0).wait()[0]) for _ in arrays]

    for seed in SEEDS:
        assert run_late(2, program, seed)[0][1] == list(range(50))


@pytest.mark.parametrize("p", [3, 8])
def test_late_messages_overtake_those_to_other_ranks(p):
    def program(comm):
        if comm.rank == 0:
            for message in [comm.isend(np.ones(1), dest) for _ in range(10) for dest in range(1, p)]:
                message.wait()
        else:
            for _ in range(10):
                comm.irecv(np.empty(1), 0).wait()

    assert all(run_late(p, program, seed)[1] > 0 for seed in SEEDS)


def test_a_late_message_is_what_was_sent():
    """An eager send is done at once, and its array may change; another one's array may not, and is not done at once."""
    kinds = set()

    def program(comm):
        for i in range(20):
            if comm.rank == 1:
                assert comm.irecv(np.empty(1), 0).wait() == [i]
            else:
                array = np.array([float(i)])
                message = comm.isend(array, 1)
                kinds.add(message.test())
                message.wait()
                array[0] = -1.0

    run_late(2, program, 0)
    assert kinds == {True, False}


# ---- collectives -----------------------------------------------------------------------------------------------------


def every_collective(comm):
    """The bits of each operation and algorithm, and of operations on three groups that are under way together."""
    results = []
    for op, algorithm in OURS:
        for n in (0, comm.size - 1, 257, 1001):
            results.append((op, algorithm, n, np.asarray(collective(comm, op, algorithm, n), float).tobytes()))
    results.append(comm.all_gather_bytes(b"x" * comm.rank))
    results.append(comm.gather_bytes(b"y" * comm.rank, root=comm.size - 1))
    groups = [comm, comm.split(0, "all"), comm.split(comm.rank % 2, "odd")]
    works = {}
    for op, algorithm in OURS[:-1]:  # a barrier is not asynchronous
        for i in ((comm.rank + turn) % 3 for turn in range(3)):  # each rank begins with another group
            works[op, algorithm, i] = collective(groups[i], op, algorithm, 101, async_op=True)
    return results + [works[key].wait().tobytes() for key in sorted(works)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("p", RANKS)
def test_collectives_have_the_same_bits_however_late(p):
    expected = run_local(p, every_collective)
    for seed in SEEDS if p < 8 else SEEDS[:1]:  # 8 ranks take 2 s
        results, overtaken = run_late(p, every_collective, seed)
        assert results == expected
        assert overtaken > 0


def test_late_collectives_over_mpi_have_the_same_bits():
    script = """
import sys
sys.path.insert(0, "tests/comm")
from test_delays import every_collective
from transports import Late
from minipar.comm import main
from minipar.comm.communicator import Communicator
def program(comm):
    late = Late(comm.transport, seed=0)
    results = every_collective(Communicator(late))
    late.close()
    assert late.outbox.overtaken > 0
    assert results == every_collective(comm)
    if comm.rank == 0:
        print("the same bits")
main(program)
"""
    result = run_mpi(3, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the same bits\n"


def without_waiting(link, x, combine):
    """A wrong all_reduce of two ranks: it adds before the other rank's values have come."""
    received = np.zeros_like(x)
    requests = [link.irecv(received, 1 - link.rank), link.isend(x.copy(), 1 - link.rank)]
    combine(x, received, out=x)
    yield requests


@pytest.mark.parametrize(("p", "wrong"), [(5, in_order_of_arrival), (2, without_waiting)])
def test_delays_show_an_algorithm_that_depends_on_time(p, wrong, monkeypatch):
    def program(comm):
        return [collective(comm, "all_reduce", "ordered", 257).tobytes() for _ in range(5)]

    expected = run_local(p, program)
    monkeypatch.setitem(GENERATORS, ("all_reduce", "ordered"), wrong)
    assert any(run_late(p, program, seed)[0] != expected for seed in SEEDS)


# ---- training --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp": Combination((3, 1, 1), microbatches=2, clip=True),
    "dp, ring": Combination((3, 1, 1), reduction="ring"),
    "ZeRO 1": Combination((3, 1, 1), zero=1, clip=True),
    "ZeRO 2": Combination((3, 1, 1), zero=2, microbatches=2),
    "ZeRO 3": Combination((3, 1, 1), zero=3, microbatches=2, recompute=True),
    "tp": Combination((1, 2, 1), sequence=True, dropout=True),
    "gpipe": Combination((1, 1, 3), "gpipe", microbatches=3),
    "1f1b": Combination((1, 1, 3), "1f1b", microbatches=4),
    "interleaved": Combination((1, 1, 2), "interleaved-1f1b", microbatches=4),
    "zb-h1": Combination((1, 1, 3), "zb-h1", microbatches=4),
    "zb-h2": Combination((1, 1, 3), "zb-h2", microbatches=4),
    "zbv": Combination((1, 1, 2), "zbv", microbatches=4),
    "dualpipev": Combination((1, 1, 2), "dualpipev", microbatches=4),
    "3D, ZeRO 1": Combination((2, 2, 2), "1f1b", sequence=True, microbatches=2, zero=1, clip=True),
    "3D, ZeRO 3": Combination((2, 2, 2), "zbv", microbatches=2, zero=3, dropout=True),
}


def train(comm, combination):
    """What this rank reports and holds after two steps, and after gathering the whole parameters."""
    trainer = trainer_for(combination.config(), TEXT, comm)
    results = list(trainer.train())
    held = {name: p.data for name, p in trainer.model.named_parameters()}
    return reports(results), bits(held), bits(trainer.state_dict())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_has_the_same_bits_however_late(layout):
    combination = LAYOUTS[layout]
    expected = run_local(combination.ranks, train, combination)
    results, overtaken = run_late(combination.ranks, train, 0, combination)
    assert results == expected
    assert overtaken > 0 or combination.ranks == 2
