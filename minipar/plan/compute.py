"""Seconds of one microbatch in each unit of the model on one rank: the embedding, a layer, the
output head.

A unit's F, I and W are its computation and the communication that it waits for: tensor-parallel
collectives, in a layer's attention messages over cp, and over ep those to its experts and back.
Next to them are the collectives over dp that its parameters need. The computation follows from the
GPU's data sheet and the assumptions (`gpu_compute`), or it was measured on this machine
(Cluster.measured, `python -m minipar.bench machine`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from minipar.plan.cluster import (  # fmt: skip
    Cluster,
    all_to_all_seconds,
    fetch_seconds,
    gather_seconds,
)
from minipar.plan.gpu_time import attention_squares, core_flops, gpu_compute
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.plan.pipeline_time import StageTime
from minipar.plan.rank_bytes import (
    embedding_rows,
    expert_bytes,
    kv_columns,
    kv_copies,
    layer_experts,
    layer_state,
    rank_buckets,
    replicated_parameters,
)

# ---- units ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitTime(StageTime):
    """Seconds of one microbatch in one unit: F, I (with recomputation) and W, waiting for tp, cp
    and ep included.

    tp, cp, ep   the communication in these: waiting, and what hidden messages cost the computation
    gather    all-gather of the unit's parameters over dp, for each pass (ZeRO stage 3);  refresh:
              the one after the update (ZeRO stages 1 and 2)
    reduce    all-reduce of its gradients over dp; from ZeRO stage 1 on reduce-scatter
    across    all-reduce, after `reduce`, of the rank's chunk of them over the replicas of ZeRO's
              shards
    partial   sum over tp of the gradients of which each tp rank has only its share, of the tokens,
              of the experts' columns (a router's) or of the queries (a copied head's of keys and
              values); it precedes `reduce`
    """

    tp: float
    gather: float
    refresh: float = 0.0
    reduce: float = 0.0
    partial: float = 0.0
    across: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def launched_in(self, seconds: float) -> "UnitTime":
        """Return the unit with F, I and W stretched to `seconds` in all if the host takes longer
        than the GPU.
        """
        if seconds <= self.seconds:
            return self
        stretch = seconds / self.seconds
        return replace(
            self,
            forward=self.forward * stretch,
            backward_input=self.backward_input * stretch,
            backward_weight=self.backward_weight * stretch,
        )


@dataclass(frozen=True)
class UnitTimes:
    """The times of a model's units on a rank, every layer alike, and the optimizer's `update` of
    the rank.
    """

    embedding: UnitTime
    layer: UnitTime
    head: UnitTime
    update: float


@cache
def unit_times(model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> UnitTimes:
    """Return the times of a layout's units."""
    buckets = rank_buckets(model, layout)
    # Updated on this rank.
    parameters = sum(elements / (ranks if layout.zero else 1) for elements, ranks in buckets)
    if cluster.measured is not None:
        compute = cluster.measured(model, layout, length, parameters)
    else:
        compute = gpu_compute(model, layout, length, parameters, cluster)
    cp_forward, cp_backward = context_seconds(model, layout, cluster, length)
    ep_forward, ep_backward = expert_seconds(model, layout, cluster, length)
    tp = _TensorParallel(model, layout, cluster, length, layout.tp)
    # The MLP has collectives over etp, which are all of tp unless experts are cut over fewer.
    etp = _TensorParallel(model, layout, cluster, length, layout.expert_tp)
    full_recompute = layout.recompute == "full"

    # Two all-reduces, or two pairs of all-gather and reduce-scatter.
    layer_sums = 2 * tp.gather + 2 * etp.gather
    recomputed_sums, cp_again = (layer_sums, cp_forward) if full_recompute else (0.0, 0.0)
    ep_again = ep_forward if full_recompute else 0.0
    attention, mlp = (compute.backward_weight * share for share in model.column_shares)
    waiting, slowdown = _backward_sums(cluster, layout, [(tp, attention), (etp, mlp)], [tp, etp])
    launches = cluster.assumptions.host_layer * (4 / 3 if full_recompute else 1)
    layer = UnitTime(
        forward=compute.forward + layer_sums + cp_forward + ep_forward,
        backward_input=compute.backward_input
        + compute.recompute
        + recomputed_sums
        + waiting
        + slowdown
        + (cp_again + cp_backward)
        + (ep_again + ep_backward),
        backward_weight=compute.backward_weight,
        tp=layer_sums + recomputed_sums + waiting + slowdown,
        cp=cp_forward + cp_again + cp_backward,
        ep=ep_forward + ep_again + ep_backward,
        **_over_dp(
            cluster,
            layout,
            layer_state(model, layout),
            replicated_parameters(model),
            router=model.router,
            keys=2 * model.hidden * kv_columns(model, layout.tp),
            copies=kv_copies(model.groups, layout.tp),
            experts=layer_experts(model, layout) if layout.expert_sums_apart else 0,
        ),
    ).launched_in(launches)

    # Parameters of the two ends. Without a pipeline their gradients travel together, with the
    # embedding's.
    table = embedding_rows(model, layout.tp)
    positions = model.positions * model.hidden
    first = table + positions
    last = model.norm_parameters + (0 if model.tied else table)
    if layout.pp == 1:
        embedding_dp = _over_dp(cluster, layout, first + last, positions + model.norm_parameters)
        head_dp = {"gather": embedding_dp["gather"]}
    else:
        embedding_dp = _over_dp(cluster, layout, first, positions)
        head_dp = _over_dp(cluster, layout, last, model.norm_parameters)
    embedding = UnitTime(
        forward=compute.embedding_forward + tp.leave,
        backward_input=tp.enter,
        backward_weight=compute.embedding_backward,
        tp=tp.enter + tp.leave,
        **embedding_dp,
    )
    columns = [(tp, compute.head_backward_weight)]
    waiting, slowdown = _backward_sums(cluster, layout, columns, [])
    head = UnitTime(
        forward=compute.head_forward + tp.enter + tp.loss,
        backward_input=compute.head_backward_input + waiting + slowdown,
        backward_weight=compute.head_backward_weight,
        tp=tp.enter + tp.loss + waiting + slowdown,
        **head_dp,
    ).launched_in(cluster.assumptions.host_ends)
    return UnitTimes(embedding=embedding, layer=layer, head=head, update=compute.update)


