"""The traffic of a training step in closed form, from its layout: the bytes that each rank sends on each mesh axis.

    predicted_traffic(StepLayout(...), rank) -> {"dp": bytes, "cp": bytes, "tp": bytes, "pp": bytes}

These are formulas, without a communicator. Tests compare them with the counters of every rank, using ==. B is the
samples of a microbatch, T tokens per sample, m microbatches, h hidden, V vocabulary, L layers; d, c, t and p are the
ranks of dp, cp, tp and pp; n = B T/c h. Gradients travel over dp and cp together, and are counted as dp. The bytes of a
collective are `wire_bytes`: an all-reduce of x elements over t ranks sends 2x(t-1)/t if t divides x.
"""

from collections import Counter, namedtuple
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

from minipar.comm.algorithms import chunk_bounds
from minipar.comm.mesh import DeviceMesh
from minipar.comm.traffic import wire_bytes
from minipar.nn.transformer import TransformerConfig
from minipar.parallel.buckets import by_unit, make_buckets
from minipar.parallel.expert import expert_parallel
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.stage import balanced_cuts, part_groups
from minipar.parallel.placement import Partial, Placement, Replicate, place, placement_of, update
from minipar.parallel.tensor.plan import tensor_parallel

FLOAT64 = 8  # bytes; losses and norms are summed in float64 whatever the run's dtype
Ranks = cast(Any, namedtuple("Ranks", "rank size"))  # what strategies ask of a Communicator before they send


