"""A layout's stages: which parts each has, how long its actions take, and what data parallelism sends beside them."""

from __future__ import annotations

from collections.abc import Sequence

from minipar.parallel.pipeline.stage import balanced_cuts
from minipar.plan.layout import Layout
from minipar.plan.machine import Cluster
from minipar.plan.model import ModelShape
from minipar.plan.overlap import Work, run
from minipar.plan.parts import Part, compute, parts, per_microbatch
from minipar.plan.pipeline import Simulated, StageTime, closed_form, rank_of, simulated, stages_per_rank

STEADY = 3  # microbatches looked at; each further one takes as long as the second


def layers_of_stages(model: ModelShape, layout: Layout, balanced: bool, length: int) -> list[int]:
    """Layers of each stage: cut so that the head counts, or as many on all as the fullest has."""
    stages = layout.pp * stages_per_rank(layout.schedule, layout.virtual_stages)
    if not balanced:
        return [-(-model.layers // stages)] * stages
    costs = [0, *[model.layer_flops(length)] * model.layers, model.head_flops(length)]
    counts = balanced_cuts(costs, stages)
    counts[0] -= 1  # the embedding, and the head
    counts[-1] -= 1
    return counts


class Stages:
    """The stages of a layout; seconds of one microbatch unless said otherwise."""

    def __init__(self, model: ModelShape, layout: Layout, cluster: Cluster, length: int, hop: float) -> None:
        self.layout = layout
        self.parts = parts(model, per_microbatch(layout), cluster, length)
        self.update = compute(model, per_microbatch(layout), cluster, length).update
        self.layers = layers_of_stages(model, layout, cluster.program.balanced_stages, length)
        self.last = len(self.layers) - 1
        self.ranks: list[list[int]] = [[] for _ in range(layout.pp)]  # the stages of each
        for s in range(self.last + 1):
            self.ranks[rank_of(layout.schedule, layout.pp, s)].append(s)
        self.blocked = hop if cluster.program.blocking_hops else 0.0  # of a message, for its rank
        self.gathers = layout.zero == 3
        self.often = layout.zero >= 2 and cluster.program.every_microbatch

    def of(self, stage: int) -> list[Part]:
        """The parts of a stage in the model's order."""
        ends = [self.parts.embedding] * (stage == 0), [self.parts.head] * (stage == self.last)
        return [*ends[0], *[self.parts.layer] * self.layers[stage], *ends[1]]

    def busiest(self) -> list[int]:
        """The stages of the pipeline rank that computes most."""
        layer, ends = self.parts.layer.seconds, {0: self.parts.embedding.seconds}
        ends[self.last] = ends.get(self.last, 0.0) + self.parts.head.seconds
        return max(self.ranks, key=lambda stages: sum(self.layers[s] * layer + ends.get(s, 0.0) for s in stages))

    # ---- passes: what an action does, with its collectives over dp ---------------------------------------------------

    def forward(self, found: Sequence[Part]) -> list[Work]:
        """Of these parts, in their order."""
        return [Work(part.forward, part.gather * self.gathers) for part in found]

    def backward(self, found: Sequence[Part], reduces: bool = False) -> list[Work]:
        """Whole, or where it is split the half that makes gradients (W); `reduces`: and sends them.

        The embedding's does not read its table, W reads no parameters, and the head's follows its forward, which has
        gathered them.
        """
        work = []
        for part in reversed(found):
            seconds = part.backward_weight + (0.0 if self.layout.splits_backward else part.backward_input)
            gathered = self.gathers and not self.layout.splits_backward and part is self.parts.layer
            reduce, partial = (part.reduce, part.partial) if reduces else (0.0, 0.0)
            work.append(Work(seconds + partial, part.gather * gathered, reduce))
        return work

    def time(self, found: Sequence[Part], messages: int = 1) -> StageTime:
        """F, I, W of these parts in a pipeline, with what they wait for: parameters, and messages each way."""
        weights = sum(part.backward_weight for part in found)
        forward = run(self.forward(found))[0] if self.gathers else sum(part.forward for part in found)
        if not self.gathers:
            inputs = sum(part.backward_input for part in found)
        elif self.layout.splits_backward:
            inputs = run([Work(part.backward_input, part.gather) for part in reversed(found)])[0]
        else:
            inputs = run(self.backward(found))[0] - weights
        if self.often:  # reductions go on behind the next action, but not for ever
            sent = sum(part.reduce + part.gather * self.gathers for part in found)
            inputs = max(inputs, sent - weights)
        return StageTime(forward + messages * self.blocked, inputs + messages * self.blocked, weights)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def alone(self) -> float:
        """Without a pipeline, until the last gradient is there."""
        m, found = self.layout.microbatches, self.of(0)
        ahead, *back = self.forward(found), self.backward(found), self.backward(found, reduces=True)
        head = ahead.pop()  # its backward follows its forward at once: one turn
        once, last = (
            [*ahead, Work(head.seconds + work[0].seconds, head.gather, work[0].reduce), *work[1:]] for work in back
        )
        few = self.layout.zero >= 2
        if not self.gathers and not self.often:
            return max(run(last, now=(m - 1) * sum(work.seconds for work in once), few_gradients=few))
        now = stream = 0.0
        ends = []
        for i in range(min(m, STEADY)):
            now, stream = run(last if self.often or i == min(m, STEADY) - 1 else once, now, stream, few)
            ends.append(max(now, stream))
        return ends[-1] + max(0, m - STEADY) * (ends[1] - ends[0] if m > STEADY else 0.0)

    def simulated(self, hop: float) -> Simulated | None:
        """In a pipeline, by the simulator; None if the schedule is too long for it. `hop`: seconds of a message."""
        times = [self.time(self.of(s)) for s in range(self.last + 1)]
        p, m, v = self.layout.pp, self.layout.microbatches, self.layout.virtual_stages
        return simulated(self.layout.schedule, p, m, v, times, hop - self.blocked)

    def closed_form(self) -> float:
        """In a pipeline, with the fullest rank's layers on all of them, and the head on the last."""
        fullest = max(sum(self.layers[s] for s in stages) for stages in self.ranks)
        rank = self.time([self.parts.layer] * fullest, messages=len(self.ranks[0]))
        head = self.time([self.parts.head], messages=0)
        p, m, v = self.layout.pp, self.layout.microbatches, self.layout.virtual_stages
        return closed_form(self.layout.schedule, p, m, v, rank, head)

    # ---- what data parallelism sends ---------------------------------------------------------------------------------

    def tail(self, step: Simulated, tied: float) -> float:
        """Seconds from a pipeline's last action until every rank's gradients are reduced. `tied`: of the token
        embedding's gradient on its way from the last stage to the first, where it is added before the reduction.
        """
        if self.often:  # in the time of each action already; the last bucket's is left
            return self.parts.layer.reduce
        last_rank = rank_of(self.layout.schedule, self.layout.pp, self.last)
        # Before a stage's last gradients, those of the stages after it were summed over tp, where the way back has to
        # wait for that.
        partial = [
            0.0 if self.layout.splits_backward else sum(part.partial for part in self.of(s))
            for s in range(self.last + 1)
        ]
        end = 0.0
        for stages in self.ranks:
            stream = 0.0
            for s in sorted(stages, key=lambda s: step.last[s]):
                work = self.backward(self.of(s), reduces=True)
                late = work.pop() if s == 0 and tied else None
                begin = step.last[s] + sum(partial[s + 1 :])
                now, stream = run(work, begin, stream, few_gradients=self.layout.zero >= 2)
                if late is not None:
                    now = max(now + late.seconds, step.done[last_rank] + tied)
                    stream = max(now, stream) + late.reduce
                end = max(end, now, stream)
        return max(0.0, end - step.makespan)

    def over_dp(self, stages: Sequence[int]) -> float:
        """Seconds of all collectives over dp of a rank with these stages in a step, but the gather after it."""
        m, found = self.layout.microbatches, [part for s in stages for part in self.of(s)]
        reduces = sum(part.reduce for part in found) * (m if self.often else 1)
        gathers = sum(part.gather * (2 if part is self.parts.layer else 1) for part in found) * m
        return reduces + gathers * self.gathers

    def refresh(self) -> float:
        """Seconds of the gather of updated parameters (ZeRO stages 1 and 2), on the rank with the most of them."""
        if self.layout.zero not in (1, 2):
            return 0.0
        ranks = []
        for stages in self.ranks:
            found = [part for s in stages for part in self.of(s)]
            ranks.append(sum(part.gather for part in found if self.layout.pp > 1 or part is not self.parts.head))
        return max(ranks)
