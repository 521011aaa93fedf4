"""Time of one step: computation, communication by axis, bubble.

A pipeline rank's F, I and W are its layers' products and elementwise work, and the tensor-parallel collectives between
them; the schedule's simulator puts them together. What data parallelism sends hides behind the last backward as far as
it can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2

from minipar.parallel.pipeline import Action, Durations, make, simulate
from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.memory import layer_activations, rank_parameters
from minipar.plan.model import ModelShape

BYTES = 2  # of an activation, a parameter and a gradient on the wire


@dataclass(frozen=True)
class StepTime:
    """Seconds. `compute`: products and elementwise work of one rank; `tp`, `pp`, `dp`: communication that nothing hides;
    `bubble`: waiting in the pipeline; `optimizer`: the update.
    """

    compute: float
    tp: float
    pp: float
    dp: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.pp + self.dp + self.bubble + self.optimizer


def gather_seconds(cluster: Cluster, nbytes: float, stride: int, size: int) -> float:
    """An all-gather, or a reduce-scatter, of `nbytes` in all over the ranks 0, stride, 2 stride, ... (size of them).

    Inside a host a ring: (k-1) alpha + n (k-1)/k beta; between N hosts n/k each, in a tree's lg N messages.
    """
    if size == 1:
        return 0.0
    k = cluster.members_per_host(stride, size)
    hosts = ceil(size / k)
    inside = (k - 1) * cluster.inside.alpha + nbytes * (k - 1) / k * cluster.inside.beta
    if hosts == 1:
        return inside
    return inside + ceil(log2(hosts)) * cluster.between.alpha + nbytes / k * (hosts - 1) / hosts * cluster.between.beta


@dataclass(frozen=True)
class Costs:
    """One microbatch on one layer, and what the head adds: seconds of F, I and W without and with communication."""

    forward: float
    backward_input: float
    backward_weight: float
    tp: float  # of these three, what is communication
    head: float  # forward of the output head

    @property
    def layer(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


def layer_costs(model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> Costs:
    """A layer's F, I (with what is recomputed) and W on one rank, seconds."""
    a, gpu = cluster.assumptions, cluster.gpu

    def products(flops: float) -> float:
        one = flops / layout.tp / 4  # a layer is about four products
        return flops / layout.tp / (gpu.peak * a.products) * (1 + a.half_work / one)

    flops = layout.microbatch * model.layer_flops(length)
    core = layout.microbatch * model.attention_core_flops(length)
    kept = layer_activations(model, replace(layout, recompute="none"), length)
    copy = kept / (gpu.memory_bandwidth * a.copies)
    # Two all-reduces forward and two backward, or as many pairs of all-gather and reduce-scatter: 2 n (t-1)/t each.
    n = length * layout.microbatch * model.hidden * BYTES
    sums = 2 * 2 * gather_seconds(cluster, n, 1, layout.tp)
    forward = products(flops) + a.forward_traffic * copy
    again = {"none": 0.0, "full": forward + sums, "selective": products(core)}[layout.recompute]
    backward_weight = products(flops - core)
    backward_input = products(flops + core) + a.backward_traffic * copy + again
    tp = 2 * sums + (sums if layout.recompute == "full" else 0)
    head = products(layout.microbatch * model.head_flops(length))
    return Costs(forward + sums, backward_input + sums, backward_weight, tp, head)


def step_time(model: ModelShape, layout: Layout, cluster: Cluster, length: int, exact: bool = True) -> StepTime:
    """One optimizer step. With `exact` the pipeline's time is the simulator's, else the closed form's (equal stages but
    for the head; a search looks at thousands).
    """
    costs = layer_costs(model, layout, cluster, length)
    m, layers = layout.microbatches, layout.layers_per_rank(model)
    busy = m * (layers * costs.layer + 3 * costs.head * (layout.pp == 1))
    hop = 0.0
    if layout.pp > 1:
        link = cluster.link(layout.tp * layout.dp, layout.pp)
        nbytes = length * layout.microbatch * model.hidden * BYTES / layout.tp  # scattered over tp on the way, or slices
        hop = link.alpha + nbytes * link.beta
    makespan = pipeline_seconds(layout, costs, layers, hop) if exact else closed_form(layout, costs, layers, hop)
    compute = busy - m * layers * costs.tp
    dp = exposed_dp(model, layout, cluster, makespan)
    psi = rank_parameters(model, layout)
    touched = psi / (layout.dp if layout.zero else 1) * 30  # AdamW reads 16 and writes 14 bytes for each parameter
    optimizer = touched / (cluster.gpu.memory_bandwidth * cluster.assumptions.copies)
    return StepTime(compute, m * layers * costs.tp, 0.0, dp, max(0.0, makespan - busy), optimizer)


