"""The planner against what others printed and measured: a few rows of each source (all: tests/release/plan)."""

from dataclasses import replace

import pytest
from plan.nanotron_runs import seconds, without_pipeline
from plan.playbook import spearman
from planning import a100s, layout

from minipar.plan.model import find_model
from minipar.plan.pipeline_time import StageTime, simulate_exactly
from minipar.plan.rank_bytes import in_flight, memory, rank_parameters
from minipar.plan.search import judge
from minipar.plan.step_time import step_time


@pytest.mark.parametrize(
    ("name", "tp", "pp", "gpus", "batch", "microbatch", "printed"),
    [
        ("megatron-1.7b", 1, 1, 32, 512, 16, 137),
        ("megatron-7.5b", 4, 1, 128, 512, 16, 142),
        ("megatron-39b", 8, 2, 512, 1536, 4, 138),
        ("megatron-145b", 8, 8, 1536, 2304, 2, 148),
    ],
)
def test_teraflops_of_megatrons_table_1(name, tp, pp, gpus, batch, microbatch, printed):
    """Narayanan et al. 2021 (arXiv 2104.04473): 1F1B, every layer recomputed. Nothing is fitted to these rows."""
    dp = gpus // tp // pp
    one = layout(dp=dp, tp=tp, pp=pp, microbatch=microbatch, microbatches=batch // dp // microbatch, recompute="full")
    for program, bound in (("megatron", 0.122), ("megatron-2021", 0.03)):
        predicted = judge(find_model(name), one, a100s(gpus, program), batch, 2048)
        assert predicted.tflops == pytest.approx(printed, rel=bound)


@pytest.mark.parametrize(("recompute", "printed"), [("selective", 13.75), ("full", 18.13)])
def test_seconds_of_a_step_of_gpt3(recompute, printed):
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 5: 64 GPUs, selective with sequence parallelism."""
    one = layout(tp=8, pp=8, microbatches=64, virtual_stages=3, schedule="interleaved-1f1b", recompute=recompute)
    one = replace(one, sequence_parallel=recompute == "selective")
    for program, bound in (("megatron", 0.092), ("megatron-2021", 0.055)):
        time = step_time(find_model("gpt3-175b"), one, a100s(64, program), 2048)
        assert time.total == pytest.approx(printed, rel=bound)


# Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: GB of model state for 7.5B parameters, by replicas and stage.
ZERO = {4: (52.5, 41.3, 30.0), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 1024: (30.1, 15.1, 0.12)}


@pytest.mark.parametrize("dp", ZERO)
def test_gigabytes_of_the_zero_papers_table_1(dp):
    model = find_model("gpt3-175b")
    for zero, printed in zip((1, 2, 3), ZERO[dp], strict=True):
        one = layout(dp=dp, zero=zero)
        held = memory(model, one, 2048)
        scale = 7.5 / rank_parameters(model, one)
        assert scale * (held.parameters + held.gradients + held.optimizer) == pytest.approx(printed, abs=0.06)


@pytest.mark.parametrize(("schedule", "weights", "live"), [("1f1b", 1, 4), ("zb-h1", -1, 4), ("zb-h2", -2, 7)])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (1, 1.2, 0.8)])
def test_bubbles_of_the_zero_bubble_papers_table(schedule, weights, live, f, b, w):
    """Qi et al. 2023 (arXiv 2401.10241), table 2: a rank idles for (p-1)(F + B + W), (p-1)(F + B - W) and
    (p-1)(F + B - 2W) seconds and holds p, p and 2p - 1 microbatches' activations."""
    p, m = 4, 16
    step = simulate_exactly(schedule, p, m, 1, (StageTime(f, b, w),) * p, 0.0)
    assert step.ranks_end[0] - m * (f + b + w) == pytest.approx((p - 1) * (f + b + weights * w), abs=1e-9)
    assert in_flight(layout(pp=p, microbatches=m, schedule=schedule)) == live


@pytest.mark.parametrize(("hosts", "number"), [(2, 17), (16, 30)])
def test_runs_of_the_playbook_are_ranked(hosts, number):
    """The Ultra-Scale Playbook's runs of an 8B model (nanotron). The constants are fitted to its 1B model alone."""
    runs = [run for run in without_pipeline("8B") if run.hosts == hosts]
    assert len(runs) == number
    assert spearman([seconds(run) for run in runs], [run.seconds for run in runs]) > 0.92
