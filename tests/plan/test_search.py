"""The search tries every layout that divides, shows each mesh at its fastest, and says what would fit if none does."""

from dataclasses import replace

import pytest
from planning import a100s, layout

from minipar.errors import UsageError
from minipar.more.context.token_order import METHODS
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import PRECISIONS
from minipar.plan.model import ModelShape, find_model
from minipar.plan.programs import PROGRAMS
from minipar.plan.rank_bytes import memory, volume
from minipar.plan.report import tied
from minipar.plan.search import TOP, judge, plan
from minipar.plan.space import LEAST_TOKENS, SearchSpace, layouts, microbatch_sizes
from minipar.plan.step_time import StepTime, step_time

GPT2, GPT3, B7 = find_model("gpt2"), find_model("gpt3-175b"), find_model("megatron-7.5b")
LLAMA, MIXTRAL = find_model("llama-3-8b"), find_model("mixtral-8x7b")
EIGHT = layout(dp=8, microbatches=8)
FLASH = SearchSpace(attention="flash", precision=PRECISIONS["bf16"])

# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_every_layout_divides_and_every_choice_is_there():
    every = list(layouts(B7, a100s(64), 128))
    assert len(set(every)) == len(every)
    for one in every:
        assert one.gpus == 64 and one.dp * one.microbatch * one.microbatches == 128 and one.tp <= 8
        assert one.tp > 1 or not one.sequence_parallel
        assert one.zero == 0 or one.dp > 1
    assert {one.zero for one in every} == {0, 1, 2, 3}
    assert {one.schedule for one in every} == {"1f1b", "interleaved-1f1b", "zb-h1"}
    assert {one.recompute for one in every} == {"none", "selective", "full"}
    assert {one.tp for one in every} == {1, 2, 4, 8} and {1, 2, 4, 8, 16} <= {one.pp for one in every}
    assert {one.sequence_parallel for one in every if one.tp > 1} == {False, True}
    narrow = SearchSpace(tp=2, pp=4, zero=1, recompute="full", schedule="gpipe", microbatch=2, sequence_parallel=False)
    sizes = {"dp": 8, "tp": 2, "pp": 4, "microbatch": 2, "microbatches": 8}
    assert list(layouts(B7, a100s(64), 128, narrow)) == [layout(**sizes, zero=1, schedule="gpipe", recompute="full")]


def test_every_layout_with_cp_divides():
    every = list(layouts(LLAMA, a100s(64), 16, SearchSpace(attention="flash", recompute="none"), 131_072))
    assert len(set(every)) == len(every) and {one.gpus for one in every} == {64}
    assert {one.cp for one in every} == {1, 2, 4, 8, 16} and {one.context_parallel for one in every} == set(METHODS)
    assert {one.zero for one in every if one.dp == 1 and one.cp > 1} == {0, 1, 2, 3}
    heads = {(one.tp, one.cp) for one in every if one.context_parallel == "ulysses" and one.cp > 1}
    assert heads == {(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)}, "cp divides the 8 / tp heads of keys"
    scores = {one.recompute for one in layouts(LLAMA, a100s(64), 16, SearchSpace(cp=4, context_parallel="ring"))}
    assert scores == {"none", "full"}, "a ring keeps no scores that could be recomputed"


def test_every_layout_with_ep_divides():
    """With dp = 1 nothing but experts is sharded, over edp = 8/(4 * 1) ranks."""
    fixed = {"schedule": "1f1b", "recompute": "none", "microbatch": 1}
    every = list(layouts(MIXTRAL, a100s(64), 256, replace(FLASH, zero_replicas=(1, 2), **fixed), 4096))
    assert len(set(every)) == len(every)
    assert {(one.tp, one.expert_tp, one.ep) for one in every} == {
        (tp, etp, ep) for tp in (1, 2, 4, 8) for etp in (1, tp) for ep in (1, 2, 4, 8) if etp * ep <= 8
    }
    assert {one.zero_replicas for one in every if one.ep > 1 or one.etp is not None} == {1}
    alone = list(layouts(MIXTRAL, a100s(8), 8, replace(FLASH, tp=8, ep=4, etp=1, pp=1, microbatch=1), 4096))
    assert {(one.dp, one.expert_shards, one.zero) for one in alone} == {(1, 2, zero) for zero in range(4)}


