"""Train pipelines on all ranks beside one device, with any schedule, for chapters 7 and 8."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from chapters.support.share_work import from_all
from chapters.support.training import parsed, text_for, trainer_for
from chapters.support.whole_runs import verdict_of
from minipar.comm import Communicator, DeviceMesh
from minipar.errors import CommunicationError, UsageError
from minipar.train.trainer import Trainer
from minipar.train.verify import Verdict, one_device, verify

ELEMENT = 8  # bytes of a float64

# A step on the model clock
CLOCK_SHAPE = {"layers": 8, "hidden": 32, "seq_len": 16, "vocabulary": 256}
CLOCK_RUN = "--layers 8 --hidden 32 --heads 4 --seq-len 16 --vocab-size 256 --microbatches 8 --steps 1"


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
    There are `per_stage` microbatches for each stage, of `samples` = 2 samples of `length` tokens. The same steps are
    done once on one device.
    """

    length, hidden, vocabulary, samples, steps = 16, 16, 256, 2, 2

    def __init__(self, comm: Communicator, per_stage: int = 1) -> None:
        self.comm = comm
        self.stages = max(size for size in range(1, 9) if comm.size % size == 0)
        self.replicas, self.microbatches = comm.size // self.stages, max(2, per_stage * self.stages)
        self.pipe = DeviceMesh(comm, dp=self.replicas, pp=self.stages).pp
        args = self.args_of("gpipe")
        self.tokens = text_for(args)
        self.single = None
        if comm.rank == 0:
            single = one_device(args, self.tokens)
            results = list(single.train())
            self.single = (single.state_dict(), results)

    def args_of(self, schedule: str, stages: int | None = None) -> Namespace:
        """Return the trainer's flags, read. Without a pipeline there is nothing to schedule."""
        stages = stages or self.stages
        pipeline = f"--pp {stages} --schedule {schedule} " if stages > 1 else ""
        flags = (
            f"--layers {2 * self.stages + 1} --hidden {self.hidden} --heads 2 --seq-len {self.length} "
            f"--global-batch {self.samples * self.microbatches * self.replicas} --microbatches {self.microbatches} "
            f"--dtype float64 --reduction ordered --dropout 0.1 --clip-grad 0.5 --lr 3e-3 --steps {self.steps}"
        )
        return parsed(pipeline + flags, self.comm.size)

    def train(self, schedule: str, stages: int | None = None, kind: type[Trainer] = Trainer) -> Run:
        """Train with this schedule and compare with one device. With fewer `stages` there are more replicas."""
        stages = stages or self.stages
        trainer = trainer_for(self.comm, self.args_of(schedule, stages), self.tokens, kind)
        alive = [0]  # after each action
        after_action = trainer.after_action

        def count(action: Any) -> None:
            alive.append(sum(len(stage.alive) for stage in trainer.executor.stages.values()))
            after_action(action)

        trainer.after_action = count  # type: ignore[method-assign]
        self.comm.traffic.reset()
        results = list(trainer.train())
        sent = self.comm.traffic.bytes("send", "pp") / self.steps
        if trainer.pipeline:
            home = trainer.executor.schedule.home
            ends = {home[0], home[len(home) - 1]}
            if len(ends) == 2 and trainer.mesh.pp.rank in ends:
                sent -= self.vocabulary * self.hidden * ELEMENT  # the tied embedding or its gradient
        if stages == self.stages:
            verdict = self._compare(trainer, results)
        else:
            verdict = verify(trainer, results)  # other replicas: another order of sums
        messages = sent / (self.samples * self.length * self.hidden * ELEMENT)
        return Run(verdict, [result.loss for result in results], messages, max(alive))

    def _compare(self, trainer: Trainer, results: Any) -> Verdict:
        """Compare the whole run with the one device that has trained already. Every rank gets the verdict."""
        state = trainer.state_dict()
        verdict = None
        if self.single is not None:
            found = verdict_of((state, results), self.single, self.comm.size, exact=True)
            verdict = (found.passed, found.line)
        return Verdict(*from_all(self.comm, verdict)[0])


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
