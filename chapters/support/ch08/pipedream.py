"""Train with PipeDream and PipeDream-2BW (section 8.8): pipelines that never drain, with older weights.

A synchronous pipeline empties at every optimizer step. These two do not: microbatches enter one after another, in the
order of 1F1B, and each stage updates its weights by itself. A microbatch's forward and backward on one stage must see
the same weights, so a stage keeps older versions of its weights ("stashes" them). Version v is the result of v updates.

    pipedream       an update after every backward; on stage s of p microbatch k sees version max(0, k - (p-1-s)), and
                    up to p - s versions are kept (Narayanan et al. 2019, section 3.3)
    pipedream-2bw   an update after each group of m >= p-1 microbatches; those of group g see version max(0, g - 1) on
                    every stage: W(t+1) = W(t) - lr * grad f(W(t-1)), two versions (arXiv 2006.09503, section 3.1)

Neither equals synchronous training. Each equals, bit for bit, one device that computes every microbatch with the same
old weights (`stale_reference`). Stages own their weights, so the head has an embedding of its own (`untie`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from chapters.support.instruments import digest
from chapters.support.share_work import from_all
from minipar.autograd import Tensor
from minipar.backend import from_host, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.optim import AdamW
from minipar.nn.parameter import Parameter
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.model import balanced_cuts, cut, segment_groups
from minipar.parallel.pipeline.schedules import one_f_one_b
from minipar.parallel.pipeline.stage import PipelineExecutor, PipelineStage

Batch = Callable[[int], tuple[np.ndarray, np.ndarray]]  # microbatch -> tokens and targets, (B, T) each
MakeOptimizer = Callable[[list[Parameter]], AdamW]


@dataclass(frozen=True)
class Staleness:
    """The rule for the weights of each microbatch. `group` is the number of microbatches per update (1: pipedream)."""

    stages: int
    group: int = 1

    def __post_init__(self) -> None:
        if 1 < self.group < self.stages - 1:
            raise UsageError(
                f"pipedream-2bw with groups of {self.group} microbatches on {self.stages} stages: the version before "
                f"the last is not complete in time; it needs groups of at least stages-1 = {self.stages - 1}"
            )

    @property
    def name(self) -> str:
        return "pipedream" if self.group == 1 else "pipedream-2bw"

    def version(self, stage: int, microbatch: int) -> int:
        """Return the version of the stage's weights that the microbatch's forward and backward use."""
        if self.group > 1:
            return max(0, microbatch // self.group - 1)
        return max(0, microbatch - (self.stages - 1 - stage))

    def updates(self, microbatch: int) -> bool:
        """Return True if the weights are updated after this microbatch's backward."""
        return (microbatch + 1) % self.group == 0


class Fresh(Staleness):
    """Synchronous training with as many microbatches per update: the latest weights, always."""

    def version(self, stage: int, microbatch: int) -> int:
        return microbatch // self.group


class StashedWeights:
    """The versions of one stage's weights that microbatches still need; `peak` is the largest number of them."""

    def __init__(self, parameters: list[Parameter], make_optimizer: MakeOptimizer) -> None:
        self.parameters = parameters
        self.optimizer = make_optimizer(parameters)
        self.versions = {0: [p.data for p in parameters]}
        self.latest, self.peak = 0, 1

    def use(self, version: int) -> None:
        """Give the parameters the values of this version. Backward reads a parameter's values when it needs them."""
        for p, values in zip(self.parameters, self.versions[version], strict=True):
            p.data = values

    def update(self, oldest_needed: int) -> None:
        """Make the next version by one optimizer step on the latest, and drop versions before `oldest_needed`."""
        latest = self.versions[self.latest]
        self.versions = {v: values for v, values in self.versions.items() if v >= oldest_needed}
        for p, values in zip(self.parameters, latest, strict=True):
            p.data = values.copy()
        self.optimizer.step()
        self.latest += 1
        self.versions[self.latest] = [p.data for p in self.parameters]
        self.peak = max(self.peak, len(self.versions))
        for p in self.parameters:
            p.zero_grad()


def untie(model: GPT) -> list[list[Parameter]]:
    """Give the head an embedding of its own with the same values, and return the parameters of each part."""
    weight = Parameter(model.wte.weight.data.copy())
    model.wte.weight.ties.clear()
    model.segments[-1].run = lambda x: model.project(model.ln_f(x), weight)
    groups = segment_groups(model)
    groups[-1].append(weight)
    return groups


