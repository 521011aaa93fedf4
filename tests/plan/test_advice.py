"""The planner's words where nothing fits: which questions it asks next, in which order, and what it calls enough."""

from dataclasses import fields, replace

import pytest
from planning import a100s, layout

from minipar.plan import advice
from minipar.plan.advice import least_memory, nothing_fits
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import PRECISIONS
from minipar.plan.model import find_model
from minipar.plan.space import Question, SearchSpace

GPT2 = find_model("gpt2")
LLAMA = find_model("llama-7b")
MIXTRAL = find_model("mixtral-8x7b")


def asked(monkeypatch, question, nbytes=1e15):
    """Return what nothing_fits says if every layout needs `nbytes`, and what it asks.

    Each question after the first gives (a changed field of the search, its value), or ("gpus", their number).
    """
    found = []

    def counted(other):
        for field in fields(SearchSpace):
            value = getattr(other.space, field.name)
            if value != getattr(question.space, field.name):
                found.append((field.name, value))
        if other.cluster.gpus != question.cluster.gpus:
            found.append(("gpus", other.cluster.gpus))
        return nbytes, layout(dp=other.cluster.gpus)

    monkeypatch.setattr(advice, "least_memory", counted)
    return nothing_fits(question), found


def test_where_nothing_is_fixed_only_ep_and_gpus_are_tried(monkeypatch):
    """The search itself has tried every other choice."""
    words, found = asked(monkeypatch, Question(MIXTRAL, a100s(8), 64, 4096, SearchSpace()))
    more_gpus = [("gpus", 8 * n) for n in (2, 4, 8, 16, 32, 64)]
    assert found == [("ep", 1), ("ep", 2), ("ep", 4), ("ep", 8), *more_gpus]
    assert words == (
        f"nothing fits in 73.6 GB per GPU: the least is 1000000.0 GB ({layout(dp=8)}). "
        "What would fit: a GPU of 1086957 GB"
    )
    _, dense = asked(monkeypatch, Question(GPT2, a100s(8), 64, 1024, SearchSpace()))
    assert dense == [("ep", 1), *more_gpus]


def test_each_fixed_choice_is_given_up_by_itself(monkeypatch):
    """Changes go from the least to the largest, and only to what the sequence and the number of GPUs allow."""
    fixed = SearchSpace(
        zero=0, zero_replicas=2, recompute="none", pp=3, cp=2, ep=3, etp=2, precision=PRECISIONS["bf16"]
    )
    _, found = asked(monkeypatch, Question(MIXTRAL, Cluster(GPUS["a100"], 6, 6), 64, 3 * 8192, fixed))
    assert found == [
        ("zero", 1), ("zero", 2), ("zero", 3),
        ("zero_replicas", 1),
        ("recompute", "selective"), ("recompute", "full"),
        ("pp", 1), ("pp", 2), ("pp", 6),
        ("cp", 1), ("cp", 3),
        ("ep", 1), ("ep", 2), ("ep", 4), ("ep", 8),
        ("etp", 1),
        *[("gpus", 6 * n) for n in (2, 4, 8, 16, 32, 64)],
    ]  # fmt: skip


def test_more_gpus_fill_hosts_or_share_one(monkeypatch):
    _, found = asked(monkeypatch, Question(GPT2, Cluster(GPUS["a100"], 3, 8), 48, 1024, SearchSpace()))
    assert found == [("ep", 1), ("gpus", 6), ("gpus", 24), ("gpus", 48), ("gpus", 96), ("gpus", 192)]


def test_what_is_just_usable_is_enough(monkeypatch):
    """A layout may need exactly the usable bytes. Of each kind of change only the least is said."""
    cluster = a100s(8)
    cluster = replace(cluster, assumptions=replace(cluster.assumptions, memory_used=0.5))
    sizes = {"small": 79e9, "same": 80e9, "large": 81e9}
    monkeypatch.setattr(advice, "GPUS", {name: replace(GPUS["a100"], memory=size) for name, size in sizes.items()})
    question = Question(GPT2, cluster, 64, 1024, SearchSpace(zero=0, pp=1))
    words, found = asked(monkeypatch, question, nbytes=cluster.usable_memory)
    one, two = layout(dp=8), layout(dp=16)
    assert found == [("ep", 1), ("gpus", 16)]
    assert words.partition("What would fit: ")[2] == (
        f"--zero-stage 0 ({one}); --pp 1 ({one}); --ep 1 ({one}); same (80 GB); large (81 GB); 16 such GPUs ({two})"
    )


ON_EIGHT = Question(LLAMA, a100s(8), 8, 2048, SearchSpace(tp=1, pp=1, zero=(0, 3), recompute="none", microbatch=1))


def test_the_least_memory_is_that_of_the_smallest_layout():
    nbytes, smallest = least_memory(ON_EIGHT)
    assert (smallest.zero, smallest.dp) == (3, 8) and nbytes < 80e9
    any_microbatch = replace(ON_EIGHT.space, microbatch=None)
    assert least_memory(replace(ON_EIGHT, space=any_microbatch))[0] == nbytes


def test_of_layouts_that_need_as_much_the_first_is_the_smallest():
    same = Question(GPT2, a100s(2), 4, 64, SearchSpace(dp=1, pp=2, microbatch=1, recompute="none"))
    assert least_memory(same)[1].schedule == "1f1b"


def test_without_any_layout_the_least_memory_is_infinite():
    assert least_memory(replace(ON_EIGHT, global_batch=7)) == (float("inf"), None)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (SearchSpace(), "no layout divides: global batch 7, 8 GPUs in hosts of 4, 12 layers, 12 heads; dp*cp*tp*pp = "),
        (SearchSpace(tp=5), "no layout divides with tp 5: global batch 7, "),
        (
            SearchSpace(dp=8, tp=1, pp=1, schedule="gpipe", microbatch=2, zero_replicas=2, cp=(1, 2), ep=1, etp=(1, 2)),
            "no layout divides with dp 8, tp 1, pp 1, schedule gpipe, microbatch 2, replicas of shards 2, cp 1, 2, "
            "ep 1, etp 1, 2: global batch 7, ",
        ),
        (SearchSpace(zero_replicas=(2, 4)), "no layout divides with replicas of shards 2, 4: global batch 7, "),
    ],
)
def test_what_the_user_has_fixed_is_said_where_nothing_divides(space, words, monkeypatch):
    monkeypatch.setattr(advice, "least_memory", lambda question: (float("inf"), None))
    assert nothing_fits(Question(GPT2, Cluster(GPUS["a100"], 8, 4), 7, 1024, space)).startswith(words)