@dataclass(frozen=True)
class StepLayout:
    """A model and the mesh that trains it, from which traffic and memory of a step are computed before it runs."""

    model: TransformerConfig
    length: int
    samples: int  # in one microbatch of one replica
    microbatches: int
    itemsize: int  # bytes of an element
    gradient_itemsize: int = 0  # of a gradient, and
    reduce_itemsize: int = 0  # of what dp and tp sum; 0: as itemsize
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    zero_replicas: int = 1
    schedule: Schedule | None = None  # None if pp = 1
    context_parallel: str = "ring"
    sequence_parallel: bool = False
    recompute: bool = False
    reduction: str = "ring"
    sync_every_microbatch: bool = False
    aux_loss: float = 0.0
    router_bias: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("gradient_itemsize", "reduce_itemsize"):
            object.__setattr__(self, name, getattr(self, name) or self.itemsize)

    replicas = property(lambda self: self.dp * self.cp)  # ranks over which gradients are summed: d c
    shards = property(lambda self: self.replicas // self.zero_replicas)  # ranks over which ZeRO shards: s = d c/q
    tokens = property(lambda self: self.samples * self.length // self.cp)  # of one microbatch on a rank: B T/c
    syncs = property(lambda self: self.microbatches if self.sync_every_microbatch else 1)  # times gradients are reduced
    # Chunks of the gradient whose squares a rank sums for the norm: its own with ZeRO or ep > 1, else all d c.
    norm_rows = property(lambda self: 1 if self.zero_stage or self.ep > 1 else self.replicas)
    balances = property(lambda self: self.router_bias > 0 or self.capacity_factor is not None)
    # Counts of each layer, by expert and of what is dropped, which a step sums over dp, cp and pp.
    loads = property(lambda self: self.model.n_layer * (self.model.num_local_experts + 1) if self.balances else 0)
    ends = property(lambda self: (self.homes[0], self.homes[-1]))  # the pipeline ranks with the embedding and the head

    @cached_property
    def homes(self) -> list[int]:
        """The pipeline rank of each part of the model: the embedding, the blocks, the head."""
        if self.schedule is None:
            return [0] * (self.model.n_layer + 2)
        cuts = balanced_cuts(self.model.part_flops(self.length), self.schedule.stages)
        return [self.schedule.home[stage] for stage, count in enumerate(cuts) for _ in range(count)]

    def blocks(self, pp: int) -> int:
        """Count the transformer layers of a pipeline rank."""
        return self.homes[1:-1].count(pp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a world rank's coordinate on each axis. ValueError for a rank that the layout does not have."""
        if not 0 <= rank < self.replicas * self.tp * self.pp:
            raise ValueError(f"rank {rank} of dp*cp*tp*pp = {self.dp}*{self.cp}*{self.tp}*{self.pp}")
        coordinates = {}
        for axis in DeviceMesh.AXES:
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return coordinates

    def placements(self, dp: int = 0, tp: int = 0, pp: int = 0, cp: int = 0) -> list[Placement]:
        """Return the placements of the parameters that pipeline rank `pp` owns, for its ranks `dp`, `tp` and `cp`.

        The strategies place the parameters of a model without values, and send nothing.
        """
        replica, shard = divmod(dp * self.cp + cp, self.shards)
        model = self.model.build(deferred=True)
        place(model)
        if self.tp > 1:
            tensor_parallel(model, Ranks(tp, self.tp), sequence=self.sequence_parallel)
        expert_parallel(model, Ranks(shard % self.ep, self.ep), Ranks(shard // self.ep, self.shards // self.ep))
        units = by_unit(model) if self.schedule is None else part_groups(model)
        for i, unit in enumerate(units):
            for p in unit:
                update(p, pp=self.homes[i], unit=i, units=len(units))
        own = [unit for i, unit in enumerate(units) if self.homes[i] == pp]
        buckets = make_buckets(own, Ranks(shard, self.shards), replica)
        return [placement_of(p) for bucket in reversed(buckets) for p in bucket.parameters]


def bucket_elements(layout: StepLayout, pp: int, kind: type[Replicate] = Replicate) -> Counter[tuple[int, int]]:
    """Count the elements of each bucket of pipeline rank `pp`; only those that tp places as `kind`.

    The keys are (unit, 1), and (unit, P) for the bucket of experts, of which every P-th rank of dp holds the same ones.
    """
    elements: Counter[tuple[int, int]] = Counter()
    for p in layout.placements(pp=pp):
        assert p.dp is not None
        elements[p.unit, 1 if p.ep is None else layout.ep] += p.dp.size * isinstance(p.tp, kind)
    return elements


def gathers(layout: StepLayout, unit: int) -> int:
    """Count how often the parameters of a bucket are gathered over dp in a step.

    Stages 1 and 2 gather the updated parameters once. Stage 3 gathers each block for each forward and each backward, 2m
    times, and an untied embedding or head m times: the lookup's backward reads no table, the head's follows its forward
    at once. `end_gathers` counts those of a pipeline's tied embedding. If the last stage is on another rank than the
    first, that one is gathered once more to be sent there.
    """
    first, last = layout.ends
    if layout.zero_stage < 3:
        return int(layout.zero_stage > 0)
    if unit == layout.model.n_layer + 1 or (unit == 0 and not layout.model.tie_word_embeddings):
        return layout.microbatches  # a part that reads no other unit
    if layout.schedule is not None and unit == 0:
        return end_gathers(layout.schedule, first == last) + (first != last)
    return 2 * layout.microbatches


def end_gathers(schedule: Schedule, head_too: bool) -> int:
    """Count how often ZeRO stage 3 gathers the token embedding in a pipeline's step.

    Each lookup needs it, m times in all; its backward does not read the table. If the head is on the same rank (a V),
    the head reads it too. A lookup frees the values afterwards. The head's forward keeps them for its backward, which
    frees them. An action gathers if the values are not held.

    The head's own bucket, the last norm, is gathered m times in any order: each backward frees it, and each but
    the last is followed by an action that needs it.
    """
    gathers, is_held = 0, False
    for _, action in schedule:
        lookup = action.stage == 0 and action.kind == "F"
        head = head_too and action.stage == schedule.stages - 1 and action.kind in ("F", "B", "I")
        if lookup or head:
            gathers += not is_held
            is_held = head and action.kind == "F"
    return gathers


def predicted_traffic(layout: StepLayout, rank: int) -> dict[str, int]:
    """Compute the bytes that a world rank sends on each axis in a step. ValueError for a rank that there is not."""
    coordinates = layout.coordinates(rank)
    dp, cp, tp, pp = (coordinates[axis] for axis in ("dp", "cp", "tp", "pp"))
    sent = {"dp": dp_bytes(layout, dp * layout.cp + cp, pp), "cp": cp_bytes(layout, pp)}
    if layout.aux_loss:  # the loads of each sample, once per layer and microbatch
        loads = wire_bytes("all_reduce", "ordered", layout.samples * layout.model.num_local_experts, 8, layout.cp, cp)
        sent["cp"] += layout.microbatches * layout.blocks(pp) * loads
    return sent | {"tp": tp_bytes(layout, tp, pp), "pp": pp_bytes(layout, pp)}


def dp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute the bytes that rank `rank` of dp x cp on pipeline rank `pp` sends over both, summed over its buckets:

        stage 0     all-reduce                                        2 Psi (d-1)/d elements
        stage 1, 2  reduce-scatter, then all-gather                   the same
        stage 3     reduce-scatter, and as many gathers as `gathers`  about (2m+1) Psi (d-1)/d

    Psi is the parameters of this rank, and d stands for s = d c/q, for experts for d c/P: with q > 1, `replica_bytes`
    come on top. The loss adds an all-reduce of one float64 over d c ranks, and the norm another one over s, from stage
    1 on or with ep > 1. Rajbhandari et al. 2020, section 7; there stage 3 gathers twice, so 3 Psi in all.
    """

    def wire(op: str, algorithm: str, elements: int, itemsize: int = layout.itemsize, fold: int = 1) -> int:
        ranks = layout.shards // fold
        return wire_bytes(op, algorithm, elements, itemsize, ranks, rank // fold % ranks)

    total = wire_bytes("all_reduce", "ordered", 1, FLOAT64, layout.replicas, rank) + replica_bytes(layout, rank, pp)
    total += wire("all_reduce", "ordered", 1, FLOAT64) * (layout.zero_stage > 0 or layout.ep > 1)
    total += wire_bytes("all_reduce", "ordered", layout.loads, 8, layout.replicas, rank)
    reduce = "all_reduce" if layout.zero_stage == 0 else "reduce_scatter"
    for (unit, fold), elements in bucket_elements(layout, pp).items():
        total += layout.syncs * wire(reduce, layout.reduction, elements, layout.reduce_itemsize, fold=fold)
        total += gathers(layout, unit) * wire("all_gather", "pairwise", elements, fold=fold)
    return total


def replica_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute what of `dp_bytes` leaves the replica: all-reduces of its chunks, 2 (Psi/s) (q-1)/q elements."""
    replica, place = divmod(rank, layout.shards)
    own = [chunk_bounds(elements, layout.shards)[place] for elements in bucket_elements(layout, pp).values()]
    q, wire = layout.zero_replicas, partial(wire_bytes, "all_reduce", layout.reduction, itemsize=layout.reduce_itemsize)
    return layout.syncs * sum(wire(stop - start, p=q, rank=replica) for start, stop in own)


def cp_bytes(layout: StepLayout, pp: int) -> int:
    """Compute the bytes that a rank on pipeline rank `pp` sends over cp: per microbatch and layer, with u = B T/c,

        ring         2(c-1) u h_kv elements   and in backward as many, and 2c u h_kv: the gradients make c hops
        all-gather   2(c-1) u h_kv            and in backward 4(c-1) u h_kv
        ulysses      2(h + h_kv) u (c-1)/c    and in backward the same

    With recompute forward runs again. Under tensor parallelism a rank has h/t and h_kv/t columns.
    """
    h = layout.model.n_embd // layout.tp
    h_kv = h * layout.model.n_kv_head // layout.model.n_head
    moved, summed = cp_elements(layout.context_parallel, layout.cp, layout.tokens, h, h_kv)
    each = (2 + layout.recompute) * moved * layout.itemsize + summed * layout.reduce_itemsize
    return layout.microbatches * layout.blocks(pp) * each


def cp_elements(method: str, c: int, u: int, h: int, h_kv: int) -> tuple[int, int]:
    """Count the elements of `cp_bytes` in one layer and microbatch: sent in forward and in backward; and gradients."""
    if method == "ulysses" or c == 1:
        return 2 * (h + h_kv) * u * (c - 1) // c, 0
    return 2 * (c - 1) * u * h_kv, 2 * (c if method == "ring" else c - 1) * u * h_kv


def tp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute the bytes that tensor-parallel rank `rank` on pipeline rank `pp` sends over tp.

    Per microbatch and layer, n elements are all-reduced four times, twice in forward and twice in backward: 8 n (t-1)/t
    (Shoeybi et al. 2019, section 3). With recompute the forward runs again, which makes six. The embedding adds one and
    the head one. Under sequence parallelism an all-gather and a reduce-scatter replace each of them, with the same
    bytes (Korthikanti et al. 2022, section 4.2.2). The loss all-reduces B T maxima and 2 B T sums.

    Per step, each bucket's Partial gradients are all-reduced (a Mixtral's routers; with sequence parallelism norms and
    row biases too), and the norm adds one float64 for each chunk whose squares this rank sums.
    """
    if layout.tp == 1:
        return 0

    def wire(op: str, elements: int, algorithm: str = layout.reduction, itemsize: int = layout.reduce_itemsize) -> int:
        return wire_bytes(op, algorithm, elements, itemsize, layout.tp, rank)

    n = layout.tokens * layout.model.n_embd
    once = wire("all_reduce", n)
    if layout.sequence_parallel:
        algorithm = "ring" if layout.reduction == "ring" else "pairwise"
        once = wire("all_gather", n, algorithm, layout.itemsize) + wire("reduce_scatter", n)
    first, last = layout.ends
    total = (6 if layout.recompute else 4) * layout.blocks(pp) * once + ((pp == first) + (pp == last)) * once
    if pp == last:
        itemsize = max(4, layout.itemsize)  # the loss is float32 at least
        total += sum(wire("all_reduce", count * layout.tokens, itemsize=itemsize) for count in (1, 2))
    total *= layout.microbatches
    total += layout.syncs * sum(wire("all_reduce", n) for n in bucket_elements(layout, pp, Partial).values())
    return total + wire("all_reduce", layout.norm_rows, "ordered", FLOAT64)


def pp_bytes(layout: StepLayout, rank: int) -> int:
    """Compute the bytes that pipeline rank `rank` sends over pp.

    Per microbatch, n elements (n/t under sequence parallelism) are sent over each cut whose other side is on another
    rank, forward to the next stage and backward to the previous one (Narayanan et al. 2021, section 2.2).

    Per step, the first rank sends a tied token embedding, ceil(V/t) h elements, to the last, which sends its gradient
    back (unless they are one rank). The norm all-reduces 2 (L + 2) float64 values for each chunk, and the loss one.
    """
    if layout.schedule is None:
        return 0
    home, stages = layout.schedule.home, layout.schedule.stages
    neighbours = [s + step for s in range(stages) if home[s] == rank for step in (-1, 1)]
    crossed = sum(0 <= s < stages and home[s] != rank for s in neighbours)
    elements = layout.tokens * layout.model.n_embd // (layout.tp if layout.sequence_parallel else 1)
    total = crossed * layout.microbatches * elements * layout.itemsize
    first, last = layout.ends
    if layout.model.tie_word_embeddings and first != last and rank in (first, last):
        rows = -(-layout.model.vocab_size // layout.tp)  # V/t, rounded up
        total += rows * layout.model.n_embd * (layout.itemsize if rank == first else layout.gradient_itemsize)
    for elements in (2 * (layout.model.n_layer + 2) * layout.norm_rows, 1, layout.loads):
        total += wire_bytes("all_reduce", "ordered", elements, FLOAT64, layout.pp, rank)
    return total
