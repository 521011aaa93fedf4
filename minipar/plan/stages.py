"""The pipeline stages of a layout: their layers, the seconds of their passes, and what they do over
dp.
"""

from collections.abc import Sequence
from dataclasses import replace

from minipar.parallel.pipeline.model import balanced_cuts
from minipar.plan.cluster import Cluster
from minipar.plan.compute import UnitTime, unit_times
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.plan.overlap import UnitPass, overlapped
from minipar.plan.pipeline_time import SimulatedPipeline, StageTime, closed_form, simulated

STEADY = 3  # microbatches that are followed; each further one takes as long as the second


def hop_seconds(model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> float:
    """Return the seconds of a microbatch's activations to the next stage: b s h elements, or 1/t of
    them.

    Each tp rank sends its own t-th where it has no more, or if the framework scatters (Narayanan et
    al. 2021, 4.1).
    """
    if layout.pp == 1:
        return 0.0
    slices = layout.tp if cluster.framework.scattered_hops else layout.sequence_slices
    nbytes = layout.tokens(length) * model.hidden * layout.precision.parameters / slices
    return cluster.link(layout.tp * layout.replicas, layout.pp).seconds(nbytes)


def layers_of_stages(model: ModelShape, layout: Layout, balanced: bool, length: int) -> list[int]:
    """Return the layers of each stage.

    `balanced`: divided so that the operations of the head count, as minipar does. Otherwise
    ceil(layers / stages).
    """
    stages = layout.pp * layout.stages_per_rank
    if not balanced:
        return [-(-model.layers // stages)] * stages
    costs = [0, *[model.layer_flops(length)] * model.layers, model.head_flops(length)]
    counts = balanced_cuts(costs, stages)
    counts[0] -= 1  # the embedding
    counts[-1] -= 1  # the head
    return counts


class Stages:
    """The pipeline stages of a layout, or its single stage, with the seconds of their passes.

    layers    of each stage;  ranks: the stages of each pipeline rank
    hop       seconds of a message between stages;  hop_wait: the part of it that blocks the rank
    gathers   whether each pass gathers parameters (ZeRO stage 3)
    reduces_each_microbatch   whether each microbatch reduces its gradients
    """

    def __init__(self, model: ModelShape, layout: Layout, cluster: Cluster, length: int) -> None:
        self.layout = layout
        # The units of a microbatch depend on the schedule only in whether it splits backward.
        schedule = "zb-h1" if layout.splits_backward else "1f1b"
        alike = replace(layout, virtual_stages=1, schedule=schedule)
        self.units = unit_times(model, alike, cluster, length)
        self.layers = layers_of_stages(model, layout, cluster.framework.balanced_stages, length)
        self.last = len(self.layers) - 1
        self.ranks: list[list[int]] = [[] for _ in range(layout.pp)]
        for s in range(self.last + 1):
            self.ranks[layout.rank_of(s)].append(s)
        self.hop = hop_seconds(model, layout, cluster, length)
        self.hop_wait = self.hop if cluster.framework.blocking_hops else 0.0
        self.gathers = layout.zero == 3
        self.hides_reductions = cluster.framework.hidden_reductions
        self.few_gradients = layout.zero >= 2
        self.reduces_each_microbatch = layout.zero >= 2 and cluster.framework.every_microbatch

    def units_of(self, stage: int) -> list[UnitTime]:
        """Return the units of a stage in the model's order."""
        units = [self.units.layer] * self.layers[stage]
        if stage == 0:
            units.insert(0, self.units.embedding)
        if stage == self.last:
            units.append(self.units.head)
        return units

    def units_on(self, stages: Sequence[int]) -> list[UnitTime]:
        """Return the units of a rank's stages."""
        return [unit for s in stages for unit in self.units_of(s)]

    def busiest_rank(self) -> list[int]:
        """Return the stages of the pipeline rank that computes most."""
        return max(self.ranks, key=lambda rank: sum(unit.seconds for unit in self.units_on(rank)))

    def forward_passes(self, units: Sequence[UnitTime]) -> list[UnitPass]:
        """Return the forward passes of these units."""
        return [UnitPass(seconds=unit.forward, gather=unit.gather) for unit in units]

    def backward_passes(self, units: Sequence[UnitTime], reduces: bool = False) -> list[UnitPass]:
        """Return the backward passes of these units, last unit first; with `reduces` they send
        their gradients.

        Where the schedule splits backward, they are the half that computes weight gradients (W). W
        reads no parameters, the embedding's backward does not read its table, and the head's
        follows its forward, which has gathered them; so only layers gather.
        """
        passes = []
        for unit in reversed(units):
            one = UnitPass(seconds=unit.backward_weight)
            if not self.layout.splits_backward:
                gather = unit.gather if unit is self.units.layer else 0.0
                one = UnitPass(seconds=unit.backward_weight + unit.backward_input, gather=gather)
            if reduces:
                seconds = one.seconds + unit.partial
                one = replace(one, seconds=seconds, reduce=unit.reduce, across=unit.across)
            passes.append(one)
        if self.hides_reductions:
            return passes
        reduce = sum(one.reduce for one in passes)
        across = sum(one.across for one in passes)
        passes = [replace(one, reduce=0.0, across=0.0) for one in passes]
        passes[-1] = replace(passes[-1], reduce=reduce, across=across)
        return passes

    def stage_time(self, units: Sequence[UnitTime], messages: int = 1) -> StageTime:
        """Return F, I and W of these units in a pipeline, waiting for parameters and messages each
        way included.
        """
        forward = sum(unit.forward for unit in units)
        inputs = sum(unit.backward_input for unit in units)
        weights = sum(unit.backward_weight for unit in units)
        if self.gathers:
            forward, _ = overlapped(self.forward_passes(units))
            inputs = overlapped(self.backward_passes(units))[0] - weights
        if self.gathers and self.layout.splits_backward:
            backward = reversed(units)
            passes = [UnitPass(unit.backward_input, gather=unit.gather) for unit in backward]
            inputs, _ = overlapped(passes)
        if self.reduces_each_microbatch:
            # Reductions continue during the next action, but do not pile up.
            sent = sum(unit.reduce + unit.gather for unit in units)
            sent = max(sent, sum(unit.across for unit in units))
            inputs = max(inputs, sent - weights)
        wait = messages * self.hop_wait
        return StageTime(
            forward=forward + wait, backward_input=inputs + wait, backward_weight=weights
        )

    # ---- the makespan ----------------------------------------------------------------------------

    def one_microbatch(self, reduces: bool) -> list[UnitPass]:
        """Return the passes of a microbatch without a pipeline. The head's backward follows its
        forward at once.
        """
        *forward, head_forward = self.forward_passes(self.units_of(0))
        head_backward, *backward = self.backward_passes(self.units_of(0), reduces)
        seconds = head_forward.seconds + head_backward.seconds
        head = replace(head_backward, seconds=seconds, gather=head_forward.gather)
        return [*forward, head, *backward]

    def without_pipeline(self) -> float:
        """Return the seconds without a pipeline until all gradients are reduced."""
        m = self.layout.microbatches
        earlier = self.one_microbatch(reduces=False)
        last = self.one_microbatch(reduces=True)
        if not self.gathers and not self.reduces_each_microbatch:
            # Only the last microbatch communicates.
            start = (m - 1) * sum(unit.seconds for unit in earlier)
            return max(overlapped(last, start, few_gradients=self.few_gradients))
        now = stream = 0.0
        ends = []
        for i in range(1, min(m, STEADY) + 1):
            passes = last if self.reduces_each_microbatch or i == min(m, STEADY) else earlier
            now, stream = overlapped(passes, now, stream, self.few_gradients)
            ends.append(max(now, stream))
        return ends[-1] if m <= STEADY else ends[-1] + (m - STEADY) * (ends[1] - ends[0])

    def simulated(self) -> SimulatedPipeline | None:
        """Simulate the pipeline; None if the schedule is too long for that."""
        times = [self.stage_time(self.units_of(s)) for s in range(self.last + 1)]
        return simulated(self.layout, times, self.hop - self.hop_wait)

    def closed_form(self) -> float:
        """Return the makespan in closed form, as if every rank had the fullest rank's layers."""
        fullest = max(sum(self.layers[s] for s in stages) for stages in self.ranks)
        rank = self.stage_time([self.units.layer] * fullest, messages=len(self.ranks[0]))
        return closed_form(self.layout, rank, self.stage_time([self.units.head], messages=0))

    # ---- data parallelism ------------------------------------------------------------------------

    def late_reduction(self, pipeline: SimulatedPipeline, tied: float) -> float:
        """Return the seconds from a pipeline's last action until every rank's gradients are
        reduced.

        `tied`: seconds of the token embedding's gradient from the last stage to the first, which
        adds it to its own before the reduction.
        """
        if self.reduces_each_microbatch:  # within each action's time, except for the last bucket
            return self.units.layer.reduce + self.units.layer.across
        # Before a stage's last gradients, those of later stages were summed over tp, unless I goes
        # on without them.
        partial = [0.0] * (self.last + 1)
        if not self.layout.splits_backward:
            partial = [sum(unit.partial for unit in self.units_of(s)) for s in range(self.last + 1)]
        end = 0.0
        for stages in self.ranks:
            stream = 0.0
            for s in sorted(stages, key=lambda s: pipeline.gradients_begin[s]):
                passes = self.backward_passes(self.units_of(s), reduces=True)
                embedding = passes.pop() if s == 0 and tied else None
                start = pipeline.gradients_begin[s] + sum(partial[s + 1 :])
                now, stream = overlapped(passes, start, stream, self.few_gradients)
                if embedding is not None:
                    arrival = pipeline.ranks_end[self.layout.rank_of(self.last)] + tied
                    now = max(now + embedding.seconds, arrival)
                    stream = max(now, stream) + embedding.reduce + embedding.across
                end = max(end, now, stream)
        return max(0.0, end - pipeline.makespan)

    def dp_seconds(self, stages: Sequence[int]) -> float:
        """Return the seconds of all collectives over dp in a step of a rank, except for the gather
        after the update.
        """
        m = self.layout.microbatches
        units = self.units_on(stages)
        reductions = m if self.reduces_each_microbatch else 1
        reduced = sum(unit.reduce + unit.across for unit in units) * reductions
        gathers = sum(unit.gather * (2 if unit is self.units.layer else 1) for unit in units)
        return reduced + gathers * m

    def refresh_seconds(self) -> float:
        """Return the seconds of the gather of updated parameters (ZeRO stages 1 and 2), on the rank
        with most.
        """
        return max(sum(unit.refresh for unit in self.units_on(rank)) for rank in self.ranks)