def _stage_parameters(model: GPT, stages: int, length: int) -> tuple[list[int], list[list[Parameter]]]:
    """Cut the model into stages and return (number of parts, parameters) of each, as two lists."""
    counts = balanced_cuts(model.config.segment_flops(length), stages)
    groups, parameters, start = untie(model), [], 0
    for count in counts:
        parameters.append([p for group in groups[start : start + count] for p in group])
        start += count
    return counts, parameters


class AsynchronousPipeline:
    """A pipeline that trains `model` on `microbatches` microbatches without draining; each rank of `comm` is a stage.

    After `run` the parameters have their latest values, `losses` holds each microbatch's loss on the last stage, and
    `weights.peak` is the most versions that this rank has kept. Sends B T h elements per microbatch, cut and direction.
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
        counts, parameters = _stage_parameters(model, comm.size, shape[1])
        self.weights = StashedWeights(parameters[comm.rank], make_optimizer)
        self.stage = comm.rank
        schedule = Schedule(staleness.name, one_f_one_b(comm.size, microbatches).ranks)
        stages = {comm.rank: PipelineStage(cut(model, counts)[comm.rank])}
        activation = (*shape, model.config.n_embd)
        self.executor = PipelineExecutor(schedule, comm, stages, activation, model.wte.weight.dtype)
        self.losses = np.zeros(microbatches)

    def run(self, batch: Batch) -> None:
        """Train on all microbatches, of equal size. The loss is a mean over tokens, its gradient divided by `group`."""

        def loss(m: int, logits: Tensor) -> Tensor:
            value = self.model.criterion(logits, from_host(batch(m)[1]))
            self.losses[m] = value.item() / batch(m)[1].size
            return value

        scale = 1 / (batch(0)[1].size * self.staleness.group)
        self.executor.run(lambda m: from_host(batch(m)[0]), loss, scale, self._around)
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
    """Train on one device with the same old weights; return the losses and leave the latest weights in the model.

    Before each microbatch every stage's parameters get the version that the pipeline uses. Updates start from the
    latest version.
    """
    _, parameters = _stage_parameters(model, staleness.stages, length)
    stages = [StashedWeights(group, make_optimizer) for group in parameters]
    losses = []
    for m in range(microbatches):
        for s, weights in enumerate(stages):
            weights.use(staleness.version(s, m))
        inputs, targets = batch(m)
        loss = model.loss_sum(from_host(inputs), from_host(targets))
        loss.backward(xp.full_like(loss.data, 1 / (targets.size * staleness.group)))
        losses.append(loss.item() / targets.size)
        if staleness.updates(m):
            for s, weights in enumerate(stages):
                weights.update(oldest_needed=staleness.version(s, m + 1))
    for weights in stages:
        weights.use(weights.latest)
    return losses


def differences_from_one_device(comm: Communicator, group: int) -> tuple[bool, float]:
    """Train a small GPT without draining, one block per rank of `comm`, and compare it on rank 0 with two references.

    Return (True if all bits are those of one device with the same old weights and each rank has kept the versions that
    the rule says, the largest difference from training with the latest weights); both are meaningless on other ranks.
    """
    stages, length, count = comm.size, 16, 4 * comm.size
    samples = np.random.default_rng(2).integers(0, 256, (count, 1, length + 1))
    config = GPTConfig(vocab_size=256, n_positions=length, n_embd=16, n_layer=stages, n_head=2)
    staleness, fresh = Staleness(stages, group), Fresh(stages, group)

    def batch(microbatch: int) -> tuple[np.ndarray, np.ndarray]:
        return samples[microbatch][:, :length], samples[microbatch][:, 1:]

    def digests(model: GPT, among: list[Parameter]) -> dict[str, str]:
        return {
            name: digest([value.data])
            for name, value in model.named_parameters()
            if any(value is each for each in among)
        }

    model = GPT(config, dtype="float64")
    pipeline = AsynchronousPipeline(model, comm, staleness, count, (1, length))
    pipeline.run(batch)
    mine = digests(model, pipeline.weights.parameters), pipeline.losses.tolist(), pipeline.weights.peak
    ranks = from_all(comm, mine)
    if comm.rank > 0:
        return True, 0.0
    stale, latest = GPT(config, dtype="float64"), GPT(config, dtype="float64")
    losses = stale_reference(stale, staleness, count, length, batch)
    stale_reference(latest, fresh, count, length, batch)
    same = digests(stale, stale.parameters()) == {name: bits for own, _, _ in ranks for name, bits in own.items()}
    kept = [stages - s if group == 1 else 2 for s in range(stages)]
    same = same and losses == ranks[-1][1] and kept == [peak for _, _, peak in ranks]
    pairs = zip(stale.parameters(), latest.parameters(), strict=True)
    return same, max(float(np.abs(a.data - b.data).max()) for a, b in pairs)
