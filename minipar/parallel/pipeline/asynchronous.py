"""PipeDream and PipeDream-2BW: pipelines that never drain, at the price of gradients of older weights.

A synchronous pipeline empties at every optimizer step. These do not: microbatch after microbatch enters, in 1F1B's
order, and each stage updates its weights when it may. A microbatch's forward and backward on one stage must see the
same weights, so older versions are kept ("stashed"). Version v of a stage is what v updates have made of it:

    pipedream       an update after every backward; on stage s of p microbatch k sees version max(0, k - (p-1-s)), and
                    up to p - s versions are kept (Narayanan et al. 2019, section 3.3)
    pipedream-2bw   an update after each group of m >= p-1 microbatches; those of group g see version max(0, g - 1) on
                    every stage: W(t+1) = W(t) - lr * grad f(W(t-1)), two versions (arXiv 2006.09503, section 3.1)

Neither equals synchronous training. Each equals, bit for bit, one device that computes every microbatch with the same
old weights: `stale_reference`. Stages own their weights, so here the head has an embedding of its own (`untie`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from minipar.autograd import Tensor
from minipar.backend import Array, from_host, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.gpt import GPT
from minipar.nn.module import Parameter
from minipar.nn.optim import AdamW
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.executor import PipelineExecutor
from minipar.parallel.pipeline.schedules import one_f_one_b
from minipar.parallel.pipeline.split import part_groups
from minipar.parallel.pipeline.stage import PipelineStage, balanced_cuts, cut, part_costs

Batch = Callable[[int], tuple[np.ndarray, np.ndarray]]  # microbatch -> tokens and targets, (B, T) each
MakeOptimizer = Callable[[list[Parameter]], AdamW]


@dataclass(frozen=True)
class Staleness:
    """Which weights a microbatch sees, and when they are updated. group: microbatches per update (1: pipedream)."""

    stages: int
    group: int = 1

    def __post_init__(self) -> None:
        if 1 < self.group < self.stages - 1:
            raise UsageError(
                f"pipedream-2bw with groups of {self.group} microbatches on {self.stages} stages: the version before "
                f"the last is not there in time; it needs groups of at least stages-1 = {self.stages - 1}"
            )

    @property
    def name(self) -> str:
        return "pipedream" if self.group == 1 else "pipedream-2bw"

    def version(self, stage: int, microbatch: int) -> int:
        """The version of the stage's weights that the microbatch's forward and backward use."""
        if self.group > 1:
            return max(0, microbatch // self.group - 1)
        return max(0, microbatch - (self.stages - 1 - stage))

    def updates(self, microbatch: int) -> bool:
        """Whether the weights are updated after this microbatch's backward."""
        return (microbatch + 1) % self.group == 0


class StashedWeights:
    """The versions of one stage's weights that microbatches under way still need; `peak` is the most there were."""

    def __init__(self, parameters: list[Parameter], make_optimizer: MakeOptimizer) -> None:
        self.parameters = parameters
        self.optimizer = make_optimizer(parameters)
        self.versions = {0: [p.data for p in parameters]}
        self.latest, self.peak = 0, 1

    def use(self, version: int) -> None:
        """The parameters' numbers are this version's from now on. (A node asks for them when backward needs them.)"""
        for p, numbers in zip(self.parameters, self.versions[version], strict=True):
            p.data = numbers

    def update(self, oldest_needed: int) -> None:
        """One optimizer step on the latest version makes the next; versions before `oldest_needed` are dropped."""
        latest = self.versions[self.latest]
        self.versions = {v: numbers for v, numbers in self.versions.items() if v >= oldest_needed}
        for p, numbers in zip(self.parameters, latest, strict=True):
            p.data = numbers.copy()
        self.optimizer.step()
        self.latest += 1
        self.versions[self.latest] = [p.data for p in self.parameters]
        self.peak = max(self.peak, len(self.versions))
        for p in self.parameters:
            p.zero_grad()


