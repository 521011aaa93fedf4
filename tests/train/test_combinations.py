"""Claims about combinations: whatever is combined with whatever, it trains what one device trains, and sends what the
closed forms say.
"""

import dataclasses
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from combinations import AXES, Combination, check, covering, differences, every_legal_pair, legal, pairs, reference
from launcher import run_mpi
from training import (
    Done,
    ForgetsTheSumOverTensorRanks,
    LeavesTheTiedGradientBehind,
    LeavesTheTiedWeightBehind,
    NeverGathersTheUpdate,
    NothingDecays,
    OwnChunksNorm,
    Proxy,
    takes_all_for,
    talk_through,
)

from minipar.comm import chunk_bounds, run_local
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.placement import Shard
from minipar.train.trainer import Trainer

TEXTBOOK = Combination((2, 4, 2), "1f1b", microbatches=4, zero=1)
EVERYTHING = Combination((2, 2, 2), "1f1b", True, 4, 1, dropout=True, clip=True)


def wrong_of(combination, kind=Trainer):
    """All that any rank finds wrong, in-process."""
    return sorted({line for lines in run_local(combination.ranks, check, combination, kind) for line in lines})


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_the_choice_covers_every_pair_of_values_of_two_axes():
    covered = set().union(*(pairs(dataclasses.asdict(c)) for c in covering()))
    assert covered == every_legal_pair()
    assert len(covering()) == len(set(map(str, covering()))) >= 150
    values = {axis: {getattr(c, axis) for c in covering()} for axis in AXES}
    assert values["schedule"] == {None, *SCHEDULES} and values["zero"] == {0, 1, 2, 3}
    assert all(values[axis] == {False, True} for axis in ("sequence", "recompute", "dropout", "clip"))


def test_every_layout_meets_every_schedule_and_every_stage():
    layouts = {c.layout for c in covering()}
    sizes = [s for s in itertools.product((1, 2, 3, 4, 8), repeat=3) if s[0] * s[1] * s[2] <= 8]
    assert layouts == set(sizes) and len(layouts) == 29
    pipelines = [layout for layout in layouts if layout[2] > 1]
    met = set(itertools.product(pipelines, AXES["schedule"][1:])) - {((1, 1, 8), "dualpipev")}  # which needs m = 16
    assert {(c.layout, c.schedule) for c in covering()} >= met
    assert {(c.layout, c.zero) for c in covering()} == set(itertools.product(layouts, range(4)))


@pytest.mark.long
def test_the_legal_pairs_are_those_of_legal_combinations():
    """On three layouts, by brute force."""
    layouts = [(1, 3, 2), (2, 1, 1), (1, 1, 8)]
    brute = set()
    for values in itertools.product(layouts, *list(AXES.values())[1:]):
        some = dict(zip(AXES, values, strict=True))
        if legal(some):
            brute |= pairs(some)
    assert {pair for pair in brute if pair[0][0] == "layout"} == {
        pair for pair in every_legal_pair() if pair[0][0] == "layout" and pair[0][1] in layouts
    }
    assert brute <= every_legal_pair()


# ---- in-process ------------------------------------------------------------------------------------------------------


def with_a_new_value(combinations):
    """The combinations that have a value of an axis that none before them has: `make long` runs the others."""
    chosen = []
    seen = set()
    for combination in combinations:
        values = {(axis, getattr(combination, axis)) for axis in AXES}
        if not values <= seen:
            chosen.append(combination)
        seen |= values
    return chosen


CHOSEN = with_a_new_value(covering())


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "combination", [pytest.param(c, marks=() if c in CHOSEN else pytest.mark.long) for c in covering()], ids=str
)
def test_a_combination_trains_as_one_device_and_sends_as_said(combination):
    assert wrong_of(combination) == []


def test_everything_at_once():
    assert wrong_of(EVERYTHING) == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("zero", "schedule"), [*itertools.product((1, 3), ("1f1b", "interleaved-1f1b", "zbv"))])
def test_the_textbooks_16_ranks(schedule, zero):
    """dp = 2, tp = 4, pp = 2 with ZeRO: how Narayanan et al. 2021 train on thousands."""
    combination = replace(TEXTBOOK, schedule=schedule, zero=zero, sequence=zero == 3, clip=True)
    assert wrong_of(combination) == []


# ---- under mpirun ----------------------------------------------------------------------------------------------------


def chosen(ranks, count):
    """`count` of the combinations on so many ranks, evenly spread over the list."""
    some = [c for c in covering() if c.ranks == ranks]
    return [some[i * len(some) // count] for i in range(count)]


JOBS = {2: 4, 3: 3, 4: 6, 6: 6, 8: 8}


def test_the_jobs_and_the_document_agree_on_how_many_there_are():
    assert sum(JOBS.values()) >= 25
    document = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text(encoding="utf-8")
    assert f"| {len(covering())} combinations " in document
    assert f"| {sum(JOBS.values())} of them under `mpirun`" in document
    assert all(len(set(chosen(ranks, count))) == count for ranks, count in JOBS.items())


def run_job(ranks, combinations):
    script = f"""
from combinations import Combination, check_all
from minipar.comm import main

main(lambda comm: check_all(comm, {combinations!r}))
"""
    result = run_mpi(ranks, script, timeout=150)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[0] for line in lines] == ["equal"] * len(combinations)


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks", [ranks if ranks < 4 else pytest.param(ranks, marks=pytest.mark.long) for ranks in JOBS]
)
def test_the_same_check_passes_under_mpirun(ranks):
    run_job(ranks, chosen(ranks, JOBS[ranks]))


