"""Measure how much the planner's answers depend on its assumptions.

A search for each change would take long. So only layouts that are near the best one are compared: a change of a
constant by a fifth lets no other one win.
"""

from dataclasses import fields, replace
from functools import cache

from chapters.support.ch10.three_models import ASK, BATCH, LENGTH, MIDDLE, SMALL
from minipar.plan.cluster import GPUS, Assumptions, Cluster
from minipar.plan.layout import MEGATRON, Layout
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import memory
from minipar.plan.search import Plan, judge, plan
from minipar.plan.space import layouts
from minipar.plan.step_time import step_time

QUESTIONS = {"70B on 1024 A100s": (MIDDLE, 1024), "7.5B on 1024 A100s": (SMALL, 1024)}
CHANGES = {"-20 %": 0.8, "+20 %": 1.2}
CONSTANTS = ["products", *(field.name for field in fields(Assumptions) if field.default)]  # a fifth of 0 is 0
NEAR = 1.2  # times the best layout's seconds
PROGRAMS = {
    "one ring between hosts": (replace(MEGATRON, ring_per_card=False), ASK),
    "gathers do not hide": (replace(MEGATRON, gathers_ahead=False), ASK),
    "flash attention": (MEGATRON, replace(ASK, attention="flash")),
}


Candidates = tuple[Layout, ...]


def everything(question: str) -> list[Layout]:
    """List all layouts of a question, in one order on every rank."""
    name, gpus = QUESTIONS[question]
    return list(layouts(find_model(name), Cluster(GPUS["a100"], gpus), BATCH[name], ASK))


def near(question: str) -> list[int]:
    """Number the layouts that fit a whole GPU and take at most NEAR times as long as the best that fits its share."""
    name, gpus = QUESTIONS[question]
    model, cluster, length = find_model(name), Cluster(GPUS["a100"], gpus), LENGTH[name]
    seconds, best = {}, float("inf")
    for number, layout in enumerate(everything(question)):
        nbytes = memory(model, layout, length).total
        if nbytes <= cluster.gpu.memory:
            seconds[number] = step_time(model, layout, cluster, length, exact=False).total
            if nbytes <= cluster.usable_memory:
                best = min(best, seconds[number])
    return [number for number, each in seconds.items() if each <= NEAR * best]


def numbered(question: str, numbers: list[int]) -> Candidates:
    """Return the layouts with these numbers."""
    every = everything(question)
    return tuple(every[number] for number in numbers)


@cache
def best_plan(question: str, candidates: Candidates, cluster: Cluster) -> Plan:
    """Choose among the candidates as `plan` does: by closed form, then the first five simulated."""
    name, _ = QUESTIONS[question]
    model, length = find_model(name), LENGTH[name]
    fitting = [one for one in candidates if memory(model, one, length).total <= cluster.usable_memory]
    fitting.sort(key=lambda one: step_time(model, one, cluster, length, exact=False).total)
    few = [judge(model, one, cluster, BATCH[name], length) for one in fitting[:5]]
    return min(few, key=lambda one: one.time.total)


def changed_constant(
    question: str, candidates: Candidates, constant: str, change: str
) -> tuple[float, bool, float | None, str]:
    """Change one constant (a share to at most 1), and compare the layout that was the best with the best one now.

    Return the relative change of its time; whether another layout is the best; what is lost by keeping the first one
    (None: it does not fit any more); the new one.
    """
    name, gpus = QUESTIONS[question]
    usual = Cluster(GPUS["a100"], gpus)
    value = usual.gpu.products if constant == "products" else getattr(usual.assumptions, constant)
    changed = value * CHANGES[change] if value > 1 else min(1.0, value * CHANGES[change])
    other = replace(usual, assumptions=replace(usual.assumptions, **{constant: changed}))
    was, now = (best_plan(question, candidates, cluster) for cluster in (usual, other))
    same = judge(find_model(name), was.layout, other, BATCH[name], LENGTH[name])
    regret = same.time.total / now.time.total - 1 if same.memory.total <= other.usable_memory else None
    return same.time.total / was.time.total - 1, now.layout != was.layout, regret, str(now.layout)


def changed_program(question: str, candidates: Candidates, program: str) -> tuple[float, float, str]:
    """Let the program do something in another way.

    Return the relative change of time if the layout stays, that if the planner chooses again, and its choice.
    """
    name, gpus = QUESTIONS[question]
    framework, ask = PROGRAMS[program]
    was = best_plan(question, candidates, Cluster(GPUS["a100"], gpus))
    other = Cluster(GPUS["a100"], gpus, framework=framework)
    kept = replace(was.layout, attention=ask.attention)
    if ask.attention == "flash" and kept.recompute == "selective":
        kept = replace(kept, recompute="none")
    same = judge(find_model(name), kept, other, BATCH[name], LENGTH[name])
    now = plan(find_model(name), other, BATCH[name], LENGTH[name], ask, top=3).plans[0]
    return same.time.total / was.time.total - 1, now.time.total / was.time.total - 1, str(now.layout)