def untie(model: GPT) -> list[list[Parameter]]:
    """Give the head an embedding of its own, with the same numbers. Returns the parameters of each part."""
    weight = Parameter(model.wte.weight.data.copy())
    model.wte.weight.ties.clear()
    model.parts[-1].run = lambda x: model.project(model.ln_f(x), weight)
    groups = part_groups(model)
    groups[-1].append(weight)
    return groups


def _parameters_of_stages(model: GPT, stages: int, length: int) -> tuple[list[int], list[list[Parameter]]]:
    counts = balanced_cuts(part_costs(model, length), stages)
    groups, found, start = untie(model), [], 0
    for count in counts:
        found.append([p for group in groups[start : start + count] for p in group])
        start += count
    return counts, found


class AsynchronousPipeline:
    """Trains `model` on `microbatches` microbatches without draining; each rank of `comm` is a stage.

    After `run`, `weights.use(weights.latest)` has been called, `losses[m]` are the last stage's, and `weights.peak` is
    the most versions that this rank has kept. On the wire: B T h elements per microbatch, cut and direction.
    """

    def __init__(
        self,
        model: GPT,
        comm: Communicator,
        staleness: Staleness,
        microbatches: int,
        shape: tuple[int, int],
        make_optimizer: MakeOptimizer = AdamW,
    ) -> None:
        self.model, self.staleness, self.microbatches = model, staleness, microbatches
        counts, parameters = _parameters_of_stages(model, comm.size, shape[1])
        self.weights = StashedWeights(parameters[comm.rank], make_optimizer)
        self.stage = comm.rank
        order = one_f_one_b(comm.size, microbatches).ranks
        stages = {comm.rank: PipelineStage(cut(model, counts)[comm.rank])}
        self.executor = PipelineExecutor(
            Schedule(staleness.name, order), comm, stages, (*shape, model.config.n_embd), model.wte.weight.dtype
        )
        self.losses = np.zeros(microbatches)

    def run(self, batch: Batch) -> None:
        """All microbatches; the loss of each is a mean over its tokens, divided by the microbatches of an update."""

        def loss(m: int, logits: Tensor) -> Tensor:
            value = self.model.criterion(logits, from_host(batch(m)[1]))
            self.losses[m] = value.item() / batch(m)[1].size
            return value

        def gradient(m: int) -> Array:
            scale = 1 / (batch(m)[1].size * self.staleness.group)
            return xp.full((), scale, dtype=self.model.wte.weight.dtype)

        self.executor.run(lambda m: from_host(batch(m)[0]), loss, gradient, self._around)
        self.weights.use(self.weights.latest)

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        m = action.microbatch
        self.weights.use(self.staleness.version(self.stage, m))
        yield
        if action.kind == "B" and self.staleness.updates(m):
            self.weights.update(oldest_needed=self.staleness.version(self.stage, m + 1))


def stale_reference(
    model: GPT,
    staleness: Staleness,
    microbatches: int,
    length: int,
    batch: Batch,
    make_optimizer: MakeOptimizer = AdamW,
) -> list[float]:
    """One device that trains on the same old weights; returns the losses, and leaves the latest weights in the model.

    Before each microbatch every stage's parameters become the version that the pipeline would use; the updates are made
    to the latest.
    """
    _, parameters = _parameters_of_stages(model, staleness.stages, length)
    weights = [StashedWeights(each, make_optimizer) for each in parameters]
    losses = []
    for m in range(microbatches):
        for stage, each in enumerate(weights):
            each.use(staleness.version(stage, m))
        inputs, targets = batch(m)
        loss = model.loss_sum(from_host(inputs), from_host(targets))
        loss.backward(xp.full_like(loss.data, 1 / (targets.size * staleness.group)))
        losses.append(loss.item() / targets.size)
        if staleness.updates(m):
            for stage, each in enumerate(weights):
                each.update(oldest_needed=staleness.version(stage, m + 1))
    for each in weights:
        each.use(each.latest)
    return losses
