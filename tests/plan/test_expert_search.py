"""The search over ep and etp: which sizes it tries, what they cost, and which layouts are refused."""

from dataclasses import replace

import pytest
from planning import a100s, layout

from minipar.errors import UsageError
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.command import train_command
from minipar.plan.layout import PRECISIONS
from minipar.plan.model import find_model
from minipar.plan.report import complexity
from minipar.plan.search import judge, plan
from minipar.plan.space import SearchSpace, layouts

pytestmark = pytest.mark.sampled(3)

MIXTRAL = find_model("mixtral-8x7b")
H100S = Cluster(GPUS["h100"], 64)
SPACE = SearchSpace(attention="flash", precision=PRECISIONS["bf16"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("space", "replicas", "near", "sizes"),
    [
        (SearchSpace(), 64, 8, [1, 2, 4, 8]),
        (SearchSpace(), 64, 4, [1, 2, 4]),
        (SearchSpace(), 12, 8, [1, 2, 4]),
        (SearchSpace(), 1, 8, [1]),
        (SearchSpace(ep=8), 64, 1, [8]),
        (SearchSpace(ep=(8, 1, 8)), 4, 8, [1]),
    ],
)
def test_ep_divides_the_ranks_and_stays_in_a_host(space, replicas, near, sizes):
    assert space.expert_sizes(MIXTRAL, replicas, near) == sizes
    if space.ep is None:
        assert space.expert_sizes(find_model("gpt2"), replicas, near) == [1]


@pytest.mark.long
def test_every_layout_with_ep_divides():
    every = list(layouts(MIXTRAL, H100S, 256, replace(SPACE, zero_replicas=(1, 2)), 4096))
    assert len(set(every)) == len(every)
    assert {(one.tp, one.expert_tp, one.ep) for one in every} == {
        (tp, etp, ep) for tp in (1, 2, 4, 8) for etp in (1, tp) for ep in (1, 2, 4, 8) if etp * ep <= 8
    }
    assert {one.zero_replicas for one in every if one.ep == 1 and one.etp is None} == {1, 2}
    assert {one.zero_replicas for one in every if one.ep > 1 or one.etp is not None} == {1}
    for one in every:
        judge(MIXTRAL, one, H100S, 256, 4096, exact=False)  # refuses what does not divide


def test_each_size_of_ep_is_a_mesh_of_its_own():
    result = plan(MIXTRAL, H100S, 256, 4096, replace(SPACE, tp=1, pp=4), top=9)
    assert sorted(one.layout.ep for one in result.plans) == [1, 2, 4, 8]
    seconds = {one.layout.ep: one.time.total for one in result.plans}
    assert min(seconds, key=seconds.get) == 8
    assert complexity(layout(dp=8, ep=8)) == complexity(layout(dp=8, tp=8)) > complexity(layout(dp=8))
    assert str(result.plans[0].layout).startswith("dp 16, ep 8, tp 1, pp 4, ZeRO-1")


def test_experts_are_whole_or_cut_over_all_of_tp():
    def sizes(**given):
        space = replace(SPACE, tp=4, pp=1, zero=1, schedule="1f1b", recompute="none", microbatch=1, ep=2, **given)
        every = list(layouts(MIXTRAL, H100S, 256, space, 4096))
        return {(one.expert_tp, one.sequence_parallel) for one in every}

    assert sizes() == {(4, False), (4, True), (1, True)}
    assert sizes(etp=(2, 3, 8)) == {(2, True)}
    assert sizes(etp=1, sequence_parallel=False) == set()
    assert {one.etp for one in layouts(find_model("gpt2"), H100S, 64, SearchSpace(tp=4), 1024)} == {None}


def test_zero_shards_experts_within_one_replica():
    """With dp = 1 nothing else is sharded, but edp = 8/(4 * 1) ranks hold the same experts."""
    space = replace(SPACE, tp=8, ep=4, etp=1, pp=1, microbatch=1)
    every = list(layouts(MIXTRAL, Cluster(GPUS["h100"], 8), 8, space, 4096))
    assert {(one.dp, one.expert_shards, one.zero) for one in every} == {(1, 2, zero) for zero in range(4)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ffn", "given", "length", "words"),
    [
        (13, {"tp": 2, "etp": 1}, 64, None),
        (13, {"tp": 4, "etp": 2}, 64, "ffn/etp = 13/2 is not a whole number"),
        (13, {"tp": 2}, 64, "ffn/tp = 13/2 is not a whole number"),
        (16, {"tp": 4}, 66, "tokens/tp = 66/4 is not a whole number"),
    ],
)
def test_the_command_is_one_that_training_accepts(ffn, given, length, words):
    model = replace(MIXTRAL, ffn=ffn)
    one = layout(dp=2, sequence_parallel=True, **given)
    if words is None:
        assert f"--tp {one.tp} --etp {one.etp} --sequence-parallel" in train_command("m", model, one, length)
    else:
        with pytest.raises(UsageError, match=words):
            train_command("m", model, one, length)


def test_whole_experts_save_time_over_tp_and_memory():
    """A rank has an eighth of the experts: 1/2 of them cut in 4, or 1/8 of them whole.

    Half of the sums over tp are left. Of rows a rank sends 7/8 of a quarter of the tokens', not 1/2 of all.
    """
    one = layout(dp=16, tp=4, ep=2, sequence_parallel=True, attention="flash")
    whole = replace(one, etp=1, ep=8)
    cut, apart = (judge(MIXTRAL, each, H100S, 16, 4096) for each in (one, whole))
    assert apart.volume.tp == cut.volume.tp / 2
    assert float(apart.volume.ep / cut.volume.ep) == pytest.approx(7 / 32 / (1 / 2), rel=1e-5)
    assert apart.memory.activations < cut.memory.activations and apart.time.total < cut.time.total
    assert (apart.memory.parameters, apart.volume.dp) == (cut.memory.parameters, cut.volume.dp)
    assert str(whole).startswith("dp 16, ep 8, etp 1, tp 4, pp 1")


def test_what_would_fit_may_be_more_ep():
    """More ep is named also where it goes over hosts, though the planner goes there only if it is asked to."""
    given = {"tp": 1, "pp": 1, "zero": 1, "recompute": "full"}
    with pytest.raises(UsageError, match=r"nothing fits .* What would fit: .*--ep 8 \(dp 64, ep 8, tp 1, pp 1"):
        plan(MIXTRAL, H100S, 256, 4096, replace(SPACE, **given, ep=(1, 2)))
    hosts_of_2 = replace(H100S, per_host=2)
    with pytest.raises(UsageError, match=r"nothing fits .* What would fit: .*--ep 8 \(dp 64, ep 8, tp 1, pp 1"):
        plan(MIXTRAL, hosts_of_2, 256, 4096, replace(SPACE, **given))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        ("gpt2", {"ep": 2}, "ep 2 divides the experts of a layer; each layer of this model has one MLP, no experts"),
        ("gpt2", {"tp": 2, "etp": 1, "sequence_parallel": True}, "etp 1 divides the experts of a layer; each layer of"),
        ("mixtral-8x7b", {"dp": 3, "ep": 3}, "experts/ep = 8/3 is not a whole number: each rank holds whole experts"),
        ("mixtral-8x7b", {"dp": 16, "ep": 16}, "experts/ep = 8/16 is not a whole number"),
        ("mixtral-8x7b", {"dp": 2, "cp": 3, "ep": 4}, r"dp\*cp\*tp/\(ep\*etp\) = 6/4 is not a whole number"),
        ("mixtral-8x7b", {"tp": 4, "etp": 3}, "tp/etp = 4/3 is not a whole number"),
        ("mixtral-8x7b", {"tp": 4, "etp": 2}, "etp 2 with tp 4: each rank of tp routes its own tokens"),
        ("mixtral-8x7b", {"tp": 2, "etp": 1, "sequence_parallel": True, "zero": 1, "zero_replicas": 2}, "and etp = tp"),
        ("mixtral-8x7b", {"dp": 4, "ep": 2, "zero": 1, "zero_replicas": 2}, "those of experts have none; give 1 repl"),
        ("mixtral-8x7b", {"ep": 0}, "ep 0: expected at least 1"),
        ("mixtral-8x7b", {"etp": 0}, "etp 0: expected at least 1"),
    ],
)
def test_a_layout_whose_ep_does_not_fit_is_refused(model, given, words):
    one = layout(**{"dp": 2, **given})
    with pytest.raises(UsageError, match=words):
        judge(find_model(model), one, a100s(one.gpus), one.dp, 3072)