def exposed_dp(model: ModelShape, layout: Layout, cluster: Cluster, makespan: float) -> float:
    """Gradients and parameters over dp, less what the last backward hides. ZeRO 3 gathers for each microbatch too."""
    if layout.dp == 1:
        return 0.0
    nbytes = rank_parameters(model, layout) * BYTES
    one = gather_seconds(cluster, nbytes, layout.tp, layout.dp)
    backward = makespan / layout.microbatches * 2 / 3 / (1 if layout.pp == 1 else 2)
    hidden = cluster.assumptions.overlap * backward
    exposed = max(0.0, one - hidden) + (one if layout.zero < 3 else 0.0)  # reduce-scatter; then the gather, in the open
    if layout.zero == 0:
        exposed = max(0.0, 2 * one - hidden)  # an all-reduce is both, and both can hide
    if layout.zero == 3:  # twice for each microbatch, the next unit's behind the present one's computation
        exposed += max(0.0, 2 * one * layout.microbatches - cluster.assumptions.overlap * makespan)
    return exposed


def closed_form(layout: Layout, costs: Costs, layers: int, hop: float) -> float:
    """Makespan of p ranks: the slowest one's m microbatches, and the others' one on the way in and out."""
    p, m, v = layout.pp, layout.microbatches, layout.virtual_stages
    one = layers * costs.layer
    slowest = one + 3 * costs.head
    if p == 1:
        return m * slowest
    f, i, w = layers * costs.forward, layers * costs.backward_input, layers * costs.backward_weight
    ramp = {
        "naive": (p - 1) * m * (one + 2 * hop),
        "interleaved-1f1b": (p - 1) / v * one + 2 * (p - 1) * hop,
        "zb-h1": (p - 1) * max(0.0, f + i - w) + 2 * (p - 1) * hop,
        "zb-h2": (p - 1) * max(0.0, f + i - 2 * w) + 2 * (p - 1) * hop,
        "zbv": (p - 1) * max(0.0, (f + i - 2 * w) / 2) + 2 * (p - 1) * hop,
    }.get(layout.schedule, (p - 1) * (one + 2 * hop))
    return m * slowest + ramp


def pipeline_seconds(layout: Layout, costs: Costs, layers: int, hop: float) -> float:
    """The simulator's makespan. Beyond a few microbatches per rank each further group takes the same time, so long
    steps are simulated at two lengths and extended.
    """
    p, m = layout.pp, layout.microbatches
    if p == 1:
        return m * (layers * costs.layer + 3 * costs.head)
    key = (costs.forward * layers, costs.backward_input * layers, costs.backward_weight * layers, costs.head, hop)
    short = 3 * p + m % p
    if m <= short + p:
        return _makespan(layout.schedule, p, m, layout.virtual_stages, *key)
    ends = [_makespan(layout.schedule, p, n, layout.virtual_stages, *key) for n in (short, short + p)]
    return ends[0] + (ends[1] - ends[0]) * (m - short) / p


@dataclass(frozen=True)
class _WithHead(Durations):
    """Equal stages, the last of which has the head too."""

    last: int = 0
    head: float = 0.0

    def of(self, action: Action) -> float:
        extra = {"F": 1, "I": 1, "W": 1, "B": 2}[action.kind] * self.head if action.stage == self.last else 0.0
        return float(super().of(action)) + extra


@lru_cache(maxsize=4096)
def _makespan(
    schedule: str, p: int, m: int, v: int, forward: float, backward: float, weight: float, head: float, hop: float
) -> float:
    stages = 2 if schedule == "zbv" else v
    made = make(schedule, p, m, v if schedule == "interleaved-1f1b" else None)
    durations = _WithHead(forward / stages, backward / stages, weight / stages, hop, last=p * stages - 1, head=head)
    return float(simulate(made, durations).makespan)
