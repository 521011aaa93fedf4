"""nanotron's runs in the Ultra-Scale Playbook: constants fitted to the 1B model, judged by the 8B model.

Without a pipeline, on at most 32 hosts. Nothing is claimed about pipelines, whose measured times differ by factors from
one run to the next.
"""

from dataclasses import replace
from math import exp, log
from statistics import median

import pytest
from plan.fit_nanotron import MEMORY, TIME, memory_loss, time_loss
from plan.nanotron_runs import LENGTH, MODELS, MOST_HOSTS, nbytes, runs, seconds, without_pipeline
from plan.playbook import choice, groups, spearman, within

from minipar.plan.cluster import GPUS, Assumptions, Cluster, gather_seconds
from minipar.plan.layout import MEGATRON, NANOTRON
from minipar.plan.programs import PROGRAMS
from minipar.plan.rank_bytes import memory
from minipar.plan.step_time import step_time

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
    """And the planner's first choice reaches nine tenths of the fastest run, on every number of hosts."""
    choices = [choice(group) for group in groups(without_pipeline("8B")).values()]
    assert max(one.best_mesh for one in choices) <= 3 and min(one.first for one in choices) > 0.9


@pytest.mark.long
def test_the_simplest_of_the_tied_is_the_better_choice():
    """Pipelines and 64 hosts included, in both models: 12 and 10 of 14 groups instead of 11 and 8."""
    counts = []
    for spread in (0.0, NANO.spread):
        choices = [choice(group, spread=spread) for group in groups(runs()).values()]
        counts.append((sum(one.best_mesh <= 5 for one in choices), sum(one.first >= 0.9 for one in choices)))
    assert len(groups(runs())) == 14 and counts == [(11, 8), (12, 10)]


def test_the_least_memory_of_the_tied_is_not():
    reached = []
    for group in groups(without_pipeline("8B")).values():
        tied = 1.2 * min(seconds(run) for run in group)
        least = min((run for run in group if seconds(run) <= tied), key=nbytes)
        reached.append(min(run.seconds for run in group) / least.seconds)
        assert reached[-1] < 0.9 < choice(group, spread=0.2).first
    assert (round(min(reached), 2), round(max(reached), 2)) == (0.71, 0.89)


def test_the_spread_is_what_the_held_out_runs_support():
    time, _ = shares("8B")
    assert (NANO.spread, int(10 * time)) == (0.20, 8) and "in 8 of 10 runs" in NANO.evidence


def test_one_1b_choice_is_a_run_that_took_twice_its_twins_time():
    choices = [choice(group) for group in groups(without_pipeline("1B")).values()]
    assert max(one.best_mesh for one in choices) == 1 and sorted(one.first for one in choices)[1] > 0.9
    assert min(one.first for one in choices) == pytest.approx(0.51, abs=0.01)


def refused(memory_of_a_gpu):
    """Return the runs without a pipeline that ran and are said not to fit."""
    usable = NANO.assumptions.memory_used * memory_of_a_gpu
    return [run for model in MODELS for run in without_pipeline(model) if nbytes(run) > usable]


def test_five_runs_of_254_are_said_not_to_fit():
    """A miss, with an H100's 80e9 bytes of the data sheet and with the 85.5e9 that it shows."""
    assert sum(len(without_pipeline(model)) for model in MODELS) == 254
    assert refused(GPUS["h100"].memory) == refused(85.5e9) and len(refused(85.5e9)) == 5
    assert min(run.layout.microbatch for run in refused(85.5e9)) == 16


def test_these_five_contradict_their_smaller_twins():
    """Half the microbatch took 43 to 77 % less time, and the line through two smaller ones needs 28 to 108 % more
    memory than was reported. Their activations were not all there, or not at once.
    """
    for run in refused(85.5e9):
        same = replace(run.layout, microbatch=1, microbatches=1)
        twins = [
            other
            for other in runs()
            if (other.model, other.hosts, replace(other.layout, microbatch=1, microbatches=1))
            == (run.model, run.hosts, same)
        ]
        twins.sort(key=lambda other: other.layout.microbatch)
        smaller = [other for other in twins if other.layout.microbatch < run.layout.microbatch]
        first, last = smaller[-2:]
        slope = (last.nbytes - first.nbytes) / (last.layout.microbatch - first.layout.microbatch)
        line = last.nbytes + slope * (run.layout.microbatch - last.layout.microbatch)
        assert last.seconds < 0.6 * run.seconds and 1.25 < line / run.nbytes < 2.1


def twins(pipelined):
    """Return by what factors the seconds of a layout at ZeRO 0 and at ZeRO 1 differ, as measured."""
    seconds_of = {(run.model, run.hosts, run.layout): run.seconds for run in runs() if run.hosts <= 32}
    pairs = [
        (took, seconds_of.get((model, hosts, replace(layout, zero=1))))
        for (model, hosts, layout), took in seconds_of.items()
        if layout.zero == 0 and (layout.pp > 1) == pipelined
    ]
    return [exp(abs(log(took / other))) for took, other in pairs if other is not None]


