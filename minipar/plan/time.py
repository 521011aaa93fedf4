"""Time of one step: computation, communication that nothing hides, bubble, update.

A pipeline rank's F, I and W are its layers' products and elementwise work, and the tensor-parallel collectives between
them; the schedule puts them together. What data parallelism sends hides behind computation as far as there is any, and
slows down what it hides behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from minipar.plan.communication import BYTES, gather_seconds
from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.memory import layer_activations, rank_parameters
from minipar.plan.model import ModelShape
from minipar.plan.pipeline import Stage, closed_form, simulated, stages_per_rank

UPDATE_BYTES = 30  # AdamW in mixed precision reads 16 bytes and writes 14 for each parameter


@dataclass(frozen=True)
class StepTime:
    """Seconds. `compute`: products and elementwise work of one rank; `tp`, `pp`, `dp`: communication that nothing hides
    (dp's with what it takes from the computation that hides the rest); `bubble`: waiting in the pipeline; `optimizer`:
    the update. `exact`: the pipeline's time is the simulator's.
    """

    compute: float
    tp: float
    pp: float
    dp: float
    bubble: float
    optimizer: float
    exact: bool

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.pp + self.dp + self.bubble + self.optimizer


@dataclass(frozen=True)
class Costs:
    """One microbatch on one layer, in seconds: F, I and W with their communication, `tp` (what of them is that), and
    the output head's forward.
    """

    forward: float
    backward_input: float
    backward_weight: float
    tp: float
    head: float


@lru_cache(maxsize=4096)
def layer_costs(
    model: ModelShape,
    cluster: Cluster,
    length: int,
    tp: int,
    microbatch: int,
    sequence_parallel: bool,
    recompute: str,
    split_backward: bool,
) -> Costs:
    """A layer's F, I (with what is recomputed) and W on one rank.

    Forward's sums over tp wait for row layers, and nothing hides them. Backward's are of column layers' input gradients
    and hide behind the same layers' weight gradients, unless the schedule splits I from W (`split_backward`).
    """
    a, gpu = cluster.assumptions, cluster.gpu

    def products(flops: float) -> float:
        one = flops / tp / 4  # a layer is about four products
        return flops / tp / (gpu.peak * a.products) * (1 + a.half_work / one)

    flops = microbatch * model.layer_flops(length)
    core = microbatch * model.attention_core_flops(length)
    layout = Layout(1, tp, 1, microbatch, 1, sequence_parallel=sequence_parallel)
    seconds_per_byte = 1 / (gpu.memory_bandwidth * a.copies)
    kept = layer_activations(model, layout, length)
    scores = kept - layer_activations(model, replace(layout, recompute="selective"), length)
    # Two all-reduces forward and two backward, or as many pairs of all-gather and reduce-scatter: 2 n (t-1)/t each.
    n = length * microbatch * model.hidden * BYTES
    sums = 2 * 2 * gather_seconds(cluster, n, 1, tp)
    forward = products(flops) + a.forward_traffic * kept * seconds_per_byte
    core_again = products(core) + a.forward_traffic * scores * seconds_per_byte
    again = {"none": 0.0, "full": forward + sums, "selective": core_again}[recompute]
    backward_weight = products(flops - core)
    backward_input = products(flops + core) + a.backward_traffic * kept * seconds_per_byte + again
    hidden = 0.0 if split_backward else min(sums, a.overlap * model.column_share * backward_weight)
    back = sums - hidden + a.contention * hidden
    head = products(microbatch * model.head_flops(length))
    total = (2 if recompute == "full" else 1) * sums + back
    return Costs(forward + sums, backward_input + back, backward_weight, total, head)


def hop_seconds(model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> float:
    """A microbatch's activations to the next stage: b s h / t elements from each tp rank (Narayanan et al. 2021,
    4.1).
    """
    if layout.pp == 1:
        return 0.0
    link = cluster.link(layout.tp * layout.dp, layout.pp)
    return link.alpha + length * layout.microbatch * model.hidden * BYTES / layout.tp * link.beta


def tied_seconds(model: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """The token embedding's two gradients, the first stage's and the last's, are added at the end of the step
    (Narayanan et al. 2021; Megatron's `allreduce_word_embedding_grads`): V h / t elements each way.
    """
    if layout.pp == 1 or not model.tied:
        return 0.0
    link = cluster.link(layout.tp * layout.dp, layout.pp)
    return link.alpha + model.vocab_size * model.hidden / layout.tp * layout.precision.gradients * link.beta


def step_time(model: ModelShape, layout: Layout, cluster: Cluster, length: int, exact: bool = True) -> StepTime:
    """One optimizer step. With `exact` the pipeline's time is the simulator's, if the schedule is not too long for it;
    else the closed form's (a search looks at thousands).
    """
    split = layout.schedule.startswith("zb")
    costs = layer_costs(
        model, cluster, length, layout.tp, layout.microbatch, layout.sequence_parallel, layout.recompute, split
    )
    p, m, v, layers = layout.pp, layout.microbatches, layout.virtual_stages, layout.layers_per_rank(model)
    hop = hop_seconds(model, layout, cluster, length)
    stage = Stage(
        layers * costs.forward, layers * costs.backward_input, layers * costs.backward_weight, costs.head, hop
    )
    found = simulated(layout.schedule, p, m, v, stage) if exact else None
    makespan = closed_form(layout.schedule, p, m, v, stage) if found is None else found
    tp = m * layers * costs.tp
    hops = m * 2 * stages_per_rank(layout.schedule, v) * hop
    compute = m * (stage.layers + 3 * costs.head * (p == 1)) - tp
    bubble = max(0.0, makespan - compute - tp - hops)
    pp = hops + tied_seconds(model, layout, cluster)
    psi = rank_parameters(model, layout)
    dp = exposed_dp(layout, cluster, psi, layers, compute, m * (costs.backward_input + costs.backward_weight) * layers)
    touched = psi / (layout.dp if layout.zero else 1) * UPDATE_BYTES
    optimizer = touched / (cluster.gpu.memory_bandwidth * cluster.assumptions.copies)
    return StepTime(compute, tp, pp, dp, bubble, optimizer, found is not None)


def exposed_dp(layout: Layout, cluster: Cluster, psi: int, layers: int, compute: float, backward: float) -> float:
    """Seconds of gradients and parameters over dp that nothing hides, and what the hidden ones cost.

    Each layer is a collective of its own. Stages 0 and 1 reduce behind the last microbatch's backward, stage 2 behind
    every one's; stages 1 and 2 then gather parameters with nothing to hide behind; stage 3 gathers twice for each
    microbatch, the next layer's behind the present one's computation. `compute` and `backward`: a step's, seconds.
    """
    if layout.dp == 1:
        return 0.0
    a, m, precision = cluster.assumptions, layout.microbatches, layout.precision
    gather = gather_seconds(cluster, psi * precision.parameters, layout.tp, layout.dp, pieces=layers)
    reduce = gather_seconds(cluster, psi * precision.gradients, layout.tp, layout.dp, pieces=layers)
    beside, behind, after = {
        0: (2 * reduce, backward / m, 0.0),
        1: (reduce, backward / m, gather),
        2: (m * reduce, backward, gather),
        3: (m * (2 * gather + reduce), compute, 0.0),
    }[layout.zero]
    hidden = min(beside, a.overlap * behind)
    return beside - hidden + a.contention * hidden + after
