"""The search: every layout of a model on a cluster, those that fit, and the fastest, or what would fit if none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import isqrt

from minipar.errors import UsageError
from minipar.parallel.context import METHODS
from minipar.parallel.memory import Precision
from minipar.parallel.token_order import check_length
from minipar.parallel.ulysses import check_heads
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import PRECISIONS, Layout, check_experts, check_layout
from minipar.plan.model import RECOMPUTE, ModelShape, utilization
from minipar.plan.pipeline_time import simulated_actions
from minipar.plan.rank_bytes import Memory, Volume, memory, volume
from minipar.plan.step_time import StepTime, step_time

TOP = 5  # plans that are simulated and shown
MOST_LAYOUTS = 20_000  # a search through as many takes some ten seconds
MOST_SIMULATED = 150_000  # actions in a search, some ten seconds too; plans after them keep their closed form
# gpipe and naive never win; zb-h2 and zbv have no closed form to search by. A user can ask for all of them.
SEARCHED = ("1f1b", "interleaved-1f1b", "zb-h1")
LEAST_TOKENS = 8192  # a rank has as many of a sequence, as in Llama 3 (2407.21783, table 4), unless the user gives cp


@dataclass(frozen=True)
class SearchSpace:
    """The choices that the user has fixed; `None` leaves one to the planner.

    `zero` is a stage, or those to try, and so are the sizes `cp` and `ep`.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | tuple[int, ...] | None = None
    zero_replicas: tuple[int, ...] | None = None
    recompute: str | None = None
    schedule: str | None = None
    microbatch: int | None = None
    sequence_parallel: bool | None = None
    attention: str = "stored"
    precision: Precision = PRECISIONS["fp16"]
    cp: int | tuple[int, ...] | None = None
    context_parallel: str | None = None
    cp_order: str = "zigzag"
    ep: int | tuple[int, ...] | None = None

    def context_sizes(self, length: int) -> list[int]:
        """Return the sizes of cp to try for sequences of `length` tokens. UsageError if a given one does not divide.

        Without a given one every size is tried that leaves a rank LEAST_TOKENS. Shorter sequences are not cut.
        """
        if self.cp is None:
            parts = 2 if self.cp_order == "zigzag" else 1
            return [1, *(c for c in range(2, length // LEAST_TOKENS + 1) if length % (parts * c) == 0)]
        sizes = [self.cp] if isinstance(self.cp, int) else sorted(set(self.cp))
        for c in sizes:
            if c > 1:
                check_length(length, c, self.cp_order)
        return sizes

    def context_methods(self, model: ModelShape, tp: int, cp: int) -> list[str]:
        """Return the methods of context parallelism to try. Ulysses cuts the heads of a tp rank."""
        if cp == 1:
            return ["ring"]
        methods = [method for method in METHODS if self.context_parallel in (None, method)]
        whole = all(heads % cp == 0 for heads in model.rank_heads(tp))
        return [method for method in methods if whole or method != "ulysses"]

    def expert_sizes(self, model: ModelShape, replicas: int, near: int) -> list[int]:
        """Return the sizes of ep to try on so many ranks of dp x cp. UsageError if a given one divides no experts.

        Only one that the user has fixed goes over hosts: `near` of the ranks share one.
        """
        if self.ep is None:
            return [ep for ep in divisors(model.experts or 1) if replicas % ep == 0 and ep <= max(1, near)]
        sizes = [self.ep] if isinstance(self.ep, int) else sorted(set(self.ep))
        for ep in sizes:
            check_experts(model, ep)
        return [ep for ep in sizes if replicas % ep == 0]

    def zero_stages(self, replicas: int) -> list[int]:
        """Return the ZeRO stages to try. With one replica there is nothing to shard."""
        if replicas == 1:
            return [0]
        if self.zero is None:
            return [0, 1, 2, 3]
        return [self.zero] if isinstance(self.zero, int) else sorted(set(self.zero))

    def replicas(self, zero: int, dp: int, ep: int) -> list[int]:
        """Return the numbers of replicas of ZeRO's shards to try: 1 unless the user asks for others, and with ep."""
        tried = sorted(set(self.zero_replicas or (1,)))
        return [q for q in tried if q == 1 or (zero > 0 and ep == 1 and dp % q == 0)]

    def recomputations(self, schedule: str) -> list[str]:
        """Return the kinds of recomputation to try.

        Full recomputation goes with a split backward only on request, since W needs what was recomputed for I.
        """
        kinds = [kind for kind in RECOMPUTE if self.recompute in (None, kind)]
        if schedule.startswith("zb") and self.recompute is None:
            kinds.remove("full")
        return kinds

    def sequence_choices(self, tp: int) -> list[bool]:
        """Return whether to try without and with sequence parallelism.

        It sends as much and holds less, but backward waits for more of it.
        """
        return [choice for choice in (False, True) if self.sequence_parallel in (None, choice)] if tp > 1 else [False]


# ---- layouts ---------------------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    """Return the divisors of n, smallest first."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def layouts(
    model: ModelShape, cluster: Cluster, global_batch: int, space: SearchSpace = SearchSpace(), length: int = 0
) -> Iterator[Layout]:
    """Yield every layout of the search space, for sequences of `length` tokens: 0 for short ones, without cp."""
    for tp, cp, pp, dp in meshes(model, cluster, global_batch, space, length):
        samples = global_batch // dp
        for microbatch in microbatch_sizes(samples, space, cp):
            m = samples // microbatch
            for schedule, v in schedules(model, pp, m, space.schedule, cluster.framework.balanced_stages):
                sizes = space.expert_sizes(model, dp * cp, cluster.per_host // tp)
                stages = product(sizes, space.zero_stages(dp * cp))
                sharded = [(ep, zero, q) for ep, zero in stages for q in space.replicas(zero, dp * cp, ep)]
                methods = space.context_methods(model, tp, cp)
                choices = sharded, space.recomputations(schedule), space.sequence_choices(tp)
                for (ep, zero, replicas), recompute, sequence_parallel, method in product(*choices, methods):
                    layout = Layout(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        microbatch=microbatch,
                        microbatches=m,
                        zero=zero,
                        zero_replicas=replicas,
                        schedule=schedule,
                        virtual_stages=v,
                        sequence_parallel=sequence_parallel,
                        recompute=recompute,
                        attention=space.attention,
                        precision=space.precision,
                        cp=cp,
                        context_parallel=method,
                        cp_order=space.cp_order,
                        ep=ep,
                    )
                    if recompute != "selective" or layout.stores_scores:
                        yield layout


def meshes(
    model: ModelShape, cluster: Cluster, global_batch: int, space: SearchSpace, length: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp, cp, pp, dp). tp divides a host and the heads, pp is at most the layers, dp divides the batch.

    tp also divides the heads of keys and values, or is a multiple of them: then ranks hold copies. Only a tp that the
    user has fixed goes over hosts: a multiple of a host's GPUs.
    """
    sizes = divisors(min(cluster.per_host, cluster.gpus))
    if space.tp is not None:
        sizes = [space.tp] if space.tp in sizes or space.tp % cluster.per_host == 0 else []
    for tp in sizes:
        if cluster.gpus % tp or not model.tp_divides(tp):
            continue
        for cp in space.context_sizes(length):
            rest, uneven = divmod(cluster.gpus // tp, cp)
            for pp in divisors(rest) if not uneven else ():
                dp = rest // pp
                fits = space.pp in (None, pp) and space.dp in (None, dp)
                if pp <= model.layers and global_batch % dp == 0 and fits:
                    yield tp, cp, pp, dp


def microbatch_sizes(samples: int, space: SearchSpace, cp: int) -> list[int]:
    """Return the divisors of a replica's samples that are powers of two, or the size that the user has fixed.

    With a cp of the planner's own choice a microbatch is one sample: two would be as many tokens on half as many ranks.
    """
    if space.microbatch is not None:
        return [space.microbatch] if samples % space.microbatch == 0 else []
    if cp > 1 and space.cp is None:
        return [1]
    return [size for size in divisors(samples) if size & (size - 1) == 0]


def schedules(
    model: ModelShape, pp: int, m: int, fixed: str | None, balanced: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield (schedule, stages per rank). Where pp does not divide the layers, the fullest rank counts.

    interleaved-1f1b needs pp to divide m. Its first and last stage may have embedding and head alone, as Llama 3's do
    (arXiv 2407.21783, 3.3.2), unless the program divides layers evenly (`balanced`): then each stage has at least one.
    zb-h1 needs m >= pp, and zbv needs 2 pp to divide the layers.
    """
    if pp == 1:
        yield "1f1b", 1
        return
    layers = -(-model.layers // pp)
    missing = layers * pp - model.layers
    for name in SEARCHED if fixed is None else (fixed,):
        if name == "interleaved-1f1b":
            if m % pp == 0:
                possible = (v for v in divisors(layers) if v > 1 and missing <= 2 * (layers // v))
                yield from ((name, v) for v in possible if not balanced or pp * v <= model.layers)
        elif not ((name == "zbv" and model.layers % (2 * pp)) or (name == "zb-h1" and m < pp)):
            yield name, 1


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A layout and its predictions: model and hardware FLOPs utilization, and TFLOP/s per GPU with recomputation."""

    layout: Layout
    memory: Memory
    time: StepTime
    volume: Volume
    mfu: float
    hfu: float
    tflops: float


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with the seconds of its step in closed form and the bytes of its fullest rank."""

    seconds: float
    nbytes: float
    layout: Layout


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    plans      the fastest layout of each of the best meshes (dp, cp, tp, pp, and ep), simulated, fastest first
    examined   the number of layouts, of which `fitting` fit
    meshes     the fastest layout of each mesh in closed form, fastest first
    """

    plans: list[Plan]
    examined: int
    fitting: int
    meshes: list[Candidate]


def plan(
    model: ModelShape,
    cluster: Cluster,
    global_batch: int,
    length: int,
    space: SearchSpace = SearchSpace(),
    top: int = TOP,
) -> SearchResult:
    """Search for the fastest layout of each mesh. Thousands are compared in closed form, the `top` ones simulated.

    UsageError if no layout divides, or none fits; it says how much memory the smallest needs and what would fit. Also
    if there are more than MOST_LAYOUTS.
    """
    best: dict[tuple[int, ...], Candidate] = {}
    examined = list(islice(layouts(model, cluster, global_batch, space, length), MOST_LAYOUTS + 1))
    if len(examined) > MOST_LAYOUTS:
        raise UsageError(
            f"more than {MOST_LAYOUTS} layouts: narrow the search, with --tp, --cp, --pp, --dp, --ep, --microbatch, "
            "--zero-stage, --schedule, --recompute or --sequence-parallel"
        )
    fitting = 0
    for layout in examined:
        nbytes = memory(model, layout, length, cluster.framework).total
        if nbytes > cluster.usable_memory:
            continue
        fitting += 1
        seconds = step_time(model, layout, cluster, length, exact=False).total
        if layout.axes not in best or seconds < best[layout.axes].seconds:
            best[layout.axes] = Candidate(seconds=seconds, nbytes=nbytes, layout=layout)
    if not best:
        raise UsageError(_nothing_fits(model, cluster, global_batch, length, space))
    candidates = sorted(best.values(), key=lambda candidate: candidate.seconds)
    plans: list[Plan] = []
    actions = 0
    for layout in (candidate.layout for candidate in candidates[:top]):
        plans.append(judge(model, layout, cluster, global_batch, length, exact=actions <= MOST_SIMULATED))
        actions += simulated_actions(layout) if plans[-1].time.exact else 0
    plans.sort(key=lambda plan: plan.time.total)
    return SearchResult(plans=plans, examined=len(examined), fitting=fitting, meshes=candidates)


def judge(
    model: ModelShape, layout: Layout, cluster: Cluster, global_batch: int, length: int, exact: bool = True
) -> Plan:
    """Predict one layout, its pipeline simulated if `exact` and if its schedule is not too long for that.

    UsageError for a layout that contradicts the model, the batch or the number of GPUs.
    """
    check_layout(model, layout, cluster.gpus, global_batch, length)
    time = step_time(model, layout, cluster, length, exact)
    flops = global_batch * model.model_flops(length)
    hardware_flops = global_batch * model.hardware_flops(length, layout.recompute)
    return Plan(
        layout=layout,
        memory=memory(model, layout, length, cluster.framework),
        time=time,
        volume=volume(model, layout, length, cluster.framework),
        mfu=utilization(flops, time.total, cluster.gpus, cluster.gpu.peak),
        hfu=utilization(hardware_flops, time.total, cluster.gpus, cluster.gpu.peak),
        tflops=hardware_flops / time.total / cluster.gpus / 1e12,
    )


# ---- nothing fits ----------------------------------------------------------------------------------------------------


def _least(
    model: ModelShape, cluster: Cluster, global_batch: int, length: int, space: SearchSpace
) -> tuple[float, Layout] | None:
    """Return the least memory of any layout, and that layout; None if no layout divides."""
    every = layouts(model, cluster, global_batch, space, length)
    candidates = ((memory(model, layout, length, cluster.framework).total, layout) for layout in every)
    return min(candidates, key=lambda candidate: candidate[0], default=None)


def _nothing_fits(model: ModelShape, cluster: Cluster, global_batch: int, length: int, space: SearchSpace) -> str:
    least = _least(model, cluster, global_batch, length, space)
    if least is None:
        return _nothing_divides(model, cluster, global_batch, length, space)
    nbytes, layout = least
    usable, used = cluster.usable_memory, cluster.assumptions.memory_used
    ways = list(_wider_choices(model, cluster, global_batch, length, space))
    ways += [f"{name} ({gpu.memory / 1e9:.0f} GB)" for name, gpu in GPUS.items() if gpu.memory * used >= nbytes]
    for gpus in (cluster.gpus * times for times in (2, 4, 8, 16, 32, 64)):
        if gpus > cluster.per_host and gpus % cluster.per_host:
            continue  # hosts that would not be full
        more = _least(model, replace(cluster, gpus=gpus), global_batch, length, space)
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
    """Yield what fits if one of the user's choices is given up: the ZeRO stage, recomputation, stages, cp, ep.

    Each is the least change of its kind.
    """
    choices: dict[str, tuple[object, list[tuple[int | str, SearchSpace]]]] = {
        "--zero-stage": (space.zero, [(stage, replace(space, zero=stage)) for stage in range(4)]),
        "--zero-replicas": (space.zero_replicas, [(1, replace(space, zero_replicas=None))]),
        "--recompute": (space.recompute, [(kind, replace(space, recompute=kind)) for kind in RECOMPUTE]),
        "--pp": (space.pp, [(pp, replace(space, pp=pp)) for pp in divisors(cluster.gpus)]),
        "--cp": (space.cp, [(c, replace(space, cp=c)) for c in replace(space, cp=None).context_sizes(length)]),
        "--ep": (space.ep or model.experts, [(ep, replace(space, ep=ep)) for ep in divisors(model.experts or 1)]),
    }
    for flag, (fixed, wider) in choices.items():
        for value, other in wider if fixed is not None else ():
            least = _least(model, cluster, global_batch, length, other)
            if least is not None and least[0] <= cluster.usable_memory:
                yield f"{flag} {value} ({least[1]})"
                break


def _nothing_divides(model: ModelShape, cluster: Cluster, global_batch: int, length: int, space: SearchSpace) -> str:
    sizes = space.context_sizes(length)
    if space.recompute == "selective" and (space.attention == "flash" or 1 not in sizes):
        which = "flash attention keeps" if space.attention == "flash" else "ring and all-gather keep"
        return f"{which} no scores, so there is nothing for selective recomputation: none or full"
    if space.context_parallel == "ulysses" and 1 not in sizes and model.tp_divides(space.tp or 1):
        check_heads(*model.rank_heads(space.tp or 1), sizes[0])
    fixed = [f"{n} {getattr(space, n)}" for n in ("dp", "tp", "pp", "schedule", "microbatch") if getattr(space, n)]
    fixed += [f"replicas of shards {', '.join(map(str, space.zero_replicas))}"] if space.zero_replicas else []
    fixed += [f"cp {', '.join(map(str, sizes))}"] * (space.cp is not None)
    fixed += [f"ep {space.ep if isinstance(space.ep, int) else ', '.join(map(str, space.ep))}"] if space.ep else []
    only = f" with {', '.join(fixed)}" if fixed else ""
    return (
        f"no layout divides{only}: global batch {global_batch}, {cluster.gpus} GPUs in hosts of {cluster.per_host}, "
        f"{model.layers} layers, {model.heads} heads; dp*cp*tp*pp = GPUs, dp*microbatch divides the batch, tp divides "
        "the heads and a host (or, with --tp, is a multiple of one), interleaved-1f1b needs pp to divide the "
        "microbatches, zbv 2*pp the layers"
    )
