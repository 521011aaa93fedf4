"""Claims about combinations: every legal pair of values of two axes trains what one device trains, and sends as said.

tests/train/test_combinations.py has the rows of every day; docs/combinations.md says how many there are here.
"""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from combinations import Combination, equals_one_device, value

from minipar.parallel.pipeline.schedules import SCHEDULES

SIZES = (1, 2, 3, 4, 8)
# fmt: off
AXES = {
    "layout": [sizes for sizes in itertools.product(SIZES, repeat=3) if np.prod(sizes) <= 8],  # dp, tp, pp
    "context": [
        "", "--cp 2", "--cp 3", "--cp 4", "--cp 8", "--cp 2 --context-parallel all-gather",
        "--cp 2 --context-parallel ulysses",
    ],
    "schedule": [None, *SCHEDULES],
    "sequence": [False, True],
    "microbatches": [1, 2, 3, 4, 8],
    "replicas": [1, 2, 4],  # of ZeRO's shards
    "zero": [0, 1, 2, 3],
    "recompute": [False, True],
    "dropout": [False, True],
    "model": ["gpt2", "llama", "mixtral"],
    "clip": [False, True],
    "reduction": ["ordered", "ring"],
}
# fmt: on


def legal(some: dict) -> bool:
    """Whether these values of some axes go together; the rest is refused, and other tests say how."""
    dp, tp, pp = some.get("layout", (None, None, None))
    replicas = some.get("replicas", 1)
    if replicas > 1 and (some.get("zero") == 0 or (dp is not None and dp % replicas)):
        return False  # nothing to repeat, or groups of unequal size
    if {"layout", "context"} <= some.keys():
        ranks = np.prod(some["layout"]) * int(value(some["context"], "--cp", "1"))
        if not 2 <= ranks <= 8:
            return False
    schedule, m = some.get("schedule", ...), some.get("microbatches")
    if pp is not None:
        if schedule is not ... and (schedule is None) != (pp == 1):
            return False  # a schedule is a pipeline's
        if m == 8 and pp < 8 and (schedule not in (..., "dualpipev") or pp < 3):
            return False  # allowed, and slow
        if schedule == "dualpipev" and (pp == 8 or (m is not None and m < 2 * pp)):
            return False  # it needs 2 pp microbatches
        if schedule == "interleaved-1f1b" and m is not None and m % pp:
            return False  # microbatches go through in groups of pp
    if some.get("dropout") and some.get("model") in ("llama", "mixtral"):
        return False  # which have none
    if some.get("dropout") and (some.get("context") or some.get("sequence") or tp not in (None, 1)):
        return False  # a rank of tp or cp has a part of the activations alone
    if some.get("dropout") and some.get("layout") == (1, 1, 1):
        return False  # it has two ranks with cp alone
    return not (some.get("sequence") and tp == 1)


def pairs(some: dict) -> set:
    """The pairs of values of two axes that a choice covers."""
    return set(itertools.combinations([(axis, some[axis]) for axis in AXES if axis in some], 2))


def every_legal_pair() -> set:
    """All legal combinations run, one by one."""
    found = set()
    for values in itertools.product(*list(AXES.values())[:6]):
        some = dict(zip(AXES, values, strict=False))
        if legal(some):
            found |= pairs(some)
    # The last six axes go with everything, but for stage 0 and replicas of shards, and dropout with Llama, Mixtral, tp
    # and cp.
    single = {item for pair in found for item in pair}
    free = [(axis, value) for axis in list(AXES)[6:] for value in AXES[axis]]
    found |= {(a, b) for a, b in itertools.product(single, free) if legal(dict([a, b]))}
    return found | {(a, b) for a, b in itertools.combinations(free, 2) if a[0] != b[0] and legal(dict([a, b]))}


def covering() -> list[Combination]:
    """Combinations in which every legal pair of values occurs, each layout with each schedule and each stage included.

    Greedy and without chance: each begins with the first pair not covered yet, and takes axis after axis the value that
    covers most further ones; of equally good values the one whose pairs were taken least so far. Mixtral's combinations
    come after all others.
    """
    taken: Counter = Counter()
    chosen: list[Combination] = []
    every = sorted(every_legal_pair(), key=repr)
    later = [pair for pair in every if ("model", "mixtral") in pair]
    for missing, models in (
        (dict.fromkeys(pair for pair in every if pair not in later), ["gpt2", "llama"]),
        (dict.fromkeys(later), ["mixtral"]),
    ):
        cover(missing, models, taken, chosen)
    return chosen


def cover(missing: dict, models: list[str], taken: Counter, chosen: list[Combination]) -> None:
    """Append to `chosen` combinations with one of these models until no pair is missing."""
    while missing:
        some = dict(next(iter(missing)))
        for axis in AXES:
            if axis not in some:
                values = models if axis == "model" else AXES[axis]
                options = [v for v in values if legal({**some, axis: v})]

                def gain(value, axis=axis, some=some):
                    covered = pairs({**some, axis: value})
                    return sum(pair in missing for pair in covered), -sum(taken[pair] for pair in covered)

                some[axis] = max(options, key=gain)
        for pair in pairs(some):
            missing.pop(pair, None)
            taken[pair] += 1
        chosen.append(Combination(**some))


ALL = covering()


def test_the_choice_covers_every_pair_of_values_of_two_axes():
    covered = set()
    for combination in ALL:
        covered |= pairs(dataclasses.asdict(combination))
    assert covered == every_legal_pair()
    document = (Path(__file__).parents[3] / "docs" / "combinations.md").read_text(encoding="utf-8")
    assert f"| {len(ALL)} combinations " in document


@pytest.mark.parametrize("combination", ALL, ids=str)
def test_a_combination_trains_as_one_device_and_sends_as_said(combination):
    assert equals_one_device(str(combination), combination.exact) == []


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_the_textbooks_16_ranks(schedule, zero):
    """dp = 2, tp = 4, pp = 2 with ZeRO: how Narayanan et al. 2021 train on thousands."""
    combination = Combination((2, 4, 2), schedule, zero == 3, 4, zero, clip=True)
    assert equals_one_device(str(combination), False) == []
