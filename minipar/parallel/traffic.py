"""The traffic of a training step in closed form: the bytes that each rank sends on each mesh axis.

    predicted_traffic(StepLayout(...), rank) -> {"dp": bytes, "cp": bytes, "tp": bytes, "pp": bytes}

These are formulas, without a communicator. Tests compare them with the counters of every rank,
using ==. B is the samples of a microbatch, T tokens per sample, m microbatches, h hidden, V
vocabulary, L layers; d, c, t and p are the ranks of dp, cp, tp and pp; n = B T/c h. Gradients
travel over dp and cp together, and are counted as dp. The bytes of a collective are `wire_bytes`:
an all-reduce of x elements over t ranks sends 2x(t-1)/t if t divides x.
"""

from collections import Counter

from minipar.comm.algorithms import chunk_bounds
from minipar.comm.traffic import wire_bytes
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.placement import Partial

FLOAT64 = 8  # bytes; losses and norms are summed in float64 whatever the run's dtype


def ordered_sum(count: int, ranks: int, rank: int) -> int:
    """Compute the bytes of an all-reduce of float64 or int64 values, added in rank order."""
    return wire_bytes("all_reduce", "ordered", count, FLOAT64, ranks, rank)


def norm_bytes(layout: StepLayout, count: int, ranks: int, rank: int) -> int:
    """Compute what the gradient's norm sends over an axis: so many sums, or in a tree a maximum and two integers."""
    if layout.reduction == "tree":
        return ordered_sum(1, ranks, rank) + ordered_sum(2, ranks, rank)
    return ordered_sum(count, ranks, rank)


def bucket_elements(layout: StepLayout, pp: int, partial: bool = False) -> Counter[tuple[int, bool]]:
    """Count the elements of each bucket of pipeline rank `pp`, all or those of `partial` gradients.

    The keys are (unit, whether it is the bucket of experts, which has ranks of its own).
    """
    elements: Counter[tuple[int, bool]] = Counter()
    for p in layout.placements(pp=pp):
        assert p.dp is not None
        if isinstance(p.tp, Partial) or not partial:
            elements[p.unit, p.ep is not None] += p.dp.size
    return elements


def gathers(layout: StepLayout, unit: int) -> int:
    """Count how often the parameters of a bucket are gathered over dp in a step.

    Stages 1 and 2 gather the updated parameters once. Stage 3 gathers each block for each forward
    and each backward, 2m times, and an untied embedding or head m times: the lookup's backward
    reads no table, the head's follows its forward at once. `end_gathers` counts those of a
    pipeline's tied embedding. If the last stage is on another rank than the first, that one is
    gathered once more to be sent there.
    """
    if layout.zero_stage == 0:
        return 0
    if layout.zero_stage < 3:
        return 1
    if unit == layout.model.n_layer + 1 or (unit == 0 and not layout.model.tie_word_embeddings):
        return layout.microbatches  # a segment that reads no other unit
    if layout.schedule is None or unit > 0:
        return 2 * layout.microbatches
    if layout.first == layout.last:
        return end_gathers(layout.schedule, head_too=True)
    return end_gathers(layout.schedule, head_too=False) + 1


def end_gathers(schedule: Schedule, head_too: bool) -> int:
    """Count how often ZeRO stage 3 gathers the token embedding in a pipeline's step.

    Each lookup needs it, m times in all; its backward does not read the table. If the head is on
    the same rank (a V), the head reads it too. A lookup frees the values afterwards. The head's
    forward keeps them for its backward, which frees them. An action gathers if the values are not
    held.

    The head's own bucket, the last norm, is gathered m times in any order: each backward frees it,
    and each but the last is followed by an action that needs it.
    """
    count = 0
    is_held = False
    for _, action in schedule:
        lookup = action.stage == 0 and action.kind == "F"
        head = head_too and action.stage == schedule.stages - 1 and action.kind in ("F", "B", "I")
        if lookup or head:
            if not is_held:
                count += 1
            is_held = head and action.kind == "F"
    return count


def predicted_traffic(layout: StepLayout, rank: int) -> dict[str, int]:
    """Compute the bytes that a world rank sends on each axis in a step.

    ValueError for a rank that there is not.
    """
    coordinates = layout.coordinates(rank)
    replica = coordinates["dp"] * layout.cp + coordinates["cp"]
    return {
        "dp": dp_bytes(layout, replica, coordinates["pp"]),
        "cp": cp_bytes(layout, coordinates["pp"])
        + load_bytes(layout, layout.cp, coordinates["cp"], coordinates["pp"]),
        "tp": tp_bytes(layout, coordinates["tp"], coordinates["pp"]),
        "pp": pp_bytes(layout, coordinates["pp"]),
    }


