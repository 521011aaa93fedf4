"""Thread schedules, drawn at random: no bit of a training step depends on which rank runs when.

MINIPAR_SCHEDULES is their number. `make test-schedules` runs 1,000.
"""

import os
from functools import cache

import numpy as np
import pytest
from combinations import TEXT, Combination
from training import bits, reports, trainer_for
from transports import collective, in_order_of_arrival, run_in_turns

from minipar.comm import run_local
from minipar.comm.communicator import GENERATORS
from minipar.errors import CommunicationError

SCHEDULES = int(os.environ.get("MINIPAR_SCHEDULES", "6"))
BATCH = 2  # schedules per test, all of one layout
LAYOUTS = [
    Combination((2, 2, 2), "1f1b", sequence=True, microbatches=2, zero=1, clip=True),
    Combination((2, 2, 2), "zbv", microbatches=2, zero=3, clip=True),
    Combination((2, 1, 2), "dualpipev", microbatches=4, zero=2),
]


def one_step(comm, combination):
    """What this rank reports and holds after a step."""
    trainer = trainer_for(combination.config(), TEXT, comm)
    result = trainer.step(0)
    return reports([result]), bits({name: p.data for name, p in trainer.model.named_parameters()})


@cache
def undisturbed(combination):
    return run_local(combination.ranks, one_step, combination)


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_a_3d_step_has_the_same_bits_in_every_schedule(first):
    combination = LAYOUTS[first // BATCH % len(LAYOUTS)]
    seeds = range(first, first + BATCH)
    runs = [run_in_turns(combination.ranks, one_step, seed, combination) for seed in seeds]
    wrong = [seed for seed, (results, _) in zip(seeds, runs, strict=True) if results != undisturbed(combination)]
    assert not wrong, f"other bits with the schedules of these seeds: {wrong}"
    assert len({tuple(order) for _, order in runs}) == BATCH


def test_a_seed_gives_the_same_schedule_again():
    def order(seed):
        return run_in_turns(3, lambda comm: comm.all_reduce(np.ones(10), algorithm="ring"), seed)[1]

    assert order(5) == order(5) != order(6)


def test_schedules_show_a_sum_in_order_of_arrival(monkeypatch):
    monkeypatch.setitem(GENERATORS, ("all_reduce", "ordered"), in_order_of_arrival)

    def total(seed):
        results, _ = run_in_turns(4, lambda comm: collective(comm, "all_reduce", "ordered", 257).tobytes(), seed)
        return results[0]

    assert len({total(seed) for seed in range(20)}) > 1


def test_a_schedule_ends_with_the_first_exception():
    def program(comm):
        if comm.rank == 1:
            raise KeyError("broken")
        comm.barrier()

    with pytest.raises(KeyError, match="broken") as caught:
        run_in_turns(4, program, 0)
    assert caught.value.__notes__ == ["on rank 1"]


def test_a_deadlock_in_a_schedule_is_reported():
    with pytest.raises(CommunicationError, match="every rank waits. rank 0, recv: receive from rank 1"):
        run_in_turns(2, lambda comm: comm.rank or comm.irecv(np.empty(1), 1).wait(), 0)


def test_a_message_that_comes_before_a_pause_is_no_deadlock():
    """Rank 0 tests, rank 1 sends and then waits for rank 0, and rank 0 pauses."""

    def program(comm):
        if comm.rank == 1:
            comm.isend(np.ones(1), 0).wait()
            comm.irecv(np.empty(1), 0, tag=1).wait()
            comm.isend(np.ones(1), 0, tag=2).wait()
            return
        message = comm.irecv(np.empty(1), 1)
        arrived = message.test()
        later = comm.irecv(np.empty(1), 1, tag=2)
        if not arrived:
            comm.transport.pause(0, message)
        message.wait()
        comm.isend(np.ones(1), 1, tag=1).wait()
        later.wait()

    for seed in range(20):
        run_in_turns(2, program, seed)
