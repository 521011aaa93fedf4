"""The runs that chapter 14 lets the reader diagnose. READ NO FURTHER before you have: the answers are below.

Each patient is a run of a small model in some layout, next to a run of the right code on one device. `record_pair`
writes the records of both. The mistakes are those of chapters 4 to 13, made on purpose.

    python -m chapters.support.ch14.patients OUT.json

runs the six of the chapter in float32 and in float64, about two minutes on two cores. patients.json is what it wrote.







































"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np

from chapters.support.ch14 import layouts
from chapters.support.training import parsed, trainer_for
from minipar.comm import Communicator, run_local
from minipar.compare.differences import as_text, compare
from minipar.compare.recorder import Recorder
from minipar.compare.records import read_run, read_step
from minipar.more.context import context_parallel as context
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.placement import Replicate
from minipar.train.data import Tokens
from minipar.train.trainer import StepResult, Trainer

RECORD = Path(__file__).with_name("patients.json")
VOCAB = 61
RECORDED = 24  # steps
NOISE = 1e-4  # parameters whose gradients are smaller parts of the model's largest are not looked at
MODEL = "--layers 4 --hidden 24 --heads 4 --seq-len 16 --vocab-size 61 --global-batch 16 --lr 4e-3 --steps 24"
MEMORIZES = "--lr 1e-2 --steps 100"  # the model and the text of the eighteen layouts
EXPERTS = "--model mixtral"
SHAPES = {  # by the type of model: what has no flag
    "gpt2": {},
    "llama": {"intermediate_size": layouts.FFN},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4},
}


class CountsMicrobatchesAsBatches(Trainer):
    """Chapter 4: the gradient is summed over microbatches, each of which was divided by its own tokens."""

    def gradient(self, step: int) -> float:
        self.loss_factor *= self.args.microbatches
        loss = super().gradient(step)
        self.loss_factor /= self.args.microbatches
        return loss


class SumsWholeGradients(Trainer):
    """Chapter 6: gradients that every tensor-parallel rank has whole are summed over tp."""

    def gradient(self, step: int) -> float:
        loss = super().gradient(step)
        for parameter in self.ddp.parameters():
            if isinstance(parameter.placement.tp, Replicate):
                parameter.grad *= self.mesh.tp.size
        return loss


class AdvancesWithMicrobatches(Trainer):
    """Chapter 9: the schedule of the learning rate advances with every microbatch."""

    def update(self, step: int, loss: float) -> StepResult:
        return replace(super().update(step * self.args.microbatches, loss), step=step)


class ClipsEachStage(Trainer):
    """Chapter 9: each pipeline stage clips by the norm of its own gradients."""

    def clip_grad_norm(self, max_norm: float | None) -> float:
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.ddp.comm, self.mesh.tp, None)


class MultipliesExperts(Trainer):
    """Chapter 12: the gradients of experts are multiplied by ep."""

    def gradient(self, step: int) -> float:
        loss = super().gradient(step)
        for name, parameter in self.model.named_parameters():
            if ".experts." in name:
                parameter.grad *= self.mesh.ep.size
        return loss


class ForgetsZeroGrad(Trainer):
    """Chapter 4: the gradient of the step before is still there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before: list[np.ndarray] = []

    def gradient(self, step: int) -> float:
        loss = super().gradient(step)
        for parameter, old in zip(self.ddp.parameters(), self.before, strict=False):
            parameter.grad += old
        self.before = [parameter.grad.copy() for parameter in self.ddp.parameters()]
        return loss


