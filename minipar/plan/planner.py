"""The planner: every layout of a model on a cluster, those that fit, the fastest first, and why the next one lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minipar.errors import UsageError
from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.memory import Memory, memory
from minipar.plan.model import RECOMPUTE, ModelShape, utilization
from minipar.plan.time import StepTime, step_time

FINALISTS = 12  # meshes whose time is simulated; the others' closed form is enough


@dataclass(frozen=True)
class Plan:
    """A layout with what is predicted of it."""

    layout: Layout
    memory: Memory
    time: StepTime
    mfu: float  # model FLOPs utilization
    hfu: float  # hardware FLOPs utilization: with what is recomputed
    tflops: float  # per GPU and second, with what is recomputed, as Narayanan et al. 2021 print it

    @property
    def mesh(self) -> tuple[int, int, int]:
        return self.layout.dp, self.layout.tp, self.layout.pp


@dataclass(frozen=True)
class Search:
    """What may vary; `None` leaves it to the planner."""

    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    microbatch: int | None = None


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(model: ModelShape, cluster: Cluster, global_batch: int, search: Search = Search()) -> Iterator[Layout]:
    """Every layout that divides: tp inside a host and the heads, pp no more than the layers, dp the rest."""
    gpus = cluster.gpus
    for tp in divisors(min(cluster.per_host, gpus)):
        if gpus % tp or model.heads % tp or model.groups % tp and tp % model.groups or search.tp not in (None, tp):
            continue
        for pp in divisors(gpus // tp):
            dp = gpus // tp // pp
            if model.layers % pp or global_batch % dp or search.pp not in (None, pp):
                continue
            for microbatch in divisors(global_batch // dp):
                if search.microbatch not in (None, microbatch) or microbatch & (microbatch - 1):
                    continue
                m = global_batch // dp // microbatch
                for schedule, v in schedules(model, pp, m, search.schedule):
                    for zero in range(4) if dp > 1 else (0,):
                        if search.zero not in (None, zero):
                            continue
                        for recompute in RECOMPUTE:
                            if search.recompute in (None, recompute):
                                yield Layout(dp, tp, pp, microbatch, m, zero, schedule, v, tp > 1, recompute)


def schedules(model: ModelShape, pp: int, m: int, only: str | None) -> Iterator[tuple[str, int]]:
    """(schedule, stages per rank) that can be: gpipe and naive never win and are left out unless asked for."""
    if pp == 1:
        yield "1f1b", 1
        return
    layers = model.layers // pp
    for name in ("1f1b", "zb-h1") if only is None else (only,):
        if name == "zbv" and layers % 2 or name == "interleaved-1f1b" or name == "zb-h1" and m < pp:
            continue
        yield name, 1
    if only in (None, "interleaved-1f1b") and m % pp == 0:
        yield from (("interleaved-1f1b", v) for v in divisors(layers) if v > 1)


def plan(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, search: Search = Search()
) -> tuple[list[Plan], int]:
    """The best layout of each mesh (dp, tp, pp), fastest first, and how many layouts were looked at.

    UsageError if nothing fits; it says what the least memory would be, and with how many GPUs or which it would fit.
    """
    room = cluster.gpu.memory * cluster.assumptions.memory_used
    best: dict[tuple[int, int, int], list[tuple[float, Layout]]] = {}
    looked, least = 0, None
    for layout in layouts(model, cluster, global_batch, search):
        looked += 1
        needed = memory(model, layout, length).total
        if least is None or needed < least[0]:
            least = needed, layout
        if needed > room:
            continue
        seconds = step_time(model, layout, cluster, length, exact=False).total
        mesh = layout.dp, layout.tp, layout.pp
        best.setdefault(mesh, []).append((seconds, layout))
    if not best:
        raise UsageError(_nothing_fits(model, cluster, global_batch, least, room))
    meshes = sorted((sorted(found, key=lambda one: one[0])[:3] for found in best.values()), key=lambda f: f[0][0])
    plans = [
        min((judge(model, one, cluster, global_batch, length) for _, one in found), key=lambda p: p.time.total)
        for found in meshes[:FINALISTS]
    ]
    return sorted(plans, key=lambda one: one.time.total), looked


def judge(model: ModelShape, layout: Layout, cluster: Cluster, global_batch: int, length: int) -> Plan:
    """One layout, its pipeline simulated."""
    time = step_time(model, layout, cluster, length)
    work = global_batch * model.model_flops(length)
    hardware = global_batch * model.hardware_flops(length, layout.recompute)
    peak = cluster.gpu.peak
    return Plan(
        layout,
        memory(model, layout, length),
        time,
        utilization(work, time.total, cluster.gpus, peak),
        utilization(hardware, time.total, cluster.gpus, peak),
        hardware / time.total / cluster.gpus / 1e12,
    )


def why(winner: Plan, loser: Plan) -> str:
    """In a sentence: what costs the loser its time."""
    parts = ("compute", "tp", "pp", "dp", "bubble", "optimizer")
    names = {
        "compute": "computation (recomputed, or in smaller products)",
        "tp": "tensor-parallel communication",
        "pp": "pipeline messages",
        "dp": "data-parallel communication that nothing hides",
        "bubble": "pipeline bubble",
        "optimizer": "the optimizer's update",
    }
    more = {part: getattr(loser.time, part) - getattr(winner.time, part) for part in parts}
    worst = max(more, key=lambda part: more[part])
    seconds = loser.time.total - winner.time.total
    sentence = f"{seconds:.3g} s slower ({seconds / winner.time.total:.1%}): {more[worst]:.3g} s more of {names[worst]}"
    saved = min(more, key=lambda part: more[part])
    if more[saved] < -0.05 * max(more[worst], 1e-12):
        sentence += f", against {-more[saved]:.3g} s less of {names[saved]}"
    return sentence


def _nothing_fits(
    model: ModelShape, cluster: Cluster, global_batch: int, least: tuple[float, Layout] | None, room: float
) -> str:
    if least is None:
        return (
            f"no layout divides: global batch {global_batch}, {cluster.gpus} GPUs, {model.layers} layers, "
            f"{model.heads} heads"
        )
    needed, layout = least
    message = f"nothing fits in {room / 1e9:.1f} GB per GPU: the least is {needed / 1e9:.1f} GB ({layout})"
    factor = needed / room
    return f"{message}; a GPU with {factor:.1f} times the memory would do, or about {factor:.0f} times as many GPUs"

