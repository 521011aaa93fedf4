"""Seconds of one microbatch on one rank, part by part: the embedding, a layer, the output head.

A part's F, I and W are its products, its elementwise work and the tensor-parallel collectives in it; beside them stand
the collectives over dp that its parameters need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from minipar.plan.communication import fetch_seconds, gather_seconds
from minipar.plan.compute import Compute, gpu_compute
from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.memory import layer_state, rank_parameters
from minipar.plan.model import ModelShape


@dataclass(frozen=True)
class Part:
    """Seconds. F, I (with what is recomputed) and W, the collectives over tp in them that are waited for included.

    tp        what of these is communication: waited for, or what it takes from the computation it hides behind
    gather    an all-gather over dp of its parameters
    reduce    its gradient's way over dp: an all-reduce, from ZeRO stage 1 on a reduce-scatter
    partial   what is summed over tp first: gradients of which each rank has only its tokens' share
    """

    forward: float
    backward_input: float
    backward_weight: float
    tp: float
    gather: float
    reduce: float
    partial: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Parts:
    """A model's parts on a rank; every layer is the same."""

    embedding: Part
    layer: Part
    head: Part


@lru_cache(maxsize=4096)
def parts(model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> Parts:
    """The parts of one microbatch. `layout`: `per_microbatch(layout)`, so that what is counted once is looked up.

    Forward's sums over tp wait for row layers, and nothing hides them: two all-reduces a layer, or with sequence
    parallelism two pairs of all-gather and reduce-scatter, of the same bytes. Backward's are of column layers' input
    gradients and hide behind the same layers' weight gradients, unless the schedule splits I from W; with sequence
    parallelism half of them are all-gathers of row layers' gradients, which nothing hides.
    """
    t, contention = layout.tp, cluster.assumptions.contention
    tokens = layout.microbatch * length
    gather = gather_seconds(cluster, tokens * model.hidden * layout.precision.parameters, 1, t)  # half an all-reduce
    took = compute(model, layout, cluster, length)

    def back(columns: list[float], rows: int) -> tuple[float, float]:
        """Backward's sums, of column layers whose weight gradients take these seconds, and of row layers: what is
        waited for, and what hidden ones cost."""
        sequence = layout.sequence_parallel
        each = gather if sequence else 2 * gather
        hidden = [0.0 if layout.splits_backward else min(each, seconds) for seconds in columns]
        return len(columns) * each - sum(hidden) + sequence * rows * gather, contention * sum(hidden)

    sums = 4 * gather
    full = layout.recompute == "full"
    waited, taken = back([took.backward_weight * share for share in model.column_shares], rows=2)
    layer = Part(
        took.forward + sums,
        took.backward_input + took.again + full * sums + waited + taken,
        took.backward_weight,
        (1 + full) * sums + waited + taken,
        *_over_dp(cluster, layout, layer_state(model, t), 2 * model.norm_parameters + 2 * model.hidden * model.biases),
    )

    # The ends. Without a pipeline their parameters travel together.
    table = -(-model.vocab_size * model.hidden // t)
    positions = model.positions * model.hidden
    last = model.norm_parameters + (0 if model.tied else table)
    together = layout.pp == 1
    sequence = layout.sequence_parallel
    enter, leave = (gather if sequence else 0.0), (gather if sequence else 2 * gather)
    partial = positions + together * model.norm_parameters
    embedding = Part(
        took.embedding_forward + leave,
        enter,
        took.embedding_backward,
        enter + leave,
        *_over_dp(cluster, layout, table + positions + (last if together else 0), partial),
    )
    wide = max(4, layout.precision.parameters)
    loss = sum(2 * gather_seconds(cluster, n * tokens * wide, 1, t) for n in (1, 2))  # maxima; sums, targets' logits
    waited, taken = back([took.head_backward_weight], rows=0)
    shared = _over_dp(cluster, layout, last + (table + positions if together else 0), model.norm_parameters)
    head = Part(
        took.head_forward + enter + loss,
        took.head_backward_input + waited + taken,
        took.head_backward_weight,
        enter + loss + waited + taken,
        shared[0],
        0.0 if together else shared[1],
        0.0 if together else shared[2],
    )
    return Parts(embedding, layer, head)


@lru_cache(maxsize=4096)
def compute(model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> Compute:
    """As measured on this machine, or from what is known of its GPU."""
    parameters = rank_parameters(model, layout) / (layout.dp if layout.zero else 1)
    if cluster.measured is not None:
        return cluster.measured(model, layout, length, parameters)
    return gpu_compute(model, layout, length, parameters, cluster.gpu, cluster.assumptions)


def per_microbatch(layout: Layout) -> Layout:
    """What layouts have in common whose parts take the same time."""
    schedule = "zb-h1" if layout.splits_backward else "1f1b"
    return replace(layout, virtual_stages=1, schedule=schedule)


def _over_dp(cluster: Cluster, layout: Layout, parameters: int, replicated: int) -> tuple[float, float, float]:
    """(gather, reduce, partial) of a part with so many parameters on a rank, some of them on every tp rank."""
    precision, stride = layout.precision, layout.tp
    gather = fetch_seconds(cluster, parameters * precision.parameters, stride, layout.dp)
    reduce = gather_seconds(cluster, parameters * precision.gradients, stride, layout.dp)
    partial = 0.0
    if layout.sequence_parallel:
        partial = 2 * gather_seconds(cluster, replicated * precision.gradients, 1, layout.tp)
    return gather, reduce * (1 if layout.zero else 2), partial