def context_seconds(
    model: ModelShape, layout: Layout, cluster: Cluster, length: int
) -> tuple[float, float]:
    """Return the seconds that a layer's attention waits for messages over cp, in forward and in
    backward.

    They include what hidden messages cost the computation (Assumptions.contention).

    ring         Each step's message hides behind its square's products. In backward gradients
                 follow the keys, and nothing hides the hop that brings them home.
    all-gather   An all-gather each way, and in backward a reduce-scatter of the same bytes. Nothing
                 hides them.
    ulysses      An all-to-all before attention and one after it, each way. Nothing hides them.
    """
    t = layout.tp
    c = layout.cp
    h_kv = kv_columns(model, layout.tp)
    if c == 1:
        return 0.0, 0.0
    nbytes = layout.tokens(length) * layout.precision.parameters  # one column's bytes
    if layout.context_parallel == "ulysses":
        h = model.hidden // t
        both = sum(
            all_to_all_seconds(cluster, nbytes * columns, t, c) for columns in (h + 2 * h_kv, h)
        )
        return both, both
    if layout.context_parallel == "all-gather":
        gather = gather_seconds(cluster, c * nbytes * 2 * h_kv, t, c)
        return gather, 2 * gather
    message = cluster.link(t, c).seconds(nbytes * 2 * h_kv)
    rate = cluster.attention_rate * t
    squares = attention_squares(layout, cluster.framework)
    forward = [core_flops(model, layout, length, square) / rate for square in squares]
    backward = [2.5 * seconds for seconds in forward]  # five products, as scores are computed again
    one_link = not cluster.framework.parallel_messages
    waiting = []
    for steps, messages in ((forward, c - 1), (backward, 2 * c - 1)):
        waits = ring_seconds(steps, message, messages >= c, one_link) - sum(steps)
        waiting.append(
            waits + cluster.assumptions.contention * max(0.0, messages * message - waits)
        )
    return waiting[0], waiting[1]


def expert_seconds(
    model: ModelShape, layout: Layout, cluster: Cluster, length: int
) -> tuple[float, float]:
    """Return the seconds that a layer's experts wait for messages over ep, in forward and in
    backward.

    An all-to-all of the rows to their experts and one of the results back, each way, and ahead of
    forward's one of counts. Nothing hides them. The ranks of ep are neighbours among those that
    route different tokens.
    """
    in_steps = cluster.framework.pairwise
    rows, counts = (
        all_to_all_seconds(cluster, nbytes, layout.expert_tp, layout.ep, in_steps)
        for nbytes in expert_bytes(model, layout, length)
    )
    return counts + 2 * rows, 2 * rows


