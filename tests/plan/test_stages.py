"""Stages by hand: when gradients are reduced after a pipeline, and how many microbatches count without one."""

from dataclasses import replace

import pytest
from planning import a100s, layout

from minipar.plan import stages
from minipar.plan.compute import UnitTime
from minipar.plan.layout import MEGATRON
from minipar.plan.model import find_model
from minipar.plan.pipeline_time import SimulatedPipeline
from minipar.plan.stages import Stages

GPT2 = find_model("gpt2")


def unit(weight, reduce):
    """Make the times of a unit that only computes weight gradients and reduces them."""
    return UnitTime(forward=0.0, backward_input=0.0, backward_weight=weight, tp=0.0, gather=0.0, reduce=reduce)


@pytest.mark.parametrize(
    ("table", "tied", "late"),
    [
        (0.0, 100.0, 100.0),  # the last rank's 9, the gradient's 100, and a reduction
        (20.0, 0.5, 20.0),  # 9 after the layer, the table's 20, and a reduction
        (20.0, 0.0, 20.0),
        (0.0, 0.0, 5.0),  # the layer's 14, and a reduction
    ],
)
def test_a_tied_embedding_waits_for_both_of_its_gradients(table, tied, late):
    """A layer takes 1 s of weight gradients and 5 s of reduction, the embedding `table` and 1 s.

    Its other gradient takes `tied` seconds from the last stage.
    """
    own = Stages(GPT2, layout(dp=2, pp=2, microbatches=4), a100s(4), 64)
    own.layers = [1, 1]
    own.units = replace(own.units, layer=unit(1.0, 5.0), embedding=unit(table, 1.0), head=unit(0.0, 0.0))
    pipeline = SimulatedPipeline(makespan=10.0, gradients_begin=(8.0, 6.0), ranks_end=(10.0, 9.0))
    assert own.late_reduction(pipeline, tied) == late


def test_a_stages_backward_gathers_its_layers_and_reduces_later():
    """The links are so slow that only gathers take time. The embedding's table is not read, and nothing reduced yet."""
    once = replace(MEGATRON, every_microbatch=False)
    cluster = a100s(8)
    slow = replace(cluster, framework=once, gpu=replace(cluster.gpu, inside=1e6))
    own = Stages(GPT2, layout(dp=4, pp=2, microbatches=4, zero=3), slow, 64)
    own.hop_wait = 0.0
    time = own.stage_time(own.units_of(0))
    expected = 6 * own.units.layer.gather
    assert time.backward_input + time.backward_weight == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("m", "followed"), [(1, 1), (2, 2), (3, 3), (4, 3), (9, 3)])
def test_three_microbatches_are_followed(m, followed, monkeypatch):
    """Each further one takes as long as the second."""
    ends = []
    real = stages.overlapped

    def noted(*given, **options):
        moments = real(*given, **options)
        ends.append(max(moments))
        return moments

    monkeypatch.setattr(stages, "overlapped", noted)
    seconds = Stages(GPT2, layout(dp=2, microbatches=m, zero=3), a100s(2), 64).without_pipeline()
    assert len(ends) == followed
    more = (m - 3) * (ends[1] - ends[0]) if m > 3 else 0.0
    assert seconds == pytest.approx(ends[-1] + more, rel=1e-12)
