"""Seconds of one optimizer step: computation, communication that nothing hides, pipeline bubble,
update.

A stage is a sequence of units (compute.py, stages.py). The schedule's simulator combines the stages
(pipeline_time.py). The collectives over dp run next to them (overlap.py), and the rank waits for
the rest after its last backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from minipar.plan.cluster import Cluster, scalar_seconds
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.plan.stages import Stages


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest rank, by what they are spent on.

    compute      products and elementwise work, and waiting for the host that launches them
    tp, cp, ep, pp, dp   communication that nothing hides; tp, cp, dp include what hidden messages
                         cost the computation
    bubble       waiting in the pipeline
    optimizer    the update
    exact        whether the pipeline's time is the simulator's, not the closed form's
    """

    compute: float
    tp: float
    pp: float
    dp: float
    bubble: float
    optimizer: float
    exact: bool
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.compute
            + self.tp
            + self.pp
            + self.dp
            + self.bubble
            + self.optimizer
            + self.cp
            + self.ep
        )


def step_time(
    model: ModelShape, layout: Layout, cluster: Cluster, length: int, exact: bool = True
) -> StepTime:
    """Return the seconds of one optimizer step.

    With `exact` the pipeline is simulated if its schedule is not too long for that. Otherwise its
    time is the closed form's: a search compares thousands of layouts.
    """
    stages = Stages(model, layout, cluster, length)
    tied = tied_seconds(model, layout, cluster)
    busiest = stages.busiest_rank()
    passes = _passes(stages, busiest, tied, exact)

    hidden = max(0.0, stages.dp_seconds(busiest) - passes.dp)
    refresh = stages.refresh_seconds()
    if cluster.framework.gathers_ahead:
        ahead = min(refresh, stages.stage_time(stages.units_of(0)).forward)
        refresh -= ahead
        hidden += ahead
    dp = passes.dp + (refresh + cluster.assumptions.contention * hidden)

    pp = passes.pp + tied
    if cluster.framework.embedding_returns and tied and layout.zero == 3:
        pp += stages.units.embedding.gather  # to be sent, the embedding is gathered once more

    # Scalars: the loss over pp and dp x cp; the norm over tp and pp, and over the ranks with the
    # shards of a gradient.
    scalar_tp = scalar_seconds(cluster, 1, layout.tp)
    scalar_dp = scalar_seconds(cluster, layout.tp, layout.replicas)
    scalar_pp = scalar_seconds(cluster, layout.tp * layout.replicas, layout.pp)
    sums = layout.zero or layout.expert_sums_apart
    dp += scalar_dp + (scalar_seconds(cluster, layout.tp, layout.shards) if sums else 0.0)
    return replace(
        passes,
        tp=passes.tp + scalar_tp,
        pp=pp + 2 * scalar_pp,
        dp=dp,
        optimizer=stages.units.update,
    )


def _passes(stages: Stages, busiest: Sequence[int], tied: float, exact: bool) -> StepTime:
    """Return the seconds of the busiest rank until gradients are reduced: forward and backward of
    all microbatches.

    Divide what the makespan has more than computation, tp, cp and ep: messages first, gathers over
    dp, then the bubble. A part is 0 where rounding, or a closed form, leaves less than that.
    """
    m = stages.layout.microbatches
    units = stages.units_on(busiest)
    tp = m * sum(unit.tp for unit in units)
    cp = m * sum(unit.cp for unit in units)
    ep = m * sum(unit.ep for unit in units)
    compute = m * sum(unit.seconds for unit in units) - tp - cp - ep
    parts = partial(StepTime, compute=compute, tp=tp, cp=cp, ep=ep, optimizer=0.0)
    if stages.layout.pp == 1:
        return parts(
            pp=0.0,
            dp=max(0.0, stages.without_pipeline() - compute - tp - cp - ep),
            bubble=0.0,
            exact=True,
        )
    hops = m * 2 * len(busiest) * stages.hop_wait
    with_gathers = m * sum(stages.stage_time(stages.units_of(s)).seconds for s in busiest)
    gathers = max(0.0, with_gathers - compute - tp - cp - ep - hops)
    pipeline = stages.simulated() if exact else None
    if pipeline is None:
        exposed = [stages.units.layer] if stages.hides_reductions else units
        makespan = stages.closed_form()
        late = sum(unit.reduce + unit.across for unit in exposed)
    else:
        makespan = pipeline.makespan
        late = stages.late_reduction(pipeline, tied)
    bubble = max(0.0, makespan - compute - tp - cp - ep - hops - gathers)
    return parts(pp=hops, dp=gathers + late, bubble=bubble, exact=pipeline is not None)


def tied_seconds(model: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds of the token embedding's gradient from the last stage to the first: V h /
    t elements.

    Narayanan et al. 2021; Megatron's `allreduce_word_embedding_grads`, which sends as much the
    other way at the same time. With ZBV one rank has both stages.
    """
    if layout.pp == 1 or not model.tied or layout.schedule == "zbv":
        return 0.0
    nbytes = model.vocab_size * model.hidden / layout.tp * layout.precision.gradients
    return cluster.link(layout.tp * layout.replicas, layout.pp).seconds(nbytes)