def dp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute what rank `rank` of dp x cp on pipeline rank `pp` sends over both, by bucket:

        stage 0     all-reduce                                        2 Psi (d-1)/d elements
        stage 1, 2  reduce-scatter, then all-gather                   the same
        stage 3     reduce-scatter, and as many gathers as `gathers`  about (2m+1) Psi (d-1)/d

    Psi is the parameters of this rank, and d stands for s = d c/q, for experts for edp = d c/P: with
    q > 1, `replica_bytes` come on top. The loss adds an all-reduce of one float64 over d
    c ranks, and the norm another one over s, from stage 1 on or where ranks hold different experts.
    Loads are summed over the ranks that route different tokens. Rajbhandari et al. 2020, section 7;
    there stage 3 gathers twice, so 3 Psi in all.
    """
    replicas, shards = layout.replicas, layout.shards
    total = ordered_sum(1, replicas, rank)  # the loss
    total += ordered_sum(layout.loads, replicas, rank)
    if layout.zero_stage > 0 or layout.expert_sums_apart:
        total += norm_bytes(layout, 1, shards, rank % shards)
    reduce = "all_reduce" if layout.zero_stage == 0 else "reduce_scatter"
    for (unit, of_experts), elements in bucket_elements(layout, pp).items():
        if of_experts:
            ranks = layout.edp
            own = rank // layout.ep
        else:
            ranks = shards
            own = rank % shards
        reduced = wire_bytes(reduce, layout.reduction, elements, layout.reduce_bytes, ranks, own)
        gathered = wire_bytes("all_gather", "pairwise", elements, layout.itemsize, ranks, own)
        total += layout.syncs * reduced + gathers(layout, unit) * gathered
    return total + replica_bytes(layout, rank, pp)


def replica_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute what of `dp_bytes` leaves the replica: all-reduces of its chunks.

    These are 2 (Psi/s) (q-1)/q elements.
    """
    replica, shard = divmod(rank, layout.shards)
    total = 0
    for elements in bucket_elements(layout, pp).values():
        start, stop = chunk_bounds(elements, layout.shards)[shard]
        itemsize, ranks = layout.reduce_bytes, layout.zero_replicas
        total += wire_bytes("all_reduce", layout.reduction, stop - start, itemsize, ranks, replica)
    return layout.syncs * total