def test_of_pipelined_runs_a_third_are_within_20_percent():
    those = [run for run in runs() if run.layout.pp > 1 and run.hosts <= MOST_HOSTS]
    time = within([seconds(run) for run in those], [run.seconds for run in those])
    held = within([nbytes(run) for run in those], [run.nbytes for run in those])
    assert (time, held) == (pytest.approx(0.33, abs=0.01), pytest.approx(0.53, abs=0.01))


def test_pipelined_runs_differ_from_their_twins_by_factors():
    """Why nothing is claimed about them."""
    assert len(twins(False)) == 97 and median(twins(False)) < 1.05
    assert len(twins(True)) == 55 and median(twins(True)) > 3


def stalls():
    """Return (stages, seconds per microbatch) by which twins differ where one takes 1.5 times as long as the other."""
    seconds_of = {(run.model, run.hosts, run.layout): run.seconds for run in runs() if run.hosts <= MOST_HOSTS}
    found = []
    for (model, hosts, layout), took in seconds_of.items():
        other = seconds_of.get((model, hosts, replace(layout, zero=1))) if layout.zero == 0 and layout.pp > 1 else None
        if other is not None and max(took / other, other / took) > 1.5:
            found.append((layout.pp, abs(took - other) / layout.microbatches))
    return found


def test_of_pipelined_twins_one_stalls_in_each_microbatch():
    """A reading under which twins agree. Of 55 pairs 37 differ by more than half, and by the same seconds for each
    microbatch, whatever tp, dp, model and ZeRO stage: 0.55 with two stages, 1.0 to 1.4 with more. One of them stalled.
    """
    two = sorted(seconds for stages, seconds in stalls() if stages == 2)
    more = sorted(seconds for stages, seconds in stalls() if stages > 2)
    assert (len(two), len(more)) == (18, 19)
    assert median(two) == pytest.approx(0.54, abs=0.015) and 0.44 < two[2] and two[-1] < 0.63
    assert median(more) == pytest.approx(1.15, abs=0.03) and more[0] > 1.0 and more[-1] < 1.4


def test_with_four_stages_and_more_a_run_stalls_or_does_not():
    """What a microbatch takes longer than predicted is at most 0.4 s, or at least 0.8 s."""
    those = [run for run in runs() if run.layout.pp > 2 and run.hosts <= MOST_HOSTS]
    more = [(run.seconds - seconds(run)) / run.layout.microbatches for run in those]
    assert not [each for each in more if 0.4 < each < 0.8]
    smooth = [run for run, each in zip(those, more, strict=True) if each < 0.4]
    assert 0.6 < len(smooth) / len(those) < 0.8


# ---- the mechanisms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_small_microbatches_wait_for_the_host(model):
    """At tp 8 a layer of one sample takes 4.4 to 4.8 ms, in the 1B as in the 8B model."""
    for run in without_pipeline(model):
        layout = run.layout
        if (layout.tp, layout.microbatch, layout.zero) == (8, 1, 0) and run.hosts <= 4:
            each = MODELS[model].layers * layout.microbatches
            assert 4.2e-3 < run.seconds / each < 4.8e-3 and 4.2e-3 < seconds(run) / each < 4.8e-3


def test_the_host_costs_megatron_nothing():
    assert (MEGATRON.lockstep, MEGATRON.hidden_sums, MEGATRON.gradient_copy, MEGATRON.overhead) == (False, True, 0, 0)
    base = Assumptions()
    assert (base.host_layer, base.host_ends, base.cards, base.all_reduce) == (0, 0, 1, 2)
    run = without_pipeline("8B")[0]
    one = step_time(MODELS["8B"], run.layout, Cluster(GPUS["h100"], 8), LENGTH)
    waits = replace(base, host_layer=1.0)
    slow = step_time(MODELS["8B"], run.layout, Cluster(GPUS["h100"], 8, assumptions=waits), LENGTH)
    assert one.total < 20 and slow.compute > 32 * run.layout.microbatches


def test_rings_over_hosts_keep_the_slowest_messages_pace():
    cluster = Cluster(GPUS["h100"], 16, framework=NANOTRON, assumptions=replace(NANO.assumptions, alpha_between=1.0))
    assert gather_seconds(cluster, 0, 1, 16) == 15
    assert gather_seconds(replace(cluster, framework=MEGATRON), 0, 1, 16) == pytest.approx(1 + 14 * 3.4e-6)


def test_twenty_bytes_per_parameter():
    """bf16 weights and gradients; gradients, weights and two moments in fp32."""
    run = without_pipeline("8B")[0]
    one = replace(run.layout, zero=0, dp=8, tp=1, sequence_parallel=False)
    held = memory(MODELS["8B"], one, LENGTH, NANOTRON)
    assert held.parameters + held.gradients + held.optimizer == 20 * MODELS["8B"].parameters
