"""The layouts that a search tries: what the user has fixed, and every other choice that divides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt

from minipar.more.context.token_order import METHODS, check_length
from minipar.parallel.predicted_memory import Precision
from minipar.plan.cluster import Cluster
from minipar.plan.layout import PRECISIONS, STAGES, Layout, check_experts
from minipar.plan.model import RECOMPUTE, ModelShape

# gpipe and naive never win; zb-h2 and zbv have no closed form to search by. A user can ask for all
# of them.
SEARCHED = ("1f1b", "interleaved-1f1b", "zb-h1")
LEAST_TOKENS = 8192  # a rank has as many of a sequence, as in Llama 3 (2407.21783, table 4), unless the user gives cp


Sizes = int | tuple[int, ...]  # one, or those to try


def each(sizes: Sizes) -> list[int]:
    """Return the sizes to try, smallest first."""
    return [sizes] if isinstance(sizes, int) else sorted(set(sizes))


@dataclass(frozen=True)
class SearchSpace:
    """The choices that the user has fixed; `None` leaves one to the planner."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: Sizes = STAGES
    zero_replicas: Sizes = 1
    recompute: str | None = None
    schedule: str | None = None
    microbatch: int | None = None
    sequence_parallel: bool | None = None
    attention: str = "stored"
    precision: Precision = PRECISIONS["fp16"]
    cp: Sizes | None = None
    context_parallel: str | None = None
    cp_order: str = "zigzag"
    ep: Sizes | None = None
    etp: Sizes | None = None

    def context_sizes(self, length: int) -> list[int]:
        """Return the sizes of cp to try for sequences of `length` tokens. UsageError if a given one
        does not divide.

        Without a given one every size is tried that leaves a rank LEAST_TOKENS. Shorter sequences
        are not cut.
        """
        if self.cp is None:
            parts = 2 if self.cp_order == "zigzag" else 1
            cut = range(2, length // LEAST_TOKENS + 1)
            return [1, *(c for c in cut if length % (parts * c) == 0)]
        sizes = each(self.cp)
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

    def expert_meshes(
        self, model: ModelShape, replicas: int, tp: int, per_host: int
    ) -> list[tuple[int, int]]:
        """Return the (ep, etp) to try: unless the user gives etp, experts that are cut over all of
        tp, and whole ones.
        """
        if self.etp is None:
            cuts = [tp] if model.experts is None else sorted({1, tp})
        else:
            for etp in each(self.etp):
                check_experts(model, 1, etp)
            cuts = [etp for etp in each(self.etp) if tp % etp == 0]
        return [
            (ep, etp)
            for etp in cuts
            for ep in self.expert_sizes(model, replicas * tp // etp, per_host // etp)
        ]

    def expert_sizes(self, model: ModelShape, ranks: int, near: int) -> list[int]:
        """Return the sizes of ep to try on so many ranks that route different tokens. UsageError if
        a given one divides no experts.

        Only one that the user has fixed goes over hosts: `near` of the ranks share one.
        """
        if self.ep is None:
            sizes = [ep for ep in divisors(model.experts or 1) if ep <= max(1, near)]
        else:
            sizes = each(self.ep)
        for ep in sizes:
            check_experts(model, ep, etp=None)
        return [ep for ep in sizes if ranks % ep == 0]

    def shards(self, replicas: int, edp: int) -> list[tuple[int, int]]:
        """Return the (ZeRO stage, replicas of ZeRO's shards) to try on the ranks of dp x cp, where
        `edp` hold the same parts of experts.

        With one rank of each there is nothing to shard.
        """
        stages = each(self.zero) if max(replicas, edp) > 1 else [0]
        return [
            (zero, q)
            for zero, q in product(stages, each(self.zero_replicas))
            if q == 1 or (zero > 0 and replicas % q == 0)
        ]

    def recomputations(self, schedule: str) -> Sequence[str]:
        """Return the kinds of recomputation to try.

        Full recomputation goes with a split backward only on request, since W needs what was
        recomputed for I.
        """
        if self.recompute is not None:
            return [self.recompute]
        return ["none", "selective"] if schedule.startswith("zb") else RECOMPUTE

    def sequence_choices(self, tp: int) -> list[bool]:
        """Return whether to try without and with sequence parallelism.

        It sends as much and holds less, but backward waits for more of it.
        """
        if tp == 1:
            return [False]
        return [False, True] if self.sequence_parallel is None else [self.sequence_parallel]


EVERYTHING = SearchSpace()  # nothing is fixed


@dataclass(frozen=True)
class Question:
    """The question of a search: a model, a cluster, a batch of sequences of `length` tokens, and
    the layouts to choose from.
    """

    model: ModelShape
    cluster: Cluster
    global_batch: int
    length: int
    space: SearchSpace

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout of the search space."""
        return layouts(self.model, self.cluster, self.global_batch, self.space, self.length)


# ---- layouts -------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    """Return the divisors of n, smallest first."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def layouts(
    model: ModelShape,
    cluster: Cluster,
    global_batch: int,
    space: SearchSpace = EVERYTHING,
    length: int = 0,
) -> Iterator[Layout]:
    """Yield every layout of the search space, for sequences of `length` tokens: 0 for short ones,
    without cp.
    """
    balanced = cluster.framework.balanced_stages
    for tp, cp, pp, dp in meshes(model, cluster, global_batch, space, length):
        shards = [
            (ep, etp, zero, q)
            for ep, etp in space.expert_meshes(model, dp * cp, tp, cluster.per_host)
            for zero, q in space.shards(dp * cp, dp * cp * tp // (ep * etp))
        ]
        methods = space.context_methods(model, tp, cp)
        for microbatch in microbatch_sizes(global_batch // dp, space, cp):
            m = global_batch // dp // microbatch
            for schedule, v in schedules(model, pp, m, space.schedule, balanced):
                choices = space.recomputations(schedule), space.sequence_choices(tp), methods
                for (ep, etp, zero, q), recompute, sequence_parallel, method in product(
                    shards, *choices
                ):
                    layout = Layout(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        microbatch=microbatch,
                        microbatches=m,
                        zero=zero,
                        zero_replicas=q,
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
                        etp=etp if etp < tp else None,
                    )
                    if can_run(layout):
                        yield layout


def can_run(layout: Layout) -> bool:
    """Return whether the choices of a layout go together.

    Selective recomputation computes stored scores again. Shards of experts have no replicas: those
    go with ep = 1 and etp = tp. Each rank of tp routes its own tokens, where experts are not cut
    over all of tp: sequence parallelism divides these.
    """
    if layout.recompute == "selective" and not layout.stores_scores:
        return False
    if layout.zero_replicas > 1 and layout.expert_sums_apart:
        return False
    return layout.sequence_parallel or layout.expert_tp == layout.tp


def meshes(
    model: ModelShape, cluster: Cluster, global_batch: int, space: SearchSpace, length: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp, cp, pp, dp). tp divides a host and the heads, pp is at most the layers, dp divides
    the batch.

    tp also divides the heads of keys and values, or is a multiple of them: then ranks hold copies.
    Only a tp that the user has fixed goes over hosts: a multiple of a host's GPUs.
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
    """Return the divisors of a replica's samples that are powers of two, or the size that the user
    has fixed.

    With a cp of the planner's own choice a microbatch is one sample: two would be as many tokens on
    half as many ranks.
    """
    if space.microbatch is not None:
        return [space.microbatch] if samples % space.microbatch == 0 else []
    if cp > 1 and space.cp is None:
        return [1]
    return [size for size in divisors(samples) if size & (size - 1) == 0]


def schedules(
    model: ModelShape, pp: int, m: int, fixed: str | None, balanced: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield (schedule, stages per rank). Where pp does not divide the layers, the fullest rank
    counts.

    interleaved-1f1b needs pp to divide m. Its first and last stage may have embedding and head
    alone, as Llama 3's do (arXiv 2407.21783, 3.3.2), unless the program divides layers evenly
    (`balanced`): then each stage has at least one. zb-h1 needs m >= pp, and zbv needs 2 pp to
    divide the layers.
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
