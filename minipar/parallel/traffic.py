"""What a training step sends, in closed form: bytes of each rank on each mesh axis, before anything has run.

    predicted_traffic(StepLayout(...), rank) -> {"dp": bytes, "tp": bytes, "pp": bytes}

Formulas alone: no model, no communicator. Tests compare them with the counters of every rank, using ==. Letters: B
samples of T tokens in a microbatch, M microbatches, h hidden, V vocabulary, t tensor-parallel ranks, p pipeline ranks,
d replicas, L layers; n = B T h. "All-reduce of x" is `wire_bytes` of that collective: 2x(t-1)/t where t divides x.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from minipar.comm.traffic import wire_bytes
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.placement import Partial

FLOAT64 = 8  # bytes: losses and norms are added in it whatever the run's dtype


@dataclass(frozen=True)
class BucketTraffic:
    """A bucket as its traffic depends on it: the elements that travel over dp together on one rank.

    `partial` are those whose gradient is first summed over tp. `gathers` is the number of times per step that its
    parameters are gathered.
    """

    elements: int
    partial: int
    gathers: int


def buckets(layout: StepLayout, pp: int) -> list[BucketTraffic]:
    """Return the buckets of pipeline rank `pp`, from its parameters' placements.

    Stages 1 and 2 gather what the optimizer has updated, once. Stage 3 gathers each block for each forward and each
    backward, 2 m times; see `end_gathers` for the ends. Where a pipeline's last stage borrows the token embedding, it
    is gathered once more to be sent.
    """
    first, last = layout.ends
    elements: Counter[int] = Counter()
    partial: Counter[int] = Counter()
    placements = layout.placements(pp=pp)
    for p in placements:
        assert p.dp is not None
        elements[p.unit] += p.dp.size
        partial[p.unit] += p.dp.size * isinstance(p.tp, Partial)

    def gathers(unit: int) -> int:
        if layout.zero_stage < 3:
            return int(layout.zero_stage > 0)
        if layout.schedule is not None and unit == 0:
            return end_gathers(layout.schedule, first == last) + (first != last)
        if layout.schedule is not None and unit == layout.model.n_layer + 1:
            return layout.microbatches
        return 2 * layout.microbatches

    return [BucketTraffic(elements[unit], partial[unit], gathers(unit)) for unit in sorted(elements)]


def end_gathers(schedule: Schedule, head_too: bool) -> int:
    """How often ZeRO stage 3 gathers the token embedding in a pipeline's step: once for each lookup, M times (its
    backward does not read the table). With the head on the same rank (zbv), which reads it too, as often as it is not
    there: a lookup frees it, a head's forward keeps it for its backward, which frees it.

    The head's own bucket, the last LayerNorm, is gathered M times in any order: each backward frees it, and each but
    the last is followed by something that needs it.
    """
    gathers, here = 0, False
    for action in schedule.ranks[schedule.home[0]]:
        lookup = action.stage == 0 and action.kind == "F"
        head = head_too and action.stage == schedule.stages - 1 and action.kind in ("F", "B", "I")
        if lookup or head:
            gathers += not here
            here = head and action.kind == "F"
    return gathers


def predicted_traffic(layout: StepLayout, rank: int) -> dict[str, int]:
    """Bytes that a world rank sends on each axis in one training step: `dp_bytes`, `tp_bytes`, `pp_bytes`.

    ValueError for a rank that the layout does not have.
    """
    place = layout.coordinates(rank)
    return {
        "dp": dp_bytes(layout, place["dp"], place["pp"]),
        "tp": tp_bytes(layout, place["tp"], place["pp"]),
        "pp": pp_bytes(layout, place["pp"]),
    }


def dp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Over the data-parallel axis, for replica `rank` of pipeline rank `pp`, summed over its buckets:

        stage 0     all-reduce                                        2 Psi (d-1)/d elements
        stage 1, 2  reduce-scatter, then all-gather                   the same
        stage 3     reduce-scatter, and the gathers of `buckets`      about (2 M + 1) Psi (d-1)/d

    with Psi the parameters of this rank. Besides, the loss: one float64 all-reduced; from stage 1 on the norm: one
    more. Rajbhandari et al. 2020, section 7; there stage 3 gathers once for each forward and backward, 3 Psi in all.
    """

    def wire(op: str, algorithm: str, elements: int, itemsize: int = layout.itemsize) -> int:
        return wire_bytes(op, algorithm, elements, itemsize, layout.dp, rank)

    total = (1 if layout.zero_stage == 0 else 2) * wire("all_reduce", "ordered", 1, FLOAT64)
    for bucket in buckets(layout, pp):
        reduce = "all_reduce" if layout.zero_stage == 0 else "reduce_scatter"
        total += layout.syncs * wire(reduce, layout.reduction, bucket.elements)
        total += bucket.gathers * wire("all_gather", "pairwise", bucket.elements)
    return total