def test_pp_need_not_divide_the_layers():
    """Llama 3 405B has 126 layers and was trained with pp 16 (arXiv 2407.21783, table 4). Megatron's stages of
    ceil(126 / 128) layers are possible; minipar's cuts leave none empty."""
    model = find_model("llama-3-405b")
    for program, stages in (("megatron", 128), ("minipar", 64)):
        cluster = Cluster(GPUS["h100"], 8192, framework=PROGRAMS[program].framework)
        every = list(layouts(model, cluster, 2048, SearchSpace(tp=8, pp=16)))
        assert {one.layers_per_rank(model) for one in every} == {8}
        assert max(16 * one.stages_per_rank for one in every) == stages


@pytest.mark.parametrize(
    ("heads", "groups", "per_host", "sizes"),
    [(12, 12, 8, {1, 2, 4}), (12, 1, 8, {1, 2, 4}), (24, 6, 8, {1, 2}), (64, 8, 16, {1, 2, 4, 8, 16})],
)
def test_tp_divides_the_heads_and_divides_or_repeats_groups(heads, groups, per_host, sizes):
    model = ModelShape(4, 768, heads, 1000, kv_heads=groups)
    assert {one.tp for one in layouts(model, Cluster(GPUS["a100"], 16, per_host), 64, SearchSpace(pp=1))} == sizes


def test_a_tp_over_hosts_is_asked_for_and_a_multiple_of_a_host():
    """96 heads: 16 and 48 are two and six hosts, 12 is none, and 64 does not divide the heads."""
    found = {tp: list(layouts(GPT3, a100s(192), 192, SearchSpace(tp=tp))) for tp in (16, 48, 12, 64)}
    assert [bool(every) for every in found.values()] == [True, True, False, False]
    assert {one.tp for one in layouts(GPT3, a100s(192), 192)} == {1, 2, 4, 8}


def test_pipelines_that_are_possible():
    """Of 12 layers on 64 GPUs, 24 samples: pp no more than the layers, interleaved where it divides the microbatches,
    zb-h1 with at least as many of them, zbv where 2 pp divides the layers; recomputed layers do not go with split
    backwards.
    """
    every = list(layouts(GPT2, a100s(64), 192, SearchSpace(tp=1)))
    assert {one.pp for one in every} == {1, 2, 4, 8}
    looped = {(one.pp, one.microbatches, one.virtual_stages) for one in every if one.schedule == "interleaved-1f1b"}
    assert all(m % pp == 0 for pp, m, _ in looped)
    assert {(pp, v) for pp, _, v in looped} == {(2, 2), (2, 3), (2, 6), (4, 3)}
    assert {one.microbatches >= one.pp for one in every if one.schedule == "zb-h1"} == {True}
    assert {one.recompute for one in every if one.schedule == "zb-h1"} == {"none", "selective"}
    zbv = layouts(GPT2, a100s(64), 192, SearchSpace(tp=1, schedule="zbv"))
    assert {one.pp for one in zbv if one.schedule == "zbv"} == {2}


def test_a_microbatch_is_a_power_of_two_and_one_sample_under_cp():
    assert {one.microbatch for one in layouts(GPT2, a100s(8), 96)} == {1, 2, 4, 8, 16, 32}
    assert {one.microbatch for one in layouts(GPT2, a100s(8), 96, SearchSpace(microbatch=3))} == {3}
    assert microbatch_sizes(8, SearchSpace(), 4) == [1]
    assert microbatch_sizes(8, SearchSpace(), 1) == microbatch_sizes(8, SearchSpace(cp=(4,)), 4) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("length", "space", "sizes"),
    [
        (2 * LEAST_TOKENS - 2, SearchSpace(), [1]),
        (3 * LEAST_TOKENS, SearchSpace(), [1, 2, 3]),
        (131_073, SearchSpace(), [1]),
        (1024, SearchSpace(cp=(4, 1, 4)), [1, 4]),
    ],
)
def test_cp_leaves_a_rank_8192_tokens_unless_it_is_given(length, space, sizes):
    assert space.context_sizes(length) == sizes and LEAST_TOKENS == 8192


@pytest.mark.parametrize(
    ("space", "replicas", "near", "sizes"),
    [
        (SearchSpace(), 64, 4, [1, 2, 4]),
        (SearchSpace(), 12, 8, [1, 2, 4]),
        (SearchSpace(ep=8), 64, 1, [8]),
        (SearchSpace(ep=(8, 1, 8)), 4, 8, [1]),
    ],
)
def test_ep_divides_the_ranks_and_stays_in_a_host(space, replicas, near, sizes):
    assert space.expert_sizes(MIXTRAL, replicas, near) == sizes


