"""nanotron's runs in the Ultra-Scale Playbook: constants fitted to the 1B model, judged by the 8B model.

Without a pipeline, on at most 32 hosts. Nothing is claimed about pipelines, whose measured times differ by factors from
one run to the next.
"""

from math import exp
from statistics import median

import pytest
from plan.fit_nanotron import MEMORY, TIME, memory_loss, time_loss
from plan.nanotron_runs import nbytes, runs, seconds, without_pipeline
from plan.playbook import choice, groups, spearman, within

from minipar.plan.programs import PROGRAMS

NANO = PROGRAMS["nanotron"]


def frozen(names):
    values = vars(NANO.assumptions) | vars(NANO.framework) | vars(NANO.framework.kept)
    values |= {"elementwise": NANO.assumptions.forward_traffic / 2}
    return {name: values[name] for name in names}


@pytest.mark.parametrize(("loss", "names"), [(time_loss, TIME), (memory_loss, MEMORY)])
def test_no_other_constant_fits_the_1b_runs_better(loss, names):
    """The constants in the source are those of the fit, in two or three digits."""
    values = frozen(names)
    least = loss(values)
    for name in names:
        assert min(loss(values | {name: values[name] * exp(step)}) for step in (-0.05, 0.05)) > 0.99 * least


def shares(model, program=NANO):
    chosen = without_pipeline(model)
    time, held = [seconds(run, program) for run in chosen], [nbytes(run, program) for run in chosen]
    return within(time, [run.seconds for run in chosen]), within(held, [run.nbytes for run in chosen])


def test_fitted_1b_within_20_percent_in_nine_of_ten():
    time, held = shares("1B")
    assert len(without_pipeline("1B")) == 149 and time > 0.90 and held > 0.90


def test_8b_seconds_and_memory_within_20_percent():
    """Held out: 83 of 100 runs in time, 90 of 100 in memory."""
    time, held = shares("8B")
    assert len(without_pipeline("8B")) == 105 and time > 0.83 and held > 0.90


def test_with_megatrons_constants_they_are_not():
    """The claim above can fail: the program decides, not the formulas."""
    time, held = shares("8B", PROGRAMS["megatron"])
    assert time < 0.40 and held < 0.30


def test_8b_runs_are_ranked_on_every_number_of_hosts():
    found = [
        spearman([seconds(run) for run in group], [run.seconds for run in group])
        for group in groups(without_pipeline("8B")).values()
    ]
    assert len(found) == 6 and median(found) > 0.94 and min(found) > 0.89


def test_the_best_8b_mesh_is_in_the_first_three():
    """The planner's first choice reaches nine tenths of the fastest run, on every number of hosts."""
    choices = [choice(group) for group in groups(without_pipeline("8B")).values()]
    assert max(one.best_mesh for one in choices) <= 3 and min(one.first for one in choices) > 0.9


def test_the_simplest_of_the_tied_is_the_better_choice():
    """Pipelines and 64 hosts included, in both models: 12 and 10 of 14 groups instead of 11 and 8."""
    counts = []
    for spread in (0.0, NANO.spread):
        choices = [choice(group, spread=spread) for group in groups(runs()).values()]
        counts.append((sum(one.best_mesh <= 5 for one in choices), sum(one.first >= 0.9 for one in choices)))
    assert len(groups(runs())) == 14 and counts == [(11, 8), (12, 10)]


def test_the_spread_is_what_the_held_out_runs_support():
    time, _ = shares("8B")
    assert (NANO.spread, int(10 * time)) == (0.20, 8) and "in 8 of 10 runs" in NANO.evidence