class DecaysEverything(Trainer):
    """Chapter 5: norms and biases decay, too, as the one-dimensional shards of matrices would not."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for parameter in self.ddp.parameters():
            parameter.decays = not parameter.decays


def own_block_in_every_hop() -> AbstractContextManager[Any]:
    """Chapter 11: backward sends the blocks around the ring, and computes with its own in every hop."""
    right = context.attend_block_backward
    own: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def wrong(place: Any, source: int, dout: Any, q: Any, block: Any, *rest: Any) -> Any:
        if source == place.rank:
            own[place] = block
        return right(place, source, dout, q, own[place], *rest)

    return patch.object(context, "attend_block_backward", wrong)


@dataclass(frozen=True)
class Patient:
    """A run: the flags of its layout, those of both runs, its ranks, and what is wrong with it."""

    layout: str
    ranks: int
    answer: int  # the number of the cause in the chapter's list, or in the exercise's
    both: str = ""
    trainer: type[Trainer] = Trainer
    broken: Callable[[], AbstractContextManager[Any]] = nullcontext


PATIENTS = {
    "A": Patient("--microbatches 4", 1, 1, "", CountsMicrobatchesAsBatches),
    "B": Patient("--tp 4", 4, 3, "", SumsWholeGradients),
    "C": Patient("--tp 2", 2, 0, MEMORIZES),
    "D": Patient("--dp 2 --microbatches 4", 2, 5, "--warmup-steps 12", AdvancesWithMicrobatches),
    "E": Patient("--cp 2", 2, 7, "", broken=own_block_in_every_hop),
    "F": Patient("--pp 2 --microbatches 4", 2, 9, "--clip-grad 0.5", ClipsEachStage),
    # Those of exercise 20.
    "1": Patient("--dp 2 --ep 2", 2, 4, EXPERTS, MultipliesExperts),
    "2": Patient("--dp 2 --zero-stage 2", 2, 6, "", ForgetsZeroGrad),
    "3": Patient("--dp 2 --zero-stage 3", 2, 8, "--weight-decay 0.1", DecaysEverything),
}


@cache
def text() -> Tokens:
    """Return a text that can be learned: each token is followed by one of four others."""
    random = np.random.Generator(np.random.Philox(17))
    followers = random.integers(0, VOCAB, (VOCAB, 4))
    ids = [0]
    for choice in random.integers(0, 4, 8000):
        ids.append(int(followers[ids[-1], choice]))
    return Tokens(np.array(ids, np.uint8), "a text")


def train(
    comm: Communicator, flags: str, tokens: Tokens, kind: type[Trainer], directory: str, most_steps: int | None = None
) -> list[list[float]]:
    """Train on one rank and record, for `most_steps` steps at most. Return each step's loss and gradient norm."""
    args = parsed(flags, comm.size)
    args.shape = replace(args.shape, **SHAPES[args.shape.model_type])
    trainer = trainer_for(comm, args, tokens, kind)
    recorder = Recorder(trainer, directory)
    results = []
    for step in range(args.steps if most_steps is None else most_steps):
        take_step = recorder.step if step < RECORDED else trainer.step
        results.append(take_step(step))
    return [[result.loss for result in results], [result.grad_norm for result in results]]


def record_pair(
    name: str, folder: str, dtype: str = "float32", steps: int | None = None
) -> dict[str, list[list[float]]]:
    """Record a patient and the right run on one device, in folder/right and folder/run.

    Only the first `steps` steps are taken. Return losses and norms.
    """
    patient = PATIENTS[name]
    if patient.both == MEMORIZES:
        model, tokens = f"{layouts.MODEL} --global-batch {layouts.BATCH}", layouts.text()
    else:
        model, tokens = MODEL, text()
    flags = f"{model} {patient.both} --dtype {dtype}"
    right = run_local(1, train, flags, tokens, Trainer, str(Path(folder, "right")), steps)[0]
    with patient.broken():
        layout = f"{flags} {patient.layout}"
        run = run_local(patient.ranks, train, layout, tokens, patient.trainer, str(Path(folder, "run")), steps)[0]
    assert all(map(math.isfinite, run[0]))
    return {"right": right, "run": run}


def examine(name: str, dtype: str = "float32") -> dict[str, Any]:
    """Record a patient and the right run. Return losses and norms, compare's words and the largest difference."""
    with TemporaryDirectory() as folder:
        found: dict[str, Any] = record_pair(name, folder, dtype)
        right, run = Path(folder, "right"), Path(folder, "run")
        finding = compare(right, run)
        found["words"] = as_text(finding)
        found["step"] = finding.step
        found["quantity"] = finding.differences[0].quantity if finding.differences else ""
        found["largest"] = largest_difference(right, run)
    return found


def largest_difference(right: Path, run: Path) -> float:
    """Return the largest difference of a strip of a gradient over all steps, as a part of the parameter's largest."""
    shapes = read_run(right).shapes
    largest = 0.0
    for step in range(RECORDED):
        a, b = (read_step(folder / f"step-{step}.npz", shapes) for folder in (right, run))
        noise = NOISE * max(np.abs(a[f"gradient/{name}"]).max() for name in shapes)
        for name in shapes:
            ours, theirs = a[f"gradient/{name}"], b[f"gradient/{name}"]
            if np.abs(ours).max() > noise:
                largest = max(largest, float(np.abs(ours - theirs).max() / np.abs(ours).max()))
    return largest


def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Read what `main` wrote: for each precision and patient, what `examine` returned."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def main(out: str) -> None:
    """Examine the six runs of the chapter in two precisions, and write what was found."""
    found: dict[str, dict[str, Any]] = {"float32": {}, "float64": {}}
    for dtype, runs in found.items():
        for name in "ABCDEF":
            runs[name] = examine(name, dtype)
            Path(out).write_text(json.dumps(found), encoding="utf-8")
            print(f"{dtype} {name}: {runs[name]['words']}", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