def test_replicas_of_shards_divide_dp_and_need_a_zero_stage():
    every = list(layouts(GPT2, a100s(16), 64, SearchSpace(zero_replicas=(1, 2, 4))))
    assert {one.zero_replicas for one in every} == {1, 2, 4}
    assert all(one.zero_replicas == 1 or (one.zero and one.dp % one.zero_replicas == 0) for one in every)
    fixed = list(layouts(GPT2, a100s(16), 64, SearchSpace(dp=4, zero=(3, 0))))
    assert {(one.dp, one.zero) for one in fixed} == {(4, 0), (4, 3)}
    alone = layouts(GPT3, a100s(8), 8, SearchSpace(tp=8, zero=2))
    assert {(one.dp, one.zero) for one in alone} == {(1, 0)}, "with one replica any stage is none"


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_each_mesh_is_shown_at_its_fastest():
    cluster, least = a100s(8), {}
    for one in layouts(GPT2, cluster, 16):
        if memory(GPT2, one, 1024).total <= cluster.usable_memory:
            seconds = step_time(GPT2, one, cluster, 1024, exact=False).total
            least[one.mesh] = min(seconds, least.get(one.mesh, seconds))
    result = plan(GPT2, cluster, 16, 1024)
    assert {candidate.layout.mesh: candidate.seconds for candidate in result.meshes} == least and len(least) > 5
    totals = [one.time.total for one in result.plans]
    assert totals == sorted(totals) and len(totals) == TOP and all(one.time.exact for one in result.plans)


# What the planner chooses on H100s, the gigabytes of the fullest rank and the seconds of a step; the first two as
# chapter 11 prints them. A change of one of these is a decision.
CHOSEN = [
    (("llama-3-8b", 64, 128, 2**15, "megatron", {"tp": 1}), "dp 16, cp 4 (ring), tp 1, pp 1", 72, 17.3),
    (("llama-3-8b", 64, 4, 2**20, "megatron", {"tp": 4}), "dp 2, cp 8 (ring), tp 4, pp 1", 54, 466.2),
    (("mixtral-8x7b", 32, 64, 4096, "megatron", {"tp": 2, "pp": 4}), "dp 4, ep 4, etp 1, tp 2, pp 4", 61, 1.710),
    (("llama-7b", 16, 64, 4096, "minipar", {"pp": 4, "schedule": "zb-h1"}), "dp 4, tp 1, pp 4, ZeRO-1", 36, 1.934),
]


@pytest.mark.parametrize(("question", "mesh", "gigabytes", "seconds"), CHOSEN)
def test_the_planner_chooses_what_the_table_says(question, mesh, gigabytes, seconds):
    name, gpus, batch, length, program, fixed = question
    runs = PROGRAMS[program]
    cluster = Cluster(GPUS["h100"], gpus, framework=runs.framework, assumptions=runs.assumptions)
    best, *_ = plan(find_model(name), cluster, batch, length, replace(FLASH, **fixed), top=1).plans
    assert str(best.layout).startswith(mesh)
    assert round(best.memory.total / 1e9) == gigabytes and best.time.total == pytest.approx(seconds, rel=3e-3)
    assert best.memory == memory(find_model(name), best.layout, length, runs.framework)
    assert best.volume == volume(find_model(name), best.layout, length, runs.framework)


def test_recomputation_counts_as_hardware_flops_alone():
    kept, recomputed = (judge(GPT2, replace(EIGHT, recompute=kind), a100s(8), 64, 1024) for kind in ("none", "full"))
    ratio = GPT2.hardware_flops(1024, "full") / GPT2.model_flops(1024)
    assert recomputed.hfu / recomputed.mfu == pytest.approx(ratio, rel=1e-12) and kept.hfu == kept.mfu
    assert recomputed.tflops * 1e12 == pytest.approx(recomputed.hfu * GPUS["a100"].peak, rel=1e-12)


