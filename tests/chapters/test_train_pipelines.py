"""The pipeline chapters' runs: they are compared with one device, counted, and timed on the model clock."""

import numpy as np
import pytest

from chapters.support.ch07.train import CountsTwice, DropsTied, peak_activations
from chapters.support.ch08.clock import same_times, stage_durations, timeline_on_model_clock
from chapters.support.pipeline_runs import PipelineRuns, gradients_on_one_device, refusal
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import make
from minipar.train.trainer import Trainer


def runs(comm, *cases):
    """Each case's run: (schedule, ranks of the pipeline or None, trainer)."""
    pipelines = PipelineRuns(comm)
    return [pipelines.train(name, stages, kind) for name, stages, kind in cases]


def test_runs_equal_one_device_and_send_what_the_schedule_says():
    cases = [("1f1b", None, Trainer), ("zbv", None, Trainer), ("1f1b", 1, Trainer)]
    ranks = run_local(2, runs, *cases)
    assert all(run.verdict.passed for found in ranks for run in found)
    for number, name in enumerate(("1f1b", "zbv")):
        report = check(make(name, 2, 2))
        assert [found[number].messages for found in ranks] == report.sends
        assert [found[number].peak_alive for found in ranks] == report.peak_activations


@pytest.mark.parametrize("kind", [CountsTwice, DropsTied])
def test_planted_mistakes_are_seen(kind):
    for found in run_local(2, runs, ("1f1b", None, kind)):
        assert not found[0].verdict.passed


def test_the_model_clock_gives_the_simulators_times_only():
    ran, message = timeline_on_model_clock("1f1b", 50_000), 50_000
    linear, attention, head = 24 * 16 * 32**2, 4 * 16 * 16 * 32, dict.fromkeys("FIW", 2 * 16 * 32 * 256)
    block = {"F": linear + attention, "I": linear + 2 * attention, "W": linear}
    assert same_times(ran, simulate(ran.schedule, stage_durations(block, head, 4, message)))
    assert not same_times(ran, simulate(ran.schedule, stage_durations(block | {"W": linear + 1}, head, 4, message)))


def test_gradients_on_one_device_are_those_of_small_differences():
    weights, batch = np.random.default_rng(0).normal(size=(2, 3, 3)), np.random.default_rng(1).normal(size=(2, 4, 3))

    def loss(change):
        y = batch
        for weight in weights + change:
            y = np.tanh(y @ weight)
        return (y**2).sum() / 2

    change = np.zeros_like(weights)
    change[0, 1, 2] = 1e-6
    slope = (loss(change) - loss(-change)) / 2e-6
    assert gradients_on_one_device(weights, batch)[0, 1, 2] == pytest.approx(slope, rel=1e-6)


def test_recompute_keeps_inputs_only():
    assert peak_activations(3, 2, recompute=True) < peak_activations(3, 2, recompute=False)


def test_a_refusal_is_an_error_of_the_library():
    assert "takes 0 or more" in refusal(Durations, -1)
    with pytest.raises(AssertionError, match="Durations has refused nothing"):
        refusal(Durations, 1)
    with pytest.raises(UsageError):
        make("no such schedule", 1, 1)
