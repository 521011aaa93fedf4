"""Claims about each list of choices that a search tries: sizes, methods, experts, shards, meshes and schedules."""

from dataclasses import replace

import pytest
from planning import a100s, layout

from minipar.errors import UsageError
from minipar.parallel.pipeline.schedules import make
from minipar.plan import search
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.model import ModelShape, find_model
from minipar.plan.pipeline_time import simulated_actions
from minipar.plan.rank_bytes import memory
from minipar.plan.search import judge, plan
from minipar.plan.space import SearchSpace, can_run, divisors, layouts, meshes, schedules
from minipar.plan.step_time import StepTime

GPT2 = find_model("gpt2")
MIXTRAL = find_model("mixtral-8x7b")
FREE = SearchSpace()


def shape(layers, **given):
    """Make a small model of so many layers."""
    return ModelShape(layers, 64, 4, 131, 64, **given)


def test_divisors_are_whole_and_sorted():
    assert [divisors(n) for n in (1, 2, 6, 7, 12, 16)] == [
        [1], [1, 2], [1, 2, 3, 6], [1, 7], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16],
    ]  # fmt: skip


def test_ulysses_needs_whole_heads_for_each_rank_of_cp():
    """A tp rank of Llama 3 has 32/t heads and 8/t of keys."""
    llama = find_model("llama-3-8b")
    assert FREE.context_methods(llama, 8, 1) == ["ring"]
    assert FREE.context_methods(llama, 4, 2) == ["ring", "all-gather", "ulysses"]
    assert FREE.context_methods(llama, 4, 4) == FREE.context_methods(llama, 8, 2) == ["ring", "all-gather"]
    only = SearchSpace(context_parallel="ulysses")
    assert (only.context_methods(llama, 1, 8), only.context_methods(llama, 1, 16)) == (["ulysses"], [])


