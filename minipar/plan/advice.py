"""Advice where no layout fits, or none divides: the least change that would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minipar.parallel.ulysses import check_heads
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import Layout
from minipar.plan.model import RECOMPUTE, ModelShape
from minipar.plan.rank_bytes import memory
from minipar.plan.space import SearchSpace, divisors, layouts


def least_memory(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, space: SearchSpace
) -> tuple[float, Layout] | None:
    """Return the least memory of any layout, and that layout; None if no layout divides."""
    every = layouts(model, cluster, global_batch, space, length)
    candidates = (
        (memory(model, layout, length, cluster.framework).total, layout) for layout in every
    )
    return min(candidates, key=lambda candidate: candidate[0], default=None)


def nothing_fits(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, space: SearchSpace
) -> str:
    least = least_memory(model, cluster, global_batch, length, space)
    if least is None:
        return _nothing_divides(model, cluster, global_batch, length, space)
    nbytes, layout = least
    usable, used = cluster.usable_memory, cluster.assumptions.memory_used
    ways = list(_wider_choices(model, cluster, global_batch, length, space))
    ways += [
        f"{name} ({gpu.memory / 1e9:.0f} GB)"
        for name, gpu in GPUS.items()
        if gpu.memory * used >= nbytes
    ]
    for gpus in (cluster.gpus * times for times in (2, 4, 8, 16, 32, 64)):
        if gpus > cluster.per_host and gpus % cluster.per_host:
            continue  # hosts that would not be full
        more = least_memory(model, replace(cluster, gpus=gpus), global_batch, length, space)
        if more is not None and more[0] <= usable:
            ways.append(f"{gpus} such GPUs ({more[1]})")
            break
    return (
        f"nothing fits in {usable / 1e9:.1f} GB per GPU: the least is {nbytes / 1e9:.1f} GB ({layout}). What would "
        "fit: " + ("; ".join(ways) or f"a GPU of {nbytes / used / 1e9:.0f} GB")
    )


def _wider_choices(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, space: SearchSpace
) -> Iterator[str]:
    """Yield what fits if one of the user's choices is given up: the ZeRO stage, recomputation,
    stages, cp, ep.

    Each is the least change of its kind.
    """
    choices: dict[str, tuple[object, list[tuple[int | str, SearchSpace]]]] = {
        "--zero-stage": (space.zero, [(stage, replace(space, zero=stage)) for stage in range(4)]),
        "--zero-replicas": (space.zero_replicas, [(1, replace(space, zero_replicas=None))]),
        "--recompute": (
            space.recompute,
            [(kind, replace(space, recompute=kind)) for kind in RECOMPUTE],
        ),
        "--pp": (space.pp, [(pp, replace(space, pp=pp)) for pp in divisors(cluster.gpus)]),
        "--cp": (
            space.cp,
            [(c, replace(space, cp=c)) for c in replace(space, cp=None).context_sizes(length)],
        ),
        "--ep": (
            space.ep or model.experts,
            [(ep, replace(space, ep=ep)) for ep in divisors(model.experts or 1)],
        ),
    }
    for flag, (fixed, wider) in choices.items():
        for value, other in wider if fixed is not None else ():
            least = least_memory(model, cluster, global_batch, length, other)
            if least is not None and least[0] <= cluster.usable_memory:
                yield f"{flag} {value} ({least[1]})"
                break


def _nothing_divides(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, space: SearchSpace
) -> str:
    sizes = space.context_sizes(length)
    if space.recompute == "selective" and (space.attention == "flash" or 1 not in sizes):
        which = (
            "flash attention keeps" if space.attention == "flash" else "ring and all-gather keep"
        )
        return f"{which} no scores, so there is nothing for selective recomputation: none or full"
    if space.context_parallel == "ulysses" and 1 not in sizes and model.tp_divides(space.tp or 1):
        check_heads(*model.rank_heads(space.tp or 1), sizes[0])
    fixed = [
        f"{n} {getattr(space, n)}"
        for n in ("dp", "tp", "pp", "schedule", "microbatch")
        if getattr(space, n)
    ]
    fixed += (
        [f"replicas of shards {', '.join(map(str, space.zero_replicas))}"]
        if space.zero_replicas
        else []
    )
    fixed += [f"cp {', '.join(map(str, sizes))}"] * (space.cp is not None)
    fixed += (
        [f"ep {space.ep if isinstance(space.ep, int) else ', '.join(map(str, space.ep))}"]
        if space.ep
        else []
    )
    only = f" with {', '.join(fixed)}" if fixed else ""
    return (
        f"no layout divides{only}: global batch {global_batch}, {cluster.gpus} GPUs in hosts of {cluster.per_host}, "
        f"{model.layers} layers, {model.heads} heads; dp*cp*tp*pp = GPUs, dp*microbatch divides the batch, tp divides "
        "the heads and a host (or, with --tp, is a multiple of one), interleaved-1f1b needs pp to divide the "
        "microbatches, zbv 2*pp the layers"
    )