def tp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Over the tensor-parallel axis, for rank `rank` of it on pipeline rank `pp`.

    For each microbatch, n elements travel four times per layer, twice forward and twice backward: 8 n (t-1)/t (Shoeybi
    et al. 2019, section 3); with recompute, whose forward runs again, six times. After the embedding once, before the
    head once. Each time as an all-reduce, or under sequence parallelism as an all-gather and a reduce-scatter: the same
    bytes (Korthikanti et al. 2022, section 4.2.2). The loss all-reduces B T maxima and 2 B T sums.

    Once per step: under sequence parallelism an all-reduce of each bucket's replicated gradients; the norm, one
    float64 for each chunk whose squares this rank sums.
    """
    if layout.tp == 1:
        return 0

    def wire(op: str, elements: int, algorithm: str = layout.reduction, itemsize: int = layout.itemsize) -> int:
        return wire_bytes(op, algorithm, elements, itemsize, layout.tp, rank)

    tokens = layout.samples * layout.length
    n = tokens * layout.model.n_embd
    once = wire("all_reduce", n)
    if layout.sequence_parallel:
        once = wire("all_gather", n, "ring" if layout.reduction == "ring" else "pairwise") + wire("reduce_scatter", n)
    first, last = layout.ends
    total = (6 if layout.recompute else 4) * layout.blocks(pp) * once + ((pp == first) + (pp == last)) * once
    if pp == last:
        total += wire("all_reduce", tokens) + wire("all_reduce", 2 * tokens)
    total *= layout.microbatches
    if layout.sequence_parallel:
        total += layout.syncs * sum(wire("all_reduce", bucket.partial) for bucket in buckets(layout, pp))
    return total + wire("all_reduce", layout.norm_rows, "ordered", FLOAT64)


def pp_bytes(layout: StepLayout, rank: int) -> int:
    """Over the pipeline axis, for pipeline rank `rank`: n elements (n/t under sequence parallelism) for each microbatch
    over each cut whose other side is on another rank, forward to the next stage and backward to the one before
    (Narayanan et al. 2021, section 2.2).

    Once per step: the token embedding, ceil(V/t) h elements, from the first rank to the last, and its gradient the
    other way, unless the two are one; the norm, an all-reduce of 2 (L + 2) float64 for each chunk; the loss, one
    float64.
    """
    if layout.schedule is None:
        return 0
    home, stages = layout.schedule.home, layout.schedule.stages
    mine = [s for s in range(stages) if home[s] == rank]
    crossed = sum(0 <= other < stages and home[other] != rank for s in mine for other in (s - 1, s + 1))
    elements = layout.samples * layout.length * layout.model.n_embd
    if layout.sequence_parallel:
        elements //= layout.tp
    total = crossed * layout.microbatches * elements * layout.itemsize
    first, last = layout.ends
    if first != last and rank in (first, last):
        total += layout.vocabulary * layout.model.n_embd * layout.itemsize
    for elements in (2 * (layout.model.n_layer + 2) * layout.norm_rows, 1):
        total += wire_bytes("all_reduce", "ordered", elements, FLOAT64, layout.pp, rank)
    return total
