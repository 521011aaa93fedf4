"""Advice where no layout fits, or none divides: the least change that would help."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from minipar.plan.cluster import GPUS
from minipar.plan.layout import STAGES, Layout
from minipar.plan.model import RECOMPUTE
from minipar.plan.rank_bytes import memory
from minipar.plan.space import EVERYTHING, Question, divisors

Way = tuple[float, Layout | None]  # the bytes of a layout, and the layout


def least_memory(question: Question) -> Way:
    """Return the least memory of any layout, and that layout; (inf, None) if no layout divides."""
    model = question.model
    length = question.length
    framework = question.cluster.framework
    every = ((memory(model, one, length, framework).total, one) for one in question.layouts())
    return min(every, key=lambda way: way[0], default=(inf, None))


def nothing_fits(question: Question) -> str:
    """Return the words of an error: what the smallest layout needs, and what would fit."""
    nbytes, layout = least_memory(question)
    if layout is None:
        return _nothing_divides(question)
    cluster = question.cluster
    usable = cluster.usable_memory
    used = cluster.assumptions.memory_used
    ways = list(_wider_choices(question))
    for name, gpu in GPUS.items():
        if gpu.memory * used >= nbytes:
            ways.append(f"{name} ({gpu.memory / 1e9:.0f} GB)")
    for gpus in (cluster.gpus * times for times in (2, 4, 8, 16, 32, 64)):
        if gpus > cluster.per_host and gpus % cluster.per_host:
            continue  # hosts that would not be full
        needed, larger = least_memory(replace(question, cluster=replace(cluster, gpus=gpus)))
        if needed <= usable:
            ways.append(f"{gpus} such GPUs ({larger})")
            break
    ways = ways or [f"a GPU of {nbytes / used / 1e9:.0f} GB"]
    least = f"the least is {nbytes / 1e9:.1f} GB ({layout})"
    return (
        f"nothing fits in {usable / 1e9:.1f} GB per GPU: {least}. What would fit: {'; '.join(ways)}"
    )


def _wider_choices(question: Question) -> Iterator[str]:
    """Yield what fits if one of the user's choices is given up: the ZeRO stage, recomputation,
    stages, cp, ep, etp.

    Each is the least change of its kind.
    """
    space = question.space
    fields: dict[str, tuple[str, Sequence[Any]]] = {
        "--zero-stage": ("zero", STAGES),
        "--zero-replicas": ("zero_replicas", [1]),
        "--recompute": ("recompute", RECOMPUTE),
        "--pp": ("pp", divisors(question.cluster.gpus)),
        "--cp": ("cp", replace(space, cp=None).context_sizes(question.length)),
        "--ep": ("ep", divisors(question.model.experts or 1)),
        "--etp": ("etp", [1]),
    }
    for flag, (field, values) in fields.items():
        if field != "ep" and getattr(space, field) == getattr(EVERYTHING, field):
            continue  # the search has tried all of them
        for value in values:
            other = replace(question, space=replace(space, **{field: value}))
            nbytes, layout = least_memory(other)
            if nbytes <= question.cluster.usable_memory:
                yield f"{flag} {value} ({layout})"
                break


def _nothing_divides(question: Question) -> str:
    """Return the words where there is no layout: what the user has fixed, and what has to divide."""
    model = question.model
    cluster = question.cluster
    space = question.space
    fixed = {
        "dp": space.dp,
        "tp": space.tp,
        "pp": space.pp,
        "schedule": space.schedule,
        "microbatch": space.microbatch,
        "replicas of shards": space.zero_replicas if space.zero_replicas != 1 else None,
        "cp": space.cp,
        "ep": space.ep,
        "etp": space.etp,
    }
    # One value, or several as 1, 2.
    given = [f"{name} {str(value).strip('(,)')}" for name, value in fixed.items() if value]
    only = f" with {', '.join(given)}" if given else ""
    return (
        f"no layout divides{only}: global batch {question.global_batch}, {cluster.gpus} GPUs in hosts of "
        f"{cluster.per_host}, {model.layers} layers, {model.heads} heads; dp*cp*tp*pp = GPUs, dp*microbatch divides "
        "the batch, tp divides the heads and a host (or, with --tp, is a multiple of one), ulysses' cp the heads of "
        "a tp rank, etp tp (below tp with sequence parallelism), ep*etp dp*cp*tp, replicas of shards dp*cp (with ZeRO, "
        "ep 1 and etp = tp), interleaved-1f1b needs pp to divide the microbatches, zbv 2*pp the layers, and selective "
        "recomputation stored scores, which flash attention, ring and all-gather do not keep"
    )
