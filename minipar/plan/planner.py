"""The planner: every layout of a model on a cluster, those that fit, the fastest first, and why the next one lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from minipar.errors import UsageError
from minipar.parallel.memory import Precision
from minipar.plan.communication import Volume, volume
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.machine import GPUS, Cluster
from minipar.plan.memory import Memory, memory
from minipar.plan.model import RECOMPUTE, ModelShape, utilization
from minipar.plan.time import StepTime, step_time

TOLD = 0.1  # of the gap between two plans: what differs by less is not named
TOP = 5  # plans that are simulated and shown
# gpipe and naive never win; zb-h2 and zbv have no closed form to search by. All can be asked for.
SEARCHED = ("1f1b", "interleaved-1f1b", "zb-h1")


@dataclass(frozen=True)
class Plan:
    """A layout with what is predicted of it."""

    layout: Layout
    memory: Memory
    time: StepTime
    volume: Volume
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
    sequence_parallel: bool | None = None
    attention: str = "stored"
    precision: Precision = PRECISIONS["fp16"]


@dataclass(frozen=True)
class Found:
    """`plans`: the fastest layout of each mesh (dp, tp, pp), fastest first, simulated. `looked` layouts were counted,
    `fitting` of them fit. `meshes`: of every mesh the fastest layout by closed form, with its seconds and bytes.
    """

    plans: list[Plan]
    looked: int
    fitting: int
    meshes: list[tuple[float, float, Layout]]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(model: ModelShape, cluster: Cluster, global_batch: int, search: Search = Search()) -> Iterator[Layout]:
    """Every layout that divides: tp inside a host and the heads, pp no more than the layers, dp the rest.

    Microbatches are powers of two unless one is asked for. Sequence parallelism is tried with and without: it sends the
    same and holds less, but backward waits for more of it.
    """
    gpus = cluster.gpus
    for tp in divisors(min(cluster.per_host, gpus)):
        if gpus % tp or model.heads % tp or model.groups % tp and tp % model.groups or search.tp not in (None, tp):
            continue
        for pp in divisors(gpus // tp):
            dp = gpus // tp // pp
            if pp > model.layers or global_batch % dp or search.pp not in (None, pp):
                continue
            for microbatch in divisors(global_batch // dp):
                if (
                    search.microbatch not in (None, microbatch)
                    or search.microbatch is None
                    and microbatch & (microbatch - 1)
                ):
                    continue
                m = global_batch // dp // microbatch
                for schedule, v in schedules(model, pp, m, search.schedule):
                    for zero in range(4) if dp > 1 else (0,):
                        if search.zero not in (None, zero) and dp > 1:
                            continue
                        for recompute in RECOMPUTE:
                            # W after I needs what recomputation throws away, so the two do not go together.
                            if schedule.startswith("zb") and recompute == "full" and search.recompute is None:
                                continue
                            if search.recompute not in (None, recompute):
                                continue
                            if recompute == "selective" and search.attention == "flash":
                                continue  # keeps no scores in any case
                            yield from (
                                Layout(
                                    dp,
                                    tp,
                                    pp,
                                    microbatch,
                                    m,
                                    zero,
                                    schedule,
                                    v,
                                    sequence,
                                    recompute,
                                    search.attention,
                                    search.precision,
                                )
                                for sequence in ((False, True) if tp > 1 else (False,))
                                if search.sequence_parallel in (None, sequence) or tp == 1
                            )


def schedules(model: ModelShape, pp: int, m: int, only: str | None) -> Iterator[tuple[str, int]]:
    """(schedule, stages per rank) that can be. Where pp does not divide the layers, the fullest rank counts."""
    if pp == 1:
        yield "1f1b", 1
        return
    layers = -(-model.layers // pp)
    for name in SEARCHED if only is None else (only,):
        if name == "interleaved-1f1b":
            # The first and the last stage may do with embedding and head alone, as Llama 3's do (arXiv 2407.21783,
            # 3.3.2).
            spread = layers * pp - model.layers
            yield from ((name, v) for v in divisors(layers) if v > 1 and m % pp == 0 and spread <= 2 * (layers // v))
        elif not (name == "zbv" and model.layers % (2 * pp) or name == "zb-h1" and m < pp):
            yield name, 1


def plan(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, search: Search = Search(), top: int = TOP
) -> Found:
    """The `top` meshes (dp, tp, pp) with the fastest layout of each. Thousands are compared in closed form; what is
    returned is simulated.

    UsageError if nothing divides, or nothing fits; it says what the least memory would be and what would fit.
    """
    room = cluster.gpu.memory * cluster.assumptions.memory_used
    best: dict[tuple[int, int, int], tuple[float, float, Layout]] = {}
    looked = fitting = 0
    for layout in layouts(model, cluster, global_batch, search):
        looked += 1
        needed = memory(model, layout, length, cluster.program).total
        if needed > room:
            continue
        fitting += 1
        seconds = step_time(model, layout, cluster, length, exact=False).total
        mesh = layout.dp, layout.tp, layout.pp
        if mesh not in best or seconds < best[mesh][0]:
            best[mesh] = seconds, needed, layout
    if not best:
        raise UsageError(_nothing_fits(model, cluster, global_batch, length, search))
    meshes = sorted(best.values(), key=lambda one: one[0])
    plans = [judge(model, layout, cluster, global_batch, length) for _, _, layout in meshes[:top]]
    return Found(sorted(plans, key=lambda one: one.time.total), looked, fitting, meshes)


def judge(model: ModelShape, layout: Layout, cluster: Cluster, global_batch: int, length: int) -> Plan:
    """One layout, its pipeline simulated."""
    time = step_time(model, layout, cluster, length)
    work = global_batch * model.model_flops(length)
    hardware = global_batch * model.hardware_flops(length, layout.recompute)
    peak = cluster.gpu.peak
    return Plan(
        layout,
        memory(model, layout, length, cluster.program),
        time,
        volume(model, layout, length, cluster.program),
        utilization(work, time.total, cluster.gpus, peak),
        utilization(hardware, time.total, cluster.gpus, peak),
        hardware / time.total / cluster.gpus / 1e12,
    )


def why(winner: Plan, loser: Plan) -> str:
    """In a sentence: what costs the loser its time."""
    names = {
        "compute": "computation (recomputed, in smaller products, or with more layers on the fullest rank)",
        "tp": "tensor-parallel communication",
        "pp": "pipeline messages",
        "dp": "data-parallel communication",
        "bubble": "pipeline bubble",
        "optimizer": "the optimizer's update",
    }
    more = {part: getattr(loser.time, part) - getattr(winner.time, part) for part in names}
    seconds = loser.time.total - winner.time.total
    told = sorted((part for part in names if abs(more[part]) > TOLD * seconds), key=lambda part: -abs(more[part]))
    worse = [f"{more[part]:.3g} s more of {names[part]}" for part in told if more[part] > 0]
    better = [f"{-more[part]:.3g} s less of {names[part]}" for part in told if more[part] < 0]
    against = f", against {', '.join(better)}" if better else ""
    return f"{seconds:.3g} s slower ({seconds / winner.time.total:.1%}): {', '.join(worse)}{against}"


def _least(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, search: Search
) -> tuple[float, Layout] | None:
    """The layout that needs the least memory, and how much; None if no layout divides."""
    tried = layouts(model, cluster, global_batch, search)
    found = [(memory(model, one, length, cluster.program).total, one) for one in tried]
    return min(found, key=lambda one: one[0], default=None)


def _nothing_fits(model: ModelShape, cluster: Cluster, global_batch: int, length: int, search: Search) -> str:
    least = _least(model, cluster, global_batch, length, search)
    if least is None:
        if (search.attention, search.recompute) == ("flash", "selective"):
            return "flash attention keeps no scores, so there is nothing for selective recomputation: none or full"
        asked = [f"{n} {getattr(search, n)}" for n in ("tp", "pp", "schedule", "microbatch") if getattr(search, n)]
        only = f" with {', '.join(asked)}" if asked else ""
        return (
            f"no layout divides{only}: global batch {global_batch}, {cluster.gpus} GPUs in hosts of "
            f"{cluster.per_host}, {model.layers} layers, {model.heads} heads; dp*tp*pp = GPUs, dp*microbatch divides "
            "the batch, tp divides the heads and a host, interleaved-1f1b needs pp to divide the microbatches, zbv "
            "2*pp the layers"
        )
    needed, layout = least
    used = cluster.assumptions.memory_used
    message = f"nothing fits in {cluster.gpu.memory * used / 1e9:.1f} GB per GPU: the least is {needed / 1e9:.1f} GB"
    message += f" ({layout}). What would fit: "
    ways = [f"{name} ({gpu.memory / 1e9:.0f} GB)" for name, gpu in GPUS.items() if gpu.memory * used >= needed]
    for times in (2, 4, 8, 16, 32, 64):
        gpus = cluster.gpus * times
        if gpus > cluster.per_host and gpus % cluster.per_host:
            continue  # of less than a host's, in hosts that would not be full
        more = _least(model, replace(cluster, gpus=gpus), global_batch, length, search)
        if more is not None and more[0] <= cluster.gpu.memory * used:
            ways.append(f"{gpus} such GPUs ({more[1]})")
            break
    return message + ("; ".join(ways) or f"a GPU of {needed / used / 1e9:.0f} GB")
