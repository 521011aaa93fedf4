"""What each axis sends: bytes of a rank in a step, and the time of a collective over the ranks of an axis."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.memory import rank_parameters
from minipar.plan.model import ModelShape
from minipar.plan.pipeline import stages_per_rank

BYTES = 2  # of an activation; parameters and gradients travel in their own width (Layout.precision)


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends in a step, by mesh axis. Fractions, so that nothing is rounded."""

    tp: Fraction
    pp: Fraction
    dp: Fraction


def volume(model: ModelShape, layout: Layout, length: int) -> Volume:
    """Of a rank in the middle of the pipeline; b samples of s tokens in a microbatch, m of them, l layers on the rank.

    tp   8 b s h (t-1)/t elements for each layer and microbatch, 12 with full recompute (Narayanan et al. 2021, section
         3.2; the same with sequence parallelism, Korthikanti et al. 2022, section 4.2.2). NB: with it Megatron gathers
         the inputs of column layers once more in backward, behind the weights' gradient; that is not counted.
    pp   2 b s h / t for each microbatch and stage of the rank: forward and back, each tp rank its part (Narayanan et
         al., section 4.1); and V h / t for the tied embedding's gradient, on the first and the last rank only: not
    counted. dp   with psi parameters on the rank, of elements (N-1)/N times: 2 psi at stages 0 and 1, (m + 1) psi at
         stage 2, 3 m psi at stage 3 (Rajbhandari et al. 2020, section 7, for m = 1): from stage 2 on no rank keeps
         whole gradients, so each microbatch's are reduced.
    """
    t, n, m = layout.tp, layout.dp, layout.microbatches
    hidden = layout.microbatch * length * model.hidden * BYTES
    sums = 12 if layout.recompute == "full" else 8
    tp = Fraction(sums * hidden * (t - 1), t) * m * layout.layers_per_rank(model)
    stages = stages_per_rank(layout.schedule, layout.virtual_stages)
    pp = Fraction(2 * hidden, t) * m * stages if layout.pp > 1 else Fraction(0)
    gathers, reductions = {0: (0, 2), 1: (1, 1), 2: (1, m), 3: (2 * m, m)}[layout.zero]
    width = gathers * layout.precision.parameters + reductions * layout.precision.gradients
    return Volume(tp, pp, Fraction(width * rank_parameters(model, layout) * (n - 1), n))


def gather_seconds(cluster: Cluster, nbytes: float, stride: int, size: int, pieces: int = 1) -> float:
    """`pieces` all-gathers, or reduce-scatters, of `nbytes` together, over the ranks 0, stride, ... (size of them).

    A ring, which is what NCCL has for these two: a piece takes size - 1 messages, some inside a host and some between.
    Bytes: n (k-1)/k inside, for k members in a host; between H hosts n/k (H-1)/H for each, over the members' own
    network cards. minipar's own rings do not go host by host: then all n of them (Cluster.hierarchical).
    """
    if size == 1:
        return 0.0
    k = cluster.members_per_host(stride, size)
    hosts = -(-size // k)
    inside, between = cluster.inside, cluster.between
    latency = pieces * ((size - hosts) * inside.alpha + (hosts - 1) * between.alpha)
    if hosts == 1:
        return latency + nbytes * (k - 1) / k * inside.beta
    if not cluster.hierarchical:
        return latency + nbytes * (size - 1) / size * between.beta
    return latency + nbytes * (k - 1) / k * inside.beta + nbytes / k * (hosts - 1) / hosts * between.beta
