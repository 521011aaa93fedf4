"""Thread schedules, drawn at random: no bit of a training step depends on which rank runs when.

MINIPAR_SCHEDULES is their number.
"""

import os
from functools import cache

import pytest
from combinations import TEXT, Combination
from training import bits, reports, trainer_for
from transports import run_in_turns

from minipar.comm import run_local

SCHEDULES = int(os.environ.get("MINIPAR_SCHEDULES", "6"))
BATCH = 2  # schedules per test, all of one layout
LAYOUTS = [
    Combination((2, 2, 2), "1f1b", sequence=True, microbatches=2, zero=1, clip=True),
    Combination((2, 2, 2), "zbv", microbatches=2, zero=3, clip=True),
    Combination((2, 1, 2), "dualpipev", microbatches=4, zero=2),
]


def one_step(comm, combination):
    """Return what this rank reports and holds after a step."""
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