def ring_seconds(
    steps: Sequence[float], message: float, gradients: bool, one_link: bool = True
) -> float:
    """Return the seconds of a ring's `steps` of computation, all but the last next to a message of
    keys and values.

    With `gradients` each step then adds to the sum that its left neighbour has sent one step
    before, and sends it on. Messages follow one another on `one_link`, or travel at the same time.
    All ranks do the same at the same time.
    """
    now = link = gradient = 0.0
    for i, computing in enumerate(steps):
        keys = now
        if i < len(steps) - 1:
            keys = link = max(now, link if one_link else 0.0) + message
        now += computing
        if gradients:
            now = max(now, gradient)
            gradient = link = max(now, link if one_link else 0.0) + message
        now = max(now, keys)
    return max(now, gradient)


class _TensorParallel:
    """The collectives over `ranks` neighbours of tp in one microbatch, in seconds.

    They carry the tokens of these ranks: all tokens, except for experts where etp is less than tp.

    gather   an all-gather or a reduce-scatter of the activations, half of an all-reduce
    enter    before a column-parallel layer: the all-gather of sequence parallelism, or none
    leave    after a row-parallel layer: an all-reduce, or sequence parallelism's reduce-scatter
    loss     the all-reduces of the loss: the maximum of each token's logits, then the sum and the
             target's logit, in 32 bits at least
    """

    def __init__(
        self, model: ModelShape, layout: Layout, cluster: Cluster, length: int, ranks: int
    ) -> None:
        tokens = layout.tokens(length) * ranks // layout.tp
        width = layout.precision.parameters
        self.gather = gather_seconds(cluster, tokens * model.hidden * width, 1, ranks)
        self.enter = self.gather if layout.sequence_parallel else 0.0
        self.leave = self.gather if layout.sequence_parallel else 2 * self.gather
        maxima = gather_seconds(cluster, tokens * max(4, width), 1, ranks)
        sums = gather_seconds(cluster, 2 * tokens * max(4, width), 1, ranks)
        self.loss = 2 * maxima + 2 * sums


def _backward_sums(
    cluster: Cluster,
    layout: Layout,
    columns: Sequence[tuple[_TensorParallel, float]],
    rows: Sequence[_TensorParallel],
) -> tuple[float, float]:
    """Return (seconds that backward waits, seconds that hidden collectives cost the computation).

    `columns` has each column-parallel layer's collectives, and the seconds of its weight gradient.
    The sum of its input gradient hides behind that, unless the schedule splits I from W or the
    framework waits (Framework.hidden_sums). `rows` has each row-parallel layer's collectives. It
    gathers its gradient under sequence parallelism, and nothing hides that.
    """
    hidden = 0.0
    if cluster.framework.hidden_sums and not layout.splits_backward:
        hidden = sum(min(over.leave, seconds) for over, seconds in columns)
    waiting = sum(over.leave for over, _ in columns) - hidden + sum(over.enter for over in rows)
    return waiting, cluster.assumptions.contention * hidden


def _over_dp(
    cluster: Cluster, layout: Layout, parameters: int, replicated: int,
    router: int = 0, keys: int = 0, copies: int = 1, experts: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Return gather, refresh, reduce, partial and across (UnitTime) of a unit with these
    `parameters` on a rank.

    `replicated` of them are on every tp rank, among them a `router`, whose gradient is summed over
    tp even without sequence parallelism. If several ranks have `copies` of the same heads, the
    gradients of those `keys` and values are summed over these ranks. `experts` of them travel in a
    bucket of their own, over the ranks that hold the same parts.
    """
    precision = layout.precision
    t = layout.tp
    s = layout.shards
    q = layout.zero_replicas
    buckets = [(parameters - experts, t, s)]
    if experts:
        buckets.append((experts, layout.ranks_per_expert_copy, layout.expert_shards))

    def over_shards(collective: Callable[..., float], width: int) -> float:
        seconds = [
            collective(cluster, elements * width, stride, ranks)
            for elements, stride, ranks in buckets
        ]
        return max(seconds) if cluster.framework.parallel_messages else sum(seconds)

    reduce = over_shards(gather_seconds, precision.gradients)
    between_replicas = gather_seconds(cluster, parameters * precision.gradients / s, t * s, q)
    partial = 0.0
    if layout.sequence_parallel or router:
        summed = replicated if layout.sequence_parallel else router
        partial = 2 * gather_seconds(cluster, summed * precision.gradients, 1, t)
    partial += 2 * gather_seconds(cluster, keys * precision.gradients, 1, copies)
    gather = over_shards(fetch_seconds, precision.parameters)
    return {
        "gather": gather if layout.zero == 3 else 0.0,
        "refresh": gather if layout.zero in (1, 2) else 0.0,
        "reduce": reduce if layout.zero else cluster.assumptions.all_reduce * reduce,
        "partial": partial,
        "across": cluster.assumptions.all_reduce * between_replicas,
    }
