"""Train pipelines beside one device (7.7), on the model clock (7.9), with replicas (7.10), mistaken (7.12)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from chapters.support.model_clock import traced
from chapters.support.share_work import from_all
from chapters.support.training import configuration, make_trainer, text_for
from chapters.support.whole_runs import compare
from minipar.autograd import Tensor
from minipar.bench.pipeline import timeline_of
from minipar.comm import Communicator, DeviceMesh, ModelClock, Network, run_local
from minipar.errors import CommunicationError, UsageError
from minipar.memory import KINDS, MemoryLedger
from minipar.nn import GPT, GPTConfig
from minipar.parallel.pipeline.actions import Durations, Slot, Timeline
from minipar.parallel.pipeline.stage import PipelineStage, balanced_cuts
from minipar.train.data import Tokens
from minipar.train.one_device import train_on_one_device
from minipar.train.settings import TrainConfig
from minipar.train.trainer import Trainer
from minipar.train.verify import Verdict, Verifier
from visualize.boxes import action_of
from visualize.timeline import COMPUTATION, Trace

ELEMENT = 8  # bytes of a float64


@dataclass(frozen=True)
class Run:
    """Some steps of training on all ranks. The counts are those of this rank.

    messages    those of the schedule per step: the bytes sent over pp, less the tied embedding's, by those of B T h
    peak_alive  the most activations of one stage and microbatch that it has held
    """

    verdict: Verdict
    losses: list[float]
    messages: float
    peak_alive: int


class PipelineRuns:
    """Training on all ranks of `comm`, two steps each, in float64, with dropout and clipping.

    The pipeline has `stages` ranks, and there are `replicas` of it. Stages have unequal sizes: a layer is left over.
    Each microbatch is `samples` = 2 samples of `length` tokens. The same steps are done once on one device.
    """

    length, hidden, vocabulary, samples, steps = 16, 16, 256, 2, 2

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.stages = max(size for size in range(1, 9) if comm.size % size == 0)
        self.replicas, self.microbatches = comm.size // self.stages, max(2, self.stages)
        self.pipe = DeviceMesh(comm, dp=self.replicas, pp=self.stages).pp
        config = self.configure("gpipe")
        self.tokens = text_for(config)
        self.single = train_on_one_device(config, self.tokens) if comm.rank == 0 else None

    def configure(self, schedule: str, stages: int | None = None) -> TrainConfig:
        """Return the trainer's configuration, from its own flags. Without a pipeline there is nothing to schedule."""
        stages = stages or self.stages
        pipeline = f"--pp {stages} --schedule {schedule} " if stages > 1 else ""
        flags = (
            f"--layers {2 * self.stages + 1} --hidden {self.hidden} --heads 2 --seq-len {self.length} "
            f"--global-batch {self.samples * self.microbatches * self.replicas} --microbatches {self.microbatches} "
            f"--dtype float64 --reduction ordered --dropout 0.1 --clip-grad 0.5 --lr 3e-3 --steps {self.steps}"
        )
        return configuration(pipeline + flags, self.comm.size)

    def train(self, schedule: str, stages: int | None = None, kind: type[Trainer] = Trainer) -> Run:
        """Train with this schedule and compare with one device. With fewer `stages` there are more replicas."""
        stages = stages or self.stages
        mesh = DeviceMesh(self.comm, dp=self.comm.size // stages, pp=stages)
        trainer = kind(self.configure(schedule, stages), mesh, self.tokens)
        verifier = Verifier(trainer) if stages != self.stages else None  # other replicas: another order of sums
        self.comm.traffic.reset()
        results = []
        for result in trainer.train():
            results.append(result)
            if verifier is not None:
                verifier.check(result)
        sent = self.comm.traffic.bytes("send", "pp") / self.steps
        if trainer.pipeline:
            home = trainer.executor.schedule.home
            ends = {home[0], home[len(home) - 1]}
            if len(ends) == 2 and mesh.pp.rank in ends:
                sent -= self.vocabulary * self.hidden * ELEMENT  # the tied embedding or its gradient
        verdict = self._compare(trainer, results) if verifier is None else verifier.verdict()
        peak = trainer.executor.peak_alive if trainer.pipeline else 0
        messages = sent / (self.samples * self.length * self.hidden * ELEMENT)
        return Run(verdict, [result.loss for result in results], messages, peak)

    def _compare(self, trainer: Trainer, results: Any) -> Verdict:
        """Compare the whole run with the one device that has trained already. Every rank gets the verdict."""
        state = trainer.state_dict()
        verdict = None
        if self.single is not None:
            found = compare((state, results), self.single, exact=True, ranks=self.comm.size)
            verdict = (found.passed, found.line)
        return Verdict(*from_all(self.comm, verdict)[0])


# ---- the model clock -------------------------------------------------------------------------------------------------

CLOCK_SHAPE = {"layers": 8, "hidden": 32, "seq_len": 16, "vocabulary": 256}
CLOCK_RUN = "--layers 8 --hidden 32 --heads 4 --seq-len 16 --vocab-size 256 --microbatches 8 --steps 1"


def timeline_on_model_clock(schedule: str, message: int) -> Timeline:
    """Train one step on 4 threads, m = 8, and return the timeline in operations; a message takes `message` of them."""

    def step(comm: Communicator) -> None:
        make_trainer(comm, f"{CLOCK_RUN} --global-batch 8 --pp 4 --schedule {schedule}").step(0)

    _, trace = traced(4, step, network=Network(alpha=message), clock=partial(ModelClock, 1.0))
    return measured_timeline(trace)


def measured_timeline(trace: Trace) -> Timeline:
    """Read the timeline of a traced step of one pipeline: seconds, 0 when its first action begins.

    The computations named as actions ("2F0") count; the rest of the trace is left out.
    """
    ranks: list[list[Slot]] = []
    for rank in sorted(trace.ranks):
        slots = []
        for one in trace.ranks[rank][COMPUTATION]:
            action = action_of(one.name)
            if action is not None:
                slots.append(Slot(action, one.start, one.end))
        ranks.append(slots)
    return timeline_of("", ranks)


def same_times(measured: Timeline, predicted: Timeline) -> bool:
    """Return True if every action starts and ends at the predicted whole number, in the same order on every rank."""
    found = [[(slot.action, round(slot.start), round(slot.end)) for slot in row] for row in measured.ranks]
    return found == [[(slot.action, slot.start, slot.end) for slot in row] for row in predicted.ranks]


def stage_durations(block: Mapping[str, int], head: Mapping[str, int], stages: int, message: int) -> Durations:
    """Return the operations of each stage's actions from those of a block and those that the head adds, by F, I, W.

    The cuts are the trainer's: as equal as whole blocks allow. B is the sum of I and W.
    """
    table, costs = {}, [0, *[block["F"]] * CLOCK_SHAPE["layers"], head["F"]]
    for s, parts in enumerate(balanced_cuts(costs, stages)):
        last = s == stages - 1
        blocks = parts - (s == 0) - last
        for kind in "FIW":
            table[s, kind] = blocks * block[kind] + last * head[kind]
        table[s, "B"] = table[s, "I"] + table[s, "W"]
    return Durations(comm=message, table=table)


def step_with_replicas(overlap: bool) -> float:
    """Return the seconds of a step of two pipelines of two ranks, 1F1B, m = 8, on the model clock and a slow network.

    With `overlap` a gradient travels as soon as it is complete, in the cool-down; without it, after all backwards.
    """
    speed = 1e9  # operations per second

    def step(comm: Communicator) -> float:
        trainer = make_trainer(comm, f"{CLOCK_RUN} --global-batch 16 --dp 2 --pp 2 --schedule 1f1b")
        if not overlap:
            trainer.last_microbatch = None  # no microbatch is the last: all buckets wait for `synchronize`
        trainer.step(0)
        return comm.clock.now()

    network = Network(alpha=5e4 / speed, beta=6 / speed)
    return max(run_local(4, step, clock=partial(ModelClock, speed), network=network))


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_activations(alive: int, blocks: int, recompute: bool) -> float:
    """Count the most activations while a stage does `alive` forwards, then as many backwards; in inputs of a block."""
    length, hidden = 16, 16
    config = GPTConfig(vocab_size=256, n_positions=length, n_embd=hidden, n_layer=blocks, n_head=2)
    stage = PipelineStage(GPT(config, dtype="float64", recompute=recompute).segments[1 : 1 + blocks])
    ledger = MemoryLedger()
    with ledger.recording():
        for i in range(alive):
            stage.forward(i, Tensor(np.ones((1, length, hidden)), requires_grad=True))
        for i in range(alive):
            stage.backward(i, np.ones((1, length, hidden)))
    peak = max(held[KINDS.index("activations")] for _, held in ledger.moments)
    return peak / (length * hidden * ELEMENT)


class CountsTwice(Trainer):
    """A trainer that gives microbatch 1 the samples of microbatch 0."""

    def samples(self, replica: int, microbatch: int) -> Any:
        return super().samples(replica, 0 if microbatch == 1 else microbatch)


class DropsTied(Trainer):
    """A trainer whose last stage keeps the head's contribution to the token embedding's gradient."""

    def __init__(self, config: TrainConfig, mesh: DeviceMesh, tokens: Tokens) -> None:
        super().__init__(config, mesh, tokens)
        if self.pipeline is not None:
            self.pipeline.fetch_tied_gradient = lambda: None


# ---- references and refusals -----------------------------------------------------------------------------------------


def gradients_on_one_device(weights: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Compute the weights' gradients of sum(y^2)/2 through layers y = tanh(x A), one microbatch after the other."""
    gradients = np.zeros_like(weights)
    for microbatch in batch:
        kept = [microbatch]
        for weight in weights:
            kept.append(np.tanh(kept[-1] @ weight))
        gradient = kept[-1]
        for s in reversed(range(len(weights))):
            d_product = gradient * (1 - kept[s + 1] ** 2)
            gradients[s] += kept[s].T @ d_product
            gradient = d_product @ weights[s].T
    return gradients


def refusal(attempt: Callable[..., Any], *arguments: Any) -> str:
    """Return the message of the UsageError or CommunicationError with which the attempt must fail."""
    try:
        attempt(*arguments)
    except (UsageError, CommunicationError) as error:
        return str(error)
    raise AssertionError(f"{attempt.__name__} has refused nothing")
