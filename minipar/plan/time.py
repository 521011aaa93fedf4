"""Time of one step: computation, communication that nothing hides, bubble, update.

A stage is its parts (parts.py) one after the other; the schedule's simulator puts the stages together (pipeline.py);
what data parallelism sends runs beside them (overlap.py), and what is left of it after the last backward is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipar.plan.communication import number_seconds
from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.model import ModelShape
from minipar.plan.stages import Stages


@dataclass(frozen=True)
class StepTime:
    """Seconds. `compute`: products and elementwise work of one rank; `tp`, `pp`, `dp`: communication that nothing hides
    (tp's and dp's with what they take from the computation that hides the rest); `bubble`: waiting in the pipeline;
    `optimizer`: the update. `exact`: the pipeline's time is the simulator's.
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


def hop_seconds(model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> float:
    """A microbatch's activations to the next stage: b s h elements, or from each tp rank its part of them (Narayanan et
    al. 2021, 4.1).
    """
    if layout.pp == 1:
        return 0.0
    link = cluster.link(layout.tp * layout.dp, layout.pp)
    pieces = layout.tp if layout.sequence_parallel or cluster.program.scattered_hops else 1
    return link.alpha + length * layout.microbatch * model.hidden * layout.precision.parameters / pieces * link.beta


def tied_seconds(model: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """The token embedding's gradient from the last stage to the first, V h / t elements (Narayanan et al. 2021;
    Megatron's `allreduce_word_embedding_grads`, which sends as many the other way at the same time). With zbv one rank
    has both stages.
    """
    if layout.pp == 1 or not model.tied or layout.schedule == "zbv":
        return 0.0
    link = cluster.link(layout.tp * layout.dp, layout.pp)
    return link.alpha + model.vocab_size * model.hidden / layout.tp * layout.precision.gradients * link.beta


def step_time(model: ModelShape, layout: Layout, cluster: Cluster, length: int, exact: bool = True) -> StepTime:
    """One optimizer step. With `exact` the pipeline's time is the simulator's, if the schedule is not too long for it;
    else the closed form's (a search looks at thousands).
    """
    hop, tied = hop_seconds(model, layout, cluster, length), tied_seconds(model, layout, cluster)
    stages = Stages(model, layout, cluster, length, hop)
    m, program = layout.microbatches, cluster.program
    busiest = stages.busiest()
    busy = [part for s in busiest for part in stages.of(s)]
    tp = m * sum(part.tp for part in busy)
    compute = m * sum(part.seconds for part in busy) - tp
    bubble = hops = 0.0
    if layout.pp == 1:
        simulation = None
        dp = max(0.0, stages.alone() - compute - tp)
    else:
        simulation = stages.simulated(hop) if exact else None
        makespan = stages.closed_form() if simulation is None else simulation.makespan
        hops = m * 2 * len(busiest) * stages.blocked
        waits = max(0.0, m * sum(stages.time(stages.of(s)).seconds for s in busiest) - compute - tp - hops)
        bubble = max(0.0, makespan - compute - tp - hops - waits)
        dp = waits + (stages.parts.layer.reduce if simulation is None else stages.tail(simulation, tied))
    hidden = max(0.0, stages.over_dp(busiest) - dp)
    refresh = stages.refresh()
    if program.gathers_ahead:
        ahead = min(refresh, stages.time(stages.of(0)).forward)
        refresh, hidden = refresh - ahead, hidden + ahead
    dp += refresh + cluster.assumptions.contention * hidden
    pp = hops + tied
    if program.embedding_returns and tied and layout.zero == 3:
        pp += stages.parts.embedding.gather  # to be sent it is gathered once more
    # The loss over pp and dp; the norm over all three (over dp where each rank has its part of the gradients).
    stride = {"tp": 1, "dp": layout.tp, "pp": layout.tp * layout.dp}
    number = {axis: number_seconds(cluster, stride[axis], getattr(layout, axis)) for axis in stride}
    return StepTime(
        compute,
        tp + number["tp"],
        pp + 2 * number["pp"],
        dp + (2 if layout.zero else 1) * number["dp"],
        bubble,
        stages.update,
        layout.pp == 1 or simulation is not None,
    )