@pytest.mark.parametrize(
    ("space", "replicas", "tp", "per_host", "expected"),
    [
        (FREE, 2, 4, 8, [(1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (2, 4)]),
        (FREE, 2, 4, 4, [(1, 1), (2, 1), (4, 1), (1, 4)]),
        (FREE, 4, 2, 2, [(1, 1), (2, 1), (1, 2)]),
        (FREE, 2, 4, 2, [(1, 1), (2, 1), (1, 4)]),
        (FREE, 3, 1, 1, [(1, 1)]),
        (SearchSpace(etp=(1, 2, 3)), 1, 4, 8, [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]),
        (SearchSpace(ep=(4, 2)), 2, 2, 1, [(2, 1), (4, 1), (2, 2)]),
    ],
)
def test_experts_divide_the_ranks_that_route_other_tokens(space, replicas, tp, per_host, expected):
    """Those ranks share a host unless ep is given: they are replicas tp/etp, and per_host/etp of them are in a host."""
    assert space.expert_meshes(MIXTRAL, replicas, tp, per_host) == expected


def test_without_experts_there_is_one_choice():
    assert FREE.expert_meshes(GPT2, 8, 4, 8) == [(1, 4)]


def test_three_experts_are_on_one_rank_or_on_three():
    three = shape(4, experts=3, top_k=1, biases=False)
    assert SearchSpace(etp=1).expert_meshes(three, 6, 2, 12) == [(1, 1), (3, 1)]


def test_stages_of_zero_need_ranks_and_replicas_a_stage():
    assert FREE.shards(1, 1) == [(0, 1)]
    assert FREE.shards(2, 1) == FREE.shards(1, 2) == [(stage, 1) for stage in (0, 1, 2, 3)]
    several = SearchSpace(zero=(3, 0), zero_replicas=(4, 1, 2))
    assert several.shards(6, 6) == [(0, 1), (3, 1), (3, 2)]
    assert several.shards(4, 4) == [(0, 1), (3, 1), (3, 2), (3, 4)]


def test_choices_that_do_not_go_together_are_no_layouts():
    assert not can_run(layout(zero_replicas=2, zero=1, dp=4, ep=2))
    assert not can_run(layout(recompute="selective", attention="flash"))
    assert not can_run(layout(tp=2, etp=1))


@pytest.mark.parametrize(
    "given",
    [
        {"zero_replicas": 2, "zero": 1, "dp": 2},
        {"recompute": "selective"},
        {"tp": 2, "etp": 1, "sequence_parallel": True},
        {"tp": 2, "etp": 2},
        {"tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_choices_that_go_together_are_layouts(given):
    assert can_run(layout(**given))


def test_a_pipeline_may_have_as_many_stages_as_layers():
    every = list(meshes(shape(4), a100s(8), 8, SearchSpace(tp=1), 64))
    assert every == [(1, 1, 1, 8), (1, 1, 2, 4), (1, 1, 4, 2)]


def test_a_layout_of_as_many_stages_as_layers_is_judged():
    judged = judge(GPT2, layout(pp=12, microbatches=12), Cluster(GPUS["a100"], 12, 12), 12, 64)
    assert judged.layout.pp == 12 and judged.time.exact


WITH_CP = SearchSpace(
    tp=2,
    cp=2,
    pp=1,
    zero=(0, 1),
    recompute="none",
    microbatch=1,
    context_parallel="ring",
    attention="flash",
    sequence_parallel=True,
)


def test_cp_and_experts_share_the_ranks_of_a_stage():
    """16 GPUs are dp 4, cp 2 and tp 2. Two ranks of tp route other tokens if experts are not cut."""
    space = replace(WITH_CP, ep=(1, 8))
    found = [(one.dp, one.ep, one.expert_tp, one.zero) for one in layouts(MIXTRAL, a100s(16), 4, space, 64)]
    assert found == [(4, ep, etp, zero) for etp in (1, 2) for ep in (1, 8) for zero in (0, 1)]


def test_experts_lie_on_the_ranks_of_cp_and_tp_without_dp():
    space = replace(WITH_CP, ep=(2, 4), etp=1)
    alone = [(one.ep, one.zero) for one in layouts(MIXTRAL, a100s(4), 1, space, 64)]
    assert alone == [(2, 0), (2, 1), (4, 0), (4, 1)]


@pytest.mark.parametrize(
    ("layers", "pp", "m", "fixed", "balanced", "expected"),
    [
        (12, 1, 8, None, False, [("1f1b", 1)]),
        (12, 4, 4, None, False, [("1f1b", 1), ("interleaved-1f1b", 3), ("zb-h1", 1)]),
        (12, 4, 4, None, True, [("1f1b", 1), ("interleaved-1f1b", 3), ("zb-h1", 1)]),
        (12, 4, 3, None, False, [("1f1b", 1)]),
        (12, 4, 6, None, False, [("1f1b", 1), ("zb-h1", 1)]),
        (126, 16, 16, "interleaved-1f1b", False, [("interleaved-1f1b", v) for v in (2, 4, 8)]),
        (126, 16, 16, "interleaved-1f1b", True, [("interleaved-1f1b", v) for v in (2, 4)]),
        (125, 16, 16, "interleaved-1f1b", False, [("interleaved-1f1b", v) for v in (2, 4)]),
        (12, 3, 3, "zbv", False, [("zbv", 1)]),
        (12, 4, 8, "zbv", False, []),
        (12, 4, 3, "zb-h1", False, []),
        (12, 4, 3, "zb-h2", False, [("zb-h2", 1)]),
    ],
)
def test_a_pipeline_has_the_schedules_that_fit(layers, pp, m, fixed, balanced, expected):
    assert list(schedules(shape(layers), pp, m, fixed, balanced)) == expected
    if not balanced:
        assert list(schedules(shape(layers), pp, m, fixed)) == expected


# ---- the search's own limits -----------------------------------------------------------------------------------------


def test_as_many_layouts_as_the_limit_are_searched(monkeypatch):
    space = SearchSpace(tp=1, recompute="none")
    count = len(list(layouts(GPT2, a100s(2), 4, space)))
    monkeypatch.setattr(search, "MOST_LAYOUTS", count)
    assert plan(GPT2, a100s(2), 4, 64, space).examined == count
    monkeypatch.setattr(search, "MOST_LAYOUTS", count - 1)
    with pytest.raises(UsageError, match=f"^more than {count - 1} layouts: narrow the search, with --tp"):
        plan(GPT2, a100s(2), 4, 64, space)


def test_a_layout_that_needs_all_usable_memory_fits():
    space = SearchSpace(tp=1, pp=1, zero=0, recompute="none", microbatch=1)
    cluster = a100s(2)
    exact = replace(cluster.assumptions, memory_used=1.0)
    (one,) = layouts(GPT2, cluster, 4, space)
    needed = memory(GPT2, one, 64).total
    full = replace(cluster, gpu=replace(cluster.gpu, memory=needed), assumptions=exact)
    assert plan(GPT2, full, 4, 64, space).fitting == 1


def test_the_first_of_equally_fast_layouts_is_shown(monkeypatch):
    """The first has the least ZeRO stage, and recomputes nothing."""
    monkeypatch.setattr(search, "step_time", lambda *given, **options: StepTime(1.0, 0, 0, 0, 0, 0, True))
    first = {}
    for one in layouts(GPT2, a100s(4), 4):
        first.setdefault(one.mesh, one)
    found = [mesh.layout for mesh in plan(GPT2, a100s(4), 4, 64).meshes]
    assert found == list(first.values()) and {one.zero for one in found} == {0}


def test_the_best_are_simulated_until_their_actions_are_too_many(monkeypatch):
    """The first is simulated in any case, another one if those before it have at most as many actions as the limit."""
    space = SearchSpace(tp=1, zero=0, recompute="none", schedule="1f1b", microbatch=1)
    cluster = Cluster(GPUS["a100"], 12, 12)
    chosen = [one.layout for one in plan(GPT2, cluster, 12, 64, space, top=9).meshes if one.layout.pp > 1]
    before = [sum(simulated_actions(one) for one in chosen[:n]) for n in range(len(chosen))]
    assert len(chosen) >= 4
    for most, expected in ((0, 1), (before[1], 2), (before[2] - 1, 2), (before[2], 3)):
        monkeypatch.setattr(search, "MOST_SIMULATED", most)
        plans = plan(GPT2, cluster, 12, 64, space, top=9).plans
        exact = {one.layout.pp for one in plans if one.layout.pp > 1 and one.time.exact}
        assert exact == {one.pp for one in chosen[:expected]}


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [("1f1b", 3, 5, 1), ("zb-h1", 3, 5, 1), ("zbv", 2, 6, 1), ("interleaved-1f1b", 2, 6, 3), ("gpipe", 2, 1, 1)],
)
def test_actions_are_counted_as_the_schedule_makes_them(name, p, m, v):
    one = layout(pp=p, microbatches=m, schedule=name, virtual_stages=v)
    actions = make(name, p, m, v if v > 1 else None)
    assert simulated_actions(one) == sum(len(rank) for rank in actions.ranks)
    long = make(name, p, 3 * p, v if v > 1 else None)
    assert simulated_actions(replace(one, microbatches=50 * p)) == sum(len(rank) for rank in long.ranks)


def test_of_a_long_step_three_rounds_and_the_rest_are_counted():
    more = make("1f1b", 3, 10, None)
    assert simulated_actions(layout(pp=3, microbatches=100)) == sum(len(rank) for rank in more.ranks)
