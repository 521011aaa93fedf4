"""The traffic of a training step in closed form: the bytes that each rank sends on each mesh axis.

    predicted_traffic(StepLayout(...), rank) -> {"dp": bytes, "tp": bytes, "pp": bytes}

These are formulas, without a communicator. Tests compare them with the counters of every rank,
using ==. B is the samples of a microbatch, T tokens per sample, m microbatches, h hidden, V
vocabulary, L layers; d, t and p are the ranks of dp, tp and pp; n = B T h. The bytes of a
collective are `wire_bytes`: an all-reduce of x elements over t ranks sends 2x(t-1)/t if t divides
x.
"""

from math import prod

from minipar.comm.traffic import wire_bytes
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.placement import Partial

FLOAT64 = 8  # bytes; losses and norms are summed in float64 whatever the run's dtype


def ordered_sum(count: int, ranks: int, rank: int) -> int:
    """Compute the bytes of an all-reduce of float64 or int64 values, added in rank order."""
    return wire_bytes("all_reduce", "ordered", count, FLOAT64, ranks, rank)


def norm_bytes(layout: StepLayout, count: int, ranks: int, rank: int) -> int:
    """Compute what the gradient's norm sends over an axis that adds so many sums of squares."""
    return sum(ordered_sum(values, ranks, rank) for values in layout.norm_sums(count))


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
    """Compute the bytes that a world rank sends on each axis in a step."""
    place = layout.coordinates(rank)
    return {
        "dp": dp_bytes(layout, place["dp"], place["pp"]),
        "tp": tp_bytes(layout, place["tp"], place["pp"]),
        "pp": pp_bytes(layout, place["pp"]),
    }


def dp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute what rank `rank` of dp on pipeline rank `pp` sends over dp, by bucket:

        stage 0     all-reduce                                        2 Psi (d-1)/d elements
        stage 1, 2  reduce-scatter, then all-gather                   the same
        stage 3     reduce-scatter, and as many gathers as `gathers`  about (2m+1) Psi (d-1)/d

    Psi is the parameters of this rank. The loss adds an all-reduce of one float64, and the norm
    another one where the ranks sum different squares. Rajbhandari et al. 2020, section 7; there
    stage 3 gathers twice, so 3 Psi in all.
    """
    total = ordered_sum(1, layout.dp, rank)  # the loss
    if layout.splits_squares:
        total += norm_bytes(layout, 1, layout.shards, rank % layout.shards)
    reduce = "all_reduce" if layout.zero_stage == 0 else "reduce_scatter"
    for bucket in layout.buckets(dp=rank, pp=pp):
        place = bucket[0].dp
        assert place is not None
        size, ranks, own = place.bucket_size, place.ranks, place.rank
        reduced = wire_bytes(reduce, layout.reduction, size, layout.reduce_itemsize, ranks, own)
        gathered = wire_bytes("all_gather", "pairwise", size, layout.itemsize, ranks, own)
        total += layout.syncs * reduced + gathers(layout, bucket[0].unit) * gathered
    return total


def norm_chunks(layout: StepLayout) -> int:
    """Count the chunks whose squares a rank sums: its own, or those of all ranks of dp."""
    return 1 if layout.splits_squares else layout.dp


def tp_bytes(layout: StepLayout, rank: int, pp: int) -> int:
    """Compute the bytes that tensor-parallel rank `rank` on pipeline rank `pp` sends over tp.

    Per microbatch and layer, n elements are all-reduced four times, twice in forward and twice in
    backward: 8 n (t-1)/t (Shoeybi et al. 2019, section 3). With recompute the forward runs again,
    which makes six. The embedding adds one and the head one. Under sequence parallelism an
    all-gather and a reduce-scatter replace each of them, with the same bytes (Korthikanti et al.
    2022, section 4.2.2). The loss all-reduces B T maxima and 2 B T sums.

    Per step, each bucket's Partial gradients are all-reduced (with sequence parallelism those of
    norms and row biases). The norm adds one float64 for each chunk whose squares this rank sums.
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
    step = norm_bytes(layout, norm_chunks(layout), layout.tp, rank)
    for bucket in layout.buckets(pp=pp):
        elements = sum(prod(p.shape) for p in bucket if isinstance(p.tp, Partial))
        step += layout.partial_syncs * all_reduce(elements, layout.reduce_itemsize)
    return layout.microbatches * microbatch + step


def crossing_bytes(layout: StepLayout, rank: int, gathers: int, sums: int) -> int:
    """Compute what so many sums of activations over tp send.

    With sequence parallelism they are gathers and reduce-scatters.
    """
    n = layout.tokens * layout.model.n_embd
    if not layout.sequence_parallel:
        return sums * wire_bytes(
            "all_reduce", layout.reduction, n, layout.reduce_itemsize, layout.tp, rank
        )
    # The parts are equal, so all algorithms of a gather send as much.
    gathered = wire_bytes("all_gather", "ring", n, layout.itemsize, layout.tp, rank)
    summed = wire_bytes("reduce_scatter", layout.reduction, n, layout.reduce_itemsize, layout.tp, rank)
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
            total += layout.partial_syncs * table * layout.reduce_itemsize
    total += norm_bytes(layout, 2 * (layout.model.n_layer + 2) * norm_chunks(layout), layout.pp, rank)
    total += ordered_sum(1, layout.pp, rank)  # the loss
    return total
