"""What each axis sends: bytes of a rank in a step, and the time of a collective over the ranks of an axis."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.memory import rank_parameters
from minipar.plan.model import ModelShape
from minipar.plan.pipeline import stages_per_rank
from minipar.plan.program import MEGATRON, Program


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends in a step, by mesh axis. Fractions, so that nothing is rounded."""

    tp: Fraction
    pp: Fraction
    dp: Fraction


def volume(model: ModelShape, layout: Layout, length: int, program: Program = MEGATRON) -> Volume:
    """Of a rank in the middle of the pipeline (over dp of the first, which has most parameters); b samples of s tokens
    in a microbatch, m of them, l layers on the rank.

    tp   8 b s h (t-1)/t elements for each layer and microbatch, 12 with full recompute (Narayanan et al. 2021, section
         3.2; the same with sequence parallelism, Korthikanti et al. 2022, section 4.2.2). NB: with it Megatron gathers
         the inputs of column layers once more in backward, behind the weights' gradient; that is not counted.
    pp   2 b s h / t for each microbatch and stage of the rank: forward and back, each tp rank its part (Narayanan et
         al., section 4.1); and V h / t for the tied embedding's gradient, on the first and the last rank only: not
         counted.
    dp   with psi parameters on the rank, of elements (N-1)/N times: 2 psi at stages 0 and 1, 2 psi or (m + 1) psi at
         stage 2, (2 m + 1) psi or 3 m psi at stage 3 (Rajbhandari et al. 2020, section 7, for m = 1), the second where
         gradients are reduced after every microbatch.
    """
    t, n, m = layout.tp, layout.dp, layout.microbatches
    hidden = layout.microbatch * length * model.hidden * layout.precision.parameters
    sums = 12 if layout.recompute == "full" else 8
    tp = Fraction(sums * hidden * (t - 1), t) * m * layout.layers_per_rank(model)
    stages = stages_per_rank(layout.schedule, layout.virtual_stages)
    parts = t if program.scattered_hops or layout.sequence_parallel else 1
    pp = Fraction(2 * hidden, parts) * m * stages if layout.pp > 1 else Fraction(0)
    often = m if program.every_microbatch else 1
    gathers, reductions = {0: (0, 2), 1: (1, 1), 2: (1, often), 3: (2 * m, often)}[layout.zero]
    width = gathers * layout.precision.parameters + reductions * layout.precision.gradients
    return Volume(tp, pp, Fraction(width * rank_parameters(model, layout) * (n - 1), n))


def gather_seconds(cluster: Cluster, nbytes: float, stride: int, size: int) -> float:
    """An all-gather, or a reduce-scatter, of `nbytes` in all over the ranks 0, stride, ... (size of them): a ring of
    size - 1 messages, one after the other, of n / size bytes. Every step waits for the slowest link.

    Between hosts with k members each a program may have k rings at once, through k cards (Program.ring_per_card): then
    a k-th of the bytes goes through each, or all of them over the links inside, whichever takes longer.
    """
    if size == 1:
        return 0.0
    k = cluster.members_per_host(stride, size)
    hosts = -(-size // k)
    inside, between = cluster.inside, cluster.between
    if hosts == 1 or not cluster.program.ring_per_card:
        link = cluster.link(stride, size)
        return (size - 1) * (link.alpha + nbytes / size * link.beta)
    latency = (size - hosts) * inside.alpha + (hosts - 1) * between.alpha
    return latency + nbytes * (size - 1) / size * max(inside.beta * (k > 1), between.beta / k)


def fetch_seconds(cluster: Cluster, nbytes: float, stride: int, size: int) -> float:
    """An all-gather of parameters: a ring, or each rank's part from that rank to every other, one message after the
    other (Program.pairwise).
    """
    if not cluster.program.pairwise:
        return gather_seconds(cluster, nbytes, stride, size)
    near = cluster.members_per_host(stride, size) - 1
    inside, between = cluster.inside, cluster.between
    part = nbytes / size
    return near * (inside.alpha + part * inside.beta) + (size - 1 - near) * (between.alpha + part * between.beta)


def number_seconds(cluster: Cluster, stride: int, size: int) -> float:
    """An all-reduce of one number, a loss or a norm: there and back, pairwise or in a tree."""
    if cluster.program.pairwise:
        return 2 * fetch_seconds(cluster, 0, stride, size)
    return 2 * (size - 1).bit_length() * cluster.link(stride, size).alpha
