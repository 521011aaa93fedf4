"""Bytes of one rank in a layout: what it holds (memory) and what it sends in a step (traffic).

Model state: Rajbhandari et al. 2020 (parallel/predicted_memory.py). Activations: Korthikanti et al. 2022
(arXiv 2205.05198), equations 1 to 6, and section 4.2.3 for the microbatches in flight; 16-bit
activations, one-byte dropout masks.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from minipar.more.context.context_traffic import cp_elements
from minipar.parallel.predicted_memory import model_state
from minipar.plan.layout import MEGATRON, Activations, Framework, Layout
from minipar.plan.model import ModelShape

# ---- parameters of a rank ------------------------------------------------------------------------


def embedding_rows(model: ModelShape, tp: int) -> int:
    """Return the elements of a tp rank's part of the token embedding: ceil(V h / t)."""
    return -(-model.vocab_size * model.hidden // tp)


def replicated_parameters(model: ModelShape) -> int:
    """Return the parameters of a layer that every tp rank has: norms, biases of row-parallel
    layers, the router.
    """
    biases = 2 * model.hidden if model.biases else 0
    return 2 * model.norm_parameters + biases + model.router


def layer_experts(model: ModelShape, layout: Layout) -> int:
    """Return the parameters of one layer's experts on a rank: 1/ep of the experts, and 1/etp of
    each.
    """
    return (model.experts or 0) // layout.ep * -(-model.expert_parameters // layout.expert_tp)


def layer_state(model: ModelShape, layout: Layout) -> int:
    """Return the parameters of one layer on a rank: matrices and biases of column-parallel layers
    are divided by tp, those of experts by etp.

    With fewer heads of keys than ranks, each rank has a copy of one.
    """
    whole = replicated_parameters(model)
    experts = (model.experts or 0) * model.expert_parameters
    dense = model.with_copies(layout.tp).layer_parameters - experts - whole
    return -(-dense // layout.tp) + whole + layer_experts(model, layout)


def rank_parameters(model: ModelShape, layout: Layout) -> int:
    """Return the parameters of the first pipeline rank, which has most; without a pipeline of every
    rank.

    It holds the embeddings and its layers; without a pipeline also the last norm and an output head
    that is not tied.
    """
    table = embedding_rows(model, layout.tp)
    layer = layer_state(model, layout)
    parameters = table + model.positions * model.hidden
    parameters += layout.layers_per_rank(model) * layer
    if layout.pp == 1:
        parameters += model.norm_parameters
        if not model.tied:
            parameters += table
    return parameters


def rank_buckets(model: ModelShape, layout: Layout) -> list[tuple[int, int]]:
    """Return (parameters of the rank, ranks over which ZeRO shards them): of experts if their
    gradients are summed over other ranks, and of all else.
    """
    psi = rank_parameters(model, layout)
    experts = 0
    if layout.expert_sums_apart:
        experts = layout.layers_per_rank(model) * layer_experts(model, layout)
    return [(psi - experts, layout.shards), (experts, layout.expert_shards)]


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # for a while only: a gathered unit of ZeRO stage 3, a recomputed layer, logits

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def layer_activations(
    model: ModelShape, layout: Layout, length: int, kept: Activations = MEGATRON.kept
) -> float:
    """Return the bytes that one layer keeps of one microbatch for backward.

    GPT-2 with s tokens, b samples, a heads: s b h (10 + 24/t + 5as/(ht)) under tensor parallelism
    over t ranks; with sequence parallelism s b h (34 + 5as/h) / t. "selective" recomputation and
    flash attention drop the 5as/h, and "full" recomputation keeps the input alone, 2 s b h. Context
    parallelism divides all of it by c. Of a Mixtral the MLP's part counts for each of a token's k
    experts: with routing that is uniform a rank's experts get k rows for each of its tokens,
    whatever ep. A rank routes the tokens of etp ranks: it keeps etp/t of the rows, of the router's
    values and of the MLP's gathered input.
    """
    h = model.hidden
    t = layout.tp
    share = layout.expert_tp / t
    slices = layout.sequence_slices
    tokens = layout.tokens(length) * layout.precision.parameters
    if layout.recompute == "full":
        return tokens * h / slices
    stored = layout.recompute == "none" and layout.stores_scores
    core = kept.scores * model.heads * length if stored else 0
    inner = kept.gated if model.gated else kept.inner
    split = kept.qkv * model.with_copies(t).qkv + kept.context * h + inner * model.active_inner
    whole = kept.gathered / 2 * h * (1 + share)  # attention's input, and the MLP's
    if model.experts is not None:
        whole += share * (kept.routed * model.top_k * h + kept.router * model.experts)
    return tokens * ((kept.sliced * h + kept.rows) / slices + whole + (split + core) / t)


def in_flight(layout: Layout) -> Fraction | int:
    """Return the microbatches whose activations the first rank keeps, each counted as all of the
    rank's layers.

    GPipe: m. 1F1B: min(m, p). Interleaved: min(m, p (1 + (p - 1)/(p v))), Narayanan et al. 2021.
    ZB-H2: 2p - 1.
    """
    p = layout.pp
    m = layout.microbatches
    v = layout.virtual_stages
    match layout.schedule:
        case "gpipe":
            return m
        case "naive":
            return 1
        case "interleaved-1f1b":
            return min(Fraction(m), p * (1 + Fraction(p - 1, p * v)))
        case "zb-h2":
            return min(m, 2 * p - 1)
        case _:  # 1f1b, zb-h1, zbv
            return min(m, p)


def in_flight_last(layout: Layout) -> Fraction | int:
    """Return the microbatches in flight on the last rank, next to its logits: 1, interleaved min(m,
    p - (p - 1)/v).
    """
    if layout.schedule != "interleaved-1f1b":
        return 1
    earlier = Fraction(layout.pp - 1, layout.virtual_stages)
    return min(Fraction(layout.microbatches), layout.pp - earlier)


def memory(
    model: ModelShape, layout: Layout, length: int, framework: Framework = MEGATRON
) -> Memory:
    """Return the peak memory of the rank that needs most.

    Where gradients are reduced after each microbatch (Framework.every_microbatch), no rank keeps
    whole gradients from ZeRO stage 2 on, as in DeepSpeed. Otherwise microbatches accumulate in
    whole gradients next to the rank's shard.
    """
    psi = rank_parameters(model, layout)
    own = sum(Fraction(elements, ranks) for elements, ranks in rank_buckets(model, layout))
    accumulating = layout.microbatches > 1 and not framework.every_microbatch
    state = model_state(psi, own, layout.zero, layout.precision, accumulating)
    copied = framework.gradient_copy * float(own if layout.zero >= 2 else psi)
    kept = framework.kept
    activations, peak = kept_activations(model, layout, length, kept)
    moment = moment_buffers(model, layout, length, kept)
    # One whole gradient is sent while the next one is computed; microbatches that accumulate keep all of them anyhow.
    if layout.zero >= 2 and not accumulating:
        moment += 2 * layout.precision.gradients * layer_state(model, layout)
    return Memory(
        parameters=float(state.parameters),
        gradients=float(state.gradients) + copied,
        optimizer=float(state.optimizer),
        activations=activations,
        buffers=framework.overhead + peak - activations + moment,
    )


def kept_activations(
    model: ModelShape, layout: Layout, length: int, kept: Activations
) -> tuple[float, float]:
    """Return (bytes of the first rank's activations, those of the fullest rank with its logits).

    Every stage keeps its input and its output; the first rank's first stage has no input. GPipe's
    other ranks hold as many microbatches as the first. The last rank has fewer in flight, and the
    logits.
    """
    tokens = layout.tokens(length) * layout.precision.parameters
    hidden = tokens * model.hidden / layout.sequence_slices
    logits = kept.head * hidden + kept.logits * tokens * model.vocab_size / layout.tp
    layers = layout.layers_per_rank(model) * layer_activations(model, layout, length, kept)
    flying = float(in_flight(layout))
    first = flying * layers
    if layout.pp == 1:
        return first, first + logits
    ends = 2 * layout.stages_per_rank
    if layout.schedule != "gpipe":
        ends -= 1
    first += kept.boundary * hidden * (flying * ends)
    last = float(in_flight_last(layout)) * layers + logits
    return first, max(first, last)


def moment_buffers(model: ModelShape, layout: Layout, length: int, kept: Activations) -> float:
    """Return the bytes that exist for a moment, but for the logits: a gathered unit, a recomputed
    layer, attention's.
    """
    precision = layout.precision
    layer = layer_state(model, layout)
    tokens = layout.tokens(length) * precision.parameters
    buffers = kept.moving * tokens * model.hidden / layout.sequence_slices
    buffers += kept.moving_whole * tokens * model.hidden
    if layout.recompute == "full":
        buffers += layer_activations(model, replace(layout, recompute="none"), length, kept)
    if layout.zero == 3:  # the parameters of the unit that computes, and of the next one
        buffers += 2 * precision.parameters * layer
    if layout.cp > 1:  # by then backward has freed the activations of the layer's MLP
        inner = kept.gated if model.gated else kept.inner
        freed = tokens * inner * model.active_inner / layout.tp
        attention = precision.parameters * context_buffer(model, layout, length)
        buffers += max(0.0, attention - freed)
    return buffers


def kv_copies(kv_heads: int, tp: int) -> int:
    """Return how many tp ranks of Megatron-LM hold each head of keys: one, unless there are more ranks than heads."""
    return max(1, tp // kv_heads)


def kv_columns(model: ModelShape, tp: int) -> int:
    """Return the columns of keys on a tp rank, as many as of values: h_kv/t, or one head's where
    ranks hold copies.
    """
    return model.rank_heads(tp)[1] * (model.hidden // model.heads)


def context_buffer(model: ModelShape, layout: Layout, length: int) -> int:
    """Return the elements that attention over cp > 1 ranks holds for a moment in backward, with u =
    b s/c tokens.

    Ring: 8 u h_kv, keys and values of this step and of the next, their gradients sent and arriving.
    All-gather: 4 c u h_kv, all keys and values and their gradients. Ulysses: 2 u (h + 2 h_kv), what
    is sent and what arrives.
    """
    u = layout.tokens(length)
    h_kv = kv_columns(model, layout.tp)
    if layout.context_parallel == "ulysses":
        return 2 * u * (model.hidden // layout.tp + 2 * h_kv)
    return (8 if layout.context_parallel == "ring" else 4 * layout.cp) * u * h_kv


# ---- traffic -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends in a step, by mesh axis. They are fractions, so that nothing is
    rounded.
    """

    tp: Fraction
    pp: Fraction
    dp: Fraction
    cp: Fraction
    ep: Fraction


def volume(
    model: ModelShape, layout: Layout, length: int, framework: Framework = MEGATRON
) -> Volume:
    """Return the bytes that a rank in the middle of the pipeline sends (over dp: the first, which
    has most parameters).

    With b samples of s tokens in a microbatch, m microbatches, l layers on the rank, psi parameters
    on the rank:

    tp   8 b s h (t-1)/t elements for each layer and microbatch, 12 with full recompute (Narayanan
         et al. 2021, section 3.2; the same with sequence parallelism, Korthikanti et al. 2022,
         section 4.2.2). NB: with sequence parallelism Megatron gathers the inputs of column layers
         once more in backward; that is not counted. With copies of heads also 2 h h_kv (c-1)/c
         gradients of keys, and of values, for each layer, summed over the c ranks that have the
         same. Where etp is less than t, half of a layer's 8 (or 12) is over etp ranks, with etp/t
         of the tokens.
    pp   2 b s h for each microbatch and stage of the rank, forward and back, divided by t where
         each tp rank sends its part (Narayanan et al., section 4.1). The tied embedding's gradient,
         V h / t on the first and the last rank, is not counted.
    dp   (d-1)/d times: 2 psi elements at ZeRO stages 0 and 1; 2 psi at stage 2 and (2 m + 1) psi at
         stage 3, or (m + 1) psi and 3 m psi where gradients are reduced after every microbatch
         (Rajbhandari et al. 2020, section 7, for m = 1). With q replicas of the shards d is s =
         d/q, and 2 psi/s (q-1)/q are summed between replicas at each reduction. d counts the ranks
         of dp x cp. For the experts it is edp = d t/(P etp), the ranks that hold the same parts.
    cp   the elements of more/context/context_traffic.py for each layer and microbatch, forward twice with full
         recompute. Context parallelism divides s by c in the lines above.
    ep   4 k b s h (P-1)/P elements for each layer and microbatch, if tokens are spread evenly: rows
         to their experts and results back, forward and backward, 6 with full recompute. Before each
         dispatch E (P-1)/P counts of 8 bytes. Each tp rank sends whole rows, of etp/t of the tokens.

    parallel/predicted_traffic.py has minipar's traffic to the byte; these are the papers' formulas.
    """
    t = layout.tp
    s = layout.shards
    q = layout.zero_replicas
    m = layout.microbatches
    precision = layout.precision
    layers = layout.layers_per_rank(model)
    # A layer's forward passes for each backward.
    forwards = 2 if layout.recompute == "full" else 1
    hidden = layout.tokens(length) * model.hidden * precision.parameters
    # Attention and the MLP each send as much: attention over tp, the MLP over etp.
    sums = 2 * (forwards + 1) * hidden
    etp = layout.expert_tp
    tp = (ring(sums, t) + ring(sums, etp) * etp / t) * m * layers
    copied = 2 * model.hidden * kv_columns(model, t) * precision.gradients
    tp += ring(2 * copied, kv_copies(model.groups, t)) * layers
    pp = Fraction(0)
    if layout.pp > 1:
        slices = t if framework.scattered_hops else layout.sequence_slices
        pp = Fraction(2 * hidden, slices) * m * layout.stages_per_rank
    each = m if framework.every_microbatch else 1
    gathers, reductions = {0: (0, 2), 1: (1, 1), 2: (1, each), 3: (2 * m, each)}[layout.zero]
    width = gathers * precision.parameters + reductions * precision.gradients
    dp = sum(ring(width * elements, d) for elements, d in rank_buckets(model, layout))
    across = 2 * reductions * precision.gradients * rank_parameters(model, layout)
    dp += ring(across, q) / s
    columns = model.hidden // t, kv_columns(model, t)
    moved, summed = cp_elements(layout.context_parallel, layout.cp, layout.tokens(length), *columns)
    cp = Fraction((moved * (forwards + 1) + summed) * precision.parameters) * m * layers
    rows, counts = expert_bytes(model, layout, length)
    ep = ring(2 * rows * (forwards + 1) + counts * forwards, layout.ep) * m * layers
    return Volume(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)


def ring(nbytes: int, ranks: int) -> Fraction:
    """Return what each rank of a ring sends in an all-gather or a reduce-scatter of so many bytes."""
    return Fraction(nbytes * (ranks - 1), ranks)


def expert_bytes(model: ModelShape, layout: Layout, length: int) -> tuple[int, int]:
    """Return the bytes of a microbatch's rows, k b s h etp/t elements, and of their counts, 8 for
    each expert, if ep > 1.
    """
    if layout.ep == 1 or model.experts is None:
        return 0, 0
    rows = model.top_k * layout.tokens(length) * model.hidden * layout.expert_tp // layout.tp
    return rows * layout.precision.parameters, 8 * model.experts