@pytest.mark.long
def test_the_textbooks_16_ranks_under_mpirun():
    run_job(16, [TEXTBOOK])


TRAIN = ["-m", "minipar.train"]
SMALL = "--layers 4 --hidden 24 --heads 6 --seq-len 12 --steps 3 --dtype float64 --verify"
COMMANDS = {
    "3D with ZeRO-1, default sizes": (8, "--dp 2 --tp 2 --pp 2 --zero-stage 1 --schedule 1f1b --microbatches 4 "
        "--sequence-parallel --clip-grad 1.0 --dropout 0.1 --dtype float64 --verify --steps 20", "within rounding"),
    "3D with ZeRO-3": (8, f"{SMALL} --dp 2 --tp 2 --pp 2 --zero-stage 3 --schedule zbv --microbatches 2 "
        "--global-batch 8 --recompute full", "within rounding"),
    "ZeRO-2 in a pipeline": (6, f"{SMALL} --dp 3 --pp 2 --zero-stage 2 --schedule zb-h2 --microbatches 4 "
        "--global-batch 12 --reduction ordered --dropout 0.1", "bit for bit"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_proves_it(name):
    ranks, flags, how = COMMANDS[name]
    result = run_mpi(ranks, [*TRAIN, *flags.split()], timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"verify: {ranks} ranks = 1 device" in result.stdout and how in result.stdout


# ---- the check can fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_a_difference_in_a_parameter_a_loss_or_a_norm_is_found(exact):
    """By one bit where bits are compared; by a little more than the bound elsewhere."""
    states, reports = right = reference(EVERYTHING.config())
    more = 1 + (2.3e-16 if exact else 1e-10)
    assert differences(*right, right, exact) == []
    for name in states[0]:
        for step in (0, 1):
            other = [dict(state) for state in states]
            other[step][name] = other[step][name].copy()
            largest = np.unravel_index(np.abs(other[step][name]).argmax(), other[step][name].shape)
            other[step][name][largest] *= more
            (wrong,) = differences(other, reports, right, exact)
            assert wrong.startswith(f"step {step}: {name} ")
    for which, what in enumerate(("loss", "gradient norm")):
        other = [list(report) for report in reports]
        other[1][which] *= more
        (wrong,) = differences(states, other, right, exact)
        assert wrong.startswith(f"step 1: {what} ")
    assert differences([{**states[0], "h.0.ln_1.bias": np.full(20, np.nan)}, states[1]], reports, right, False)
    assert "parameters ['wpe.weight']" in differences(
        [{n: x for n, x in states[0].items() if n != "wpe.weight"}, states[1]], reports, right, exact
    )[0]  # fmt: skip


class NormOverTheWrongAxis(Trainer):
    """The split parameters' squares are summed over dp, where each rank has the same ones."""

    def _clip_grad_norm(self, max_norm):
        mesh = self.mesh
        return clip_grad_norm(self.ddp.parameters(), max_norm, mesh.dp, mesh.dp, mesh.pp)


class GradientsAveragedOverTensorRanks(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        right = self.ddp.before_reduce

        def average(parameters):
            right(parameters)
            for p in parameters:
                p.grad /= self.mesh.tp.size

        self.ddp.before_reduce = average


class ForgetsTheSumOverReplicas(Trainer):
    class Comm(Proxy):
        def reduce_scatter(self, full, out, **options):
            start, stop = chunk_bounds(full.size, self.size)[self.rank]
            out[...] = full[start:stop].copy()
            return Done(out)

    def __init__(self, *args):
        super().__init__(*args)
        talk_through(self.Comm, self.ddp)


class NormOfOnePipelineRank(Trainer):
    def _clip_grad_norm(self, max_norm):
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.mesh.dp, self.mesh.tp)


class LossOfOneReplica(Trainer):
    class Comm(Proxy):
        def all_reduce(self, array, **options):
            return array

    def _forward_backward(self, step):
        right = self.mesh.dp_cp
        self.mesh.dp_cp = self.Comm(right)
        try:
            return super()._forward_backward(step)
        finally:
            self.mesh.dp_cp = right


# What each mistake shows in, at the least.
MISTAKES = {
    NormOverTheWrongAxis: "gradient norm",
    GradientsAveragedOverTensorRanks: "gradient norm",
    ForgetsTheSumOverTensorRanks: "predicted",
    ForgetsTheSumOverReplicas: "predicted",
    takes_all_for(Shard): "gradient norm",
    LeavesTheTiedGradientBehind: "predicted",
    LeavesTheTiedWeightBehind: "loss",
    NormOfOnePipelineRank: "gradient norm",
    OwnChunksNorm: "gradient norm",
    NeverGathersTheUpdate: "replicas hold different parameters",
    LossOfOneReplica: "loss",
    NothingDecays: "wte.weight",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_in_the_program_is_caught(kind):
    wrong = wrong_of(EVERYTHING, kind)
    assert any(MISTAKES[kind] in line for line in wrong), wrong
    assert any(re.search(r"step|differs", line) for line in wrong), "it shows in the values, not in the bytes alone"