def test_plans_within_the_spread_are_tied_the_simplest_first():
    base = judge(GPT2, EIGHT, a100s(8), 64, 1024)

    def takes(seconds, **sizes):
        return replace(base, layout=layout(**sizes), time=StepTime(seconds, 0, 0, 0, 0, 0, True))

    pipeline, mixed, slow = takes(1.0, pp=8), takes(1.1, dp=4, tp=2), takes(1.2, dp=8)
    plain, other = takes(1.14, dp=8), takes(1.12, tp=8)
    assert tied([pipeline, mixed, other, plain, slow], 0.15) == [other, plain, mixed, pipeline]
    assert tied([pipeline, mixed, slow], 0.05) == [pipeline]


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    ("gpt2", {"dp": 4}, 8, 8, ["4*1*1*1 = 4", "8 GPUs"]),
    ("gpt2", {"dp": 8, "microbatch": 2}, 8, 8, ["8*2*1 = 16", "batch is 8"]),
    ("gpt2", {"tp": 8}, 8, 1, ["tp 8", "12 heads"]),
    ("gpt2", {"pp": 16, "microbatches": 16}, 16, 16, ["pp 16", "12 layers"]),
    ("gpt2", {"dp": 8, "zero_replicas": 2}, 8, 8, ["stage 0"]),
    ("gpt2", {"dp": 8, "zero": 3, "zero_replicas": 3}, 8, 8, ["8/3"]),
    ("gpt2", {"ep": 2, "dp": 2}, 2, 2, ["ep 2"]),
    ("llama-3-8b", {"cp": 5}, 5, 1, ["3072/10"]),
    ("llama-3-8b", {"cp": 2, "tp": 8, "context_parallel": "ulysses"}, 16, 1, ["1/2"]),
    ("mixtral-8x7b", {"dp": 3, "ep": 3}, 3, 3, ["8/3"]),
    ("mixtral-8x7b", {"tp": 4, "etp": 2}, 4, 1, ["etp 2", "tp 4"]),
    ("mixtral-8x7b", {"dp": 4, "ep": 2, "zero": 1, "zero_replicas": 2}, 4, 4, ["1"]),
]


@pytest.mark.parametrize(("model", "given", "gpus", "batch", "words"), REFUSED)
def test_a_layout_that_contradicts_the_question_is_refused(model, given, gpus, batch, words):
    with pytest.raises(UsageError) as caught:
        judge(find_model(model), layout(**given), a100s(gpus), batch, 3072)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_would_fit_gives_up_one_choice_at_a_time():
    """The least ZeRO stage, recomputation and number of stages that fit, in this order, then more GPUs."""
    fixed = SearchSpace(tp=1, pp=1, zero=1, recompute="none", microbatch=1)
    with pytest.raises(UsageError) as caught:
        plan(B7, a100s(8), 64, 2048, fixed)
    ways = str(caught.value).split("What would fit: ")[1].split("; ")
    named = ["--zero-stage 2", "--recompute selective", "--pp 2", "h200", "16 such GPUs"]
    assert [way.partition(" (")[0] for way in ways] == named
    for given in ({"zero": 2}, {"recompute": "selective"}, {"pp": 2}):
        assert plan(B7, a100s(8), 64, 2048, replace(fixed, **given)).plans


@pytest.mark.parametrize(
    ("model", "length", "space", "way"),
    [
        (LLAMA, 2**20, replace(FLASH, pp=1, cp=1), "--cp 4"),
        (MIXTRAL, 4096, replace(FLASH, tp=1, pp=1, zero=1, recompute="full", ep=(1, 2)), "--ep 8"),
        (B7, 2048, SearchSpace(tp=1, pp=1, zero=3, zero_replicas=64), "--zero-replicas 1"),
    ],
)
def test_what_would_fit_may_be_another_axis(model, length, space, way):
    with pytest.raises(UsageError) as caught:
        plan(model, a100s(64), 64, length, space)
    assert way in [each.partition(" (")[0] for each in str(caught.value).split("What would fit: ")[1].split("; ")]


def test_the_gpus_that_would_fit_do_fit():
    """In full hosts: 3 times 4 GPUs are not hosts of 8, 3 times 8 are."""
    model = find_model("megatron-39b")
    with pytest.raises(UsageError, match="What would fit: .* such GPUs") as caught:
        plan(model, a100s(3), 48, 2048, SearchSpace(recompute="full"))
    more = int(str(caught.value).partition(" such GPUs")[0].split()[-1])
    assert more % 8 == 0 and plan(model, a100s(more), 48, 2048, SearchSpace(recompute="full")).plans


@pytest.mark.parametrize(
    ("batch", "space", "words"), [(64, SearchSpace(tp=5), "tp 5"), (7, SearchSpace(pp=1), "batch 7")]
)
def test_where_no_layout_divides_the_users_values_are_named(batch, space, words):
    with pytest.raises(UsageError, match=words):
        plan(GPT3, a100s(64), batch, 2048, space)