def cp_bytes(layout: StepLayout, pp: int) -> int:
    """Compute what attention sends over cp: per microbatch and layer, with u = B T/c tokens,

        ring         2(c-1) u h_kv elements   and in backward as many, and 2c u h_kv: the gradients make c hops
        all-gather   2(c-1) u h_kv            and in backward 4(c-1) u h_kv
        ulysses      2(h + h_kv) u (c-1)/c    and in backward the same

    With recompute forward runs again. Under tensor parallelism a rank has h/t and h_kv/t columns.
    """
    h = layout.model.n_embd // layout.tp
    kv_heads = layout.model.n_kv_head // layout.tp
    h_kv = kv_heads * (layout.model.n_embd // layout.model.n_head)
    moved, summed = cp_elements(layout.context_parallel, layout.cp, layout.tokens, h, h_kv)
    passes = 3 if layout.recompute else 2
    each = passes * moved * layout.itemsize + summed * layout.reduce_bytes
    return layout.microbatches * layout.blocks(pp) * each


def cp_elements(method: str, c: int, u: int, h: int, h_kv: int) -> tuple[int, int]:
    """Count a layer's elements of `cp_bytes` in a microbatch: (moved in each pass, gradients)."""
    if method == "ulysses" or c == 1:
        return 2 * (h + h_kv) * u * (c - 1) // c, 0
    hops = c if method == "ring" else c - 1
    return 2 * (c - 1) * u * h_kv, 2 * hops * u * h_kv


def load_bytes(layout: StepLayout, ranks: int, rank: int, pp: int) -> int:
    """Compute what the auxiliary loss sends over ranks that share samples: all loads of each layer and microbatch."""
    if not layout.aux_loss:
        return 0
    counts = layout.samples * layout.model.num_local_experts
    each = ordered_sum(counts, ranks, rank)
    return layout.microbatches * layout.blocks(pp) * each


def tp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute the bytes that tensor-parallel rank `rank` on pipeline rank `pp` sends over tp.

    Per microbatch and layer, n elements are all-reduced four times, twice in forward and twice in
    backward: 8 n (t-1)/t (Shoeybi et al. 2019, section 3). With recompute the forward runs again,
    which makes six. The embedding adds one and the head one. Under sequence parallelism an
    all-gather and a reduce-scatter replace each of them, with the same bytes (Korthikanti et al.
    2022, section 4.2.2). The loss all-reduces B T maxima and 2 B T sums.

    Per step, each bucket's Partial gradients are all-reduced (a Mixtral's routers; with sequence
    parallelism norms and row biases too). The norm adds one float64 for each chunk whose squares this rank sums.
    """
    if layout.tp == 1:
        return 0

    def all_reduce(elements: int, itemsize: int) -> int:
        return wire_bytes("all_reduce", layout.reduction, elements, itemsize, layout.tp, rank)

    forwards = 2 if layout.recompute else 1
    entered = layout.enters * layout.blocks(pp)
    left = 2 * layout.blocks(pp)
    # An activation that enters is gathered in each forward, and its gradient is summed. One that
    # leaves is summed in each forward, and its gradient is gathered.
    gathers = forwards * entered + left
    sums = forwards * left + entered
    microbatch = 0
    if pp == layout.first:
        gathers += 1
        sums += 1
    if pp == layout.last:
        gathers += 1
        sums += 1
        loss_itemsize = max(4, layout.itemsize)  # the loss is float32 at least
        microbatch += all_reduce(layout.tokens, loss_itemsize)
        microbatch += all_reduce(2 * layout.tokens, loss_itemsize)
    microbatch += crossing_bytes(layout, rank, gathers, sums)
    step = norm_bytes(layout, layout.norm_rows, layout.tp, rank)
    for elements in bucket_elements(layout, pp, partial=True).values():
        step += layout.leaf_sums * all_reduce(elements, layout.reduce_bytes)
    return layout.microbatches * microbatch + step


def crossing_bytes(layout: StepLayout, rank: int, gathers: int, sums: int) -> int:
    """Compute what so many sums of activations over tp send.

    With sequence parallelism they are gathers and reduce-scatters.
    """
    n = layout.tokens * layout.model.n_embd
    if not layout.sequence_parallel:
        return sums * wire_bytes("all_reduce", layout.reduction, n, layout.reduce_bytes, layout.tp, rank)
    # The parts are equal, so all algorithms of a gather send as much.
    gathered = wire_bytes("all_gather", "ring", n, layout.itemsize, layout.tp, rank)
    summed = wire_bytes("reduce_scatter", layout.reduction, n, layout.reduce_bytes, layout.tp, rank)
    return gathers * gathered + sums * summed


def pp_bytes(layout: StepLayout, rank: int) -> int:
    """Compute the bytes that pipeline rank `rank` sends over pp.

    Per microbatch, n elements (n/t under sequence parallelism) are sent over each cut whose other
    side is on another rank, forward to the next stage and backward to the previous one (Narayanan
    et al. 2021, section 2.2).

    Per step, the first rank sends a tied token embedding, ceil(V/t) h elements, to the last, which
    sends its gradient back (unless they are one rank). The norm all-reduces 2 (L + 2) float64
    values for each chunk, and the loss one.
    """
    if layout.schedule is None:
        return 0
    home, stages = layout.schedule.home, layout.schedule.stages
    crossed = 0
    for stage in range(stages - 1):
        if home[stage] != home[stage + 1]:
            crossed += [home[stage], home[stage + 1]].count(rank)
    elements = layout.tokens * layout.model.n_embd
    if layout.sequence_parallel:
        elements //= layout.tp
    total = crossed * layout.microbatches * elements * layout.itemsize
    if layout.model.tie_word_embeddings and layout.first != layout.last:
        rows = -(-layout.model.vocab_size // layout.tp)  # V/t, rounded up
        table = rows * layout.model.n_embd
        if rank == layout.first:
            total += table * layout.itemsize
        if rank == layout.last:
            gradients = layout.microbatches if layout.reduction == "tree" else 1
            total += gradients * table * layout.gradient_bytes
    total += norm_bytes(layout, 2 * (layout.model.n_layer + 2) * layout.norm_rows, layout.pp, rank)
    total += ordered_sum(1, layout.pp, rank)  # the loss
    total += ordered_sum(layout.loads, layout.pp, rank)
    return total
