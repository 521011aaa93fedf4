"""Plant four mistakes in a mixture of experts, and run the checks that may notice them (section 12.6).

Each is a Trainer with one method changed. A run has four ranks, which are threads: dp 2, tp 2, ep 2. There are more
experts than most steps have uses for, so that some have no tokens.
"""

from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from chapters.support.instruments import same_on_all_ranks
from chapters.support.training import parsed, trainer_for
from minipar.comm import Communicator, run_local
from minipar.compare.differences import compare
from minipar.compare.recorder import Recorder
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.train.data import Tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import verify

RANKS, STEPS, VOCAB = 4, 20, 31
MODEL = f"--model mixtral --layers 2 --hidden 24 --heads 4 --seq-len 8 --vocab-size {VOCAB}"
SHAPE = {"num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 40, "num_experts_per_tok": 2}
RUN = "--global-batch 4 --dtype float64 --lr 4e-3 --weight-decay 0.3 --clip-grad 0.5"
FLAGS = f"{MODEL} {RUN} --dp 2 --tp 2 --ep 2"
VISIBLE = 0.01  # relative: what a person sees in a plot of two curves


class TimesP(Trainer):
    """Mistake 1: the gradients of experts are multiplied by P, as if a mean over dp had divided them."""

    def gradient(self, step: int) -> float:
        loss = super().gradient(step)
        for p in self.ddp.parameters():
            if p.placement.ep is not None:
                p.grad *= self.mesh.ep.size
        return loss


class NormWithoutExperts(Trainer):
    """Mistake 2: the norm is that of the parameters that every rank has; experts are clipped by it too."""

    def clip_grad_norm(self, max_norm: float | None) -> float:
        shared = [p for p in self.ddp.parameters() if p.placement.ep is None]
        norm = clip_grad_norm(shared, max_norm, self.mesh.dp_cp, self.mesh.tp)
        for p in self.ddp.parameters():
            p.grad *= 1 if p in shared else min(1.0, (max_norm or np.inf) / (norm + 1e-6))
        return norm


class RouterNotSummed(Trainer):
    """Mistake 3: each rank of tp keeps its own part of the router's gradient."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        routers = {p for name, p in self.model.named_parameters() if "gate" in name}
        sum_partial: Any = self.ddp.before_reduce
        self.ddp.before_reduce = lambda parameters: sum_partial([p for p in parameters if p not in routers])


class IdleExpertsDoNotDecay(Trainer):
    """Mistake 4: an expert without tokens has no gradient, so the optimizer passes over it, weight decay included."""

    def clip_grad_norm(self, max_norm: float | None) -> float:
        for p in self.ddp.parameters():
            p.decays = p.ndim >= 2 and bool(p.grad.any())
        return super().clip_grad_norm(max_norm)


MISTAKES: dict[str, type[Trainer]] = {
    "nothing broken": Trainer,
    "1. experts times P": TimesP,
    "2. norm without experts": NormWithoutExperts,
    "3. router not summed": RouterNotSummed,
    "4. idle experts do not decay": IdleExpertsDoNotDecay,
}


def text() -> Tokens:
    """Return a text that can be learned: each token is followed by one of three others."""
    random = np.random.Generator(np.random.Philox(7))
    followers, ids = random.integers(0, VOCAB, (VOCAB, 3)), [0]
    for choice in random.integers(0, 3, 2000):
        ids.append(int(followers[ids[-1], choice]))
    return Tokens(np.array(ids, np.uint8), "a text")


def args_of(steps: int) -> Namespace:
    """Return the flags of a run of so many steps, read."""
    return parsed(f"{FLAGS} --steps {steps}", RANKS, **SHAPE)


def share_of_parameters() -> float:
    """Return which share of the parameters of the model of all runs is the experts'."""
    sizes = {name: p.size for name, p in args_of(STEPS).shape.build(seed=None).named_parameters()}
    return sum(size for name, size in sizes.items() if "experts" in name) / sum(sizes.values())


def trained(comm: Communicator, kind: type[Trainer], steps: int, record: str) -> dict[str, Any]:
    """Train on one of the four ranks and record the first step. Return losses, norms, and whether one device agrees."""
    trainer = trainer_for(comm, args_of(steps), text(), kind)
    results = [Recorder(trainer, record).step(0)]
    for step in range(1, steps):
        results.append(trainer.step(step))
    routers = [p.data for name, p in trainer.model.named_parameters() if "gate" in name]
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "agree": same_on_all_ranks(comm, *routers),
        "verified": verify(trainer, results).passed,
    }


def examine(name: str) -> dict[str, Any]:
    """Train with a mistake, and one step without. Return losses, norms, what compare names, and what notices.

    Ranks: all hold the same routers. One device: parameters, losses and norms of all steps are its own.
    """
    with TemporaryDirectory() as folder:
        right, wrong = str(Path(folder, "right")), str(Path(folder, "wrong"))
        run_local(RANKS, trained, Trainer, 1, right)
        seen = run_local(RANKS, trained, MISTAKES[name], STEPS, wrong)[0]
        finding = compare(right, wrong)
    first = finding.differences[0] if finding.differences else None
    noticed = {"compare": first is not None, "ranks": not seen["agree"], "one device": not seen["verified"]}
    ratio = "no one factor" if first is None or first.ratio is None else f"{first.ratio:.4g} times"
    return {
        "losses": seen["losses"],
        "norms": seen["norms"],
        "named": "" if first is None else f"{first.quantity}, {ratio}: {first.group}",
        "noticed": sorted(check for check, objects in noticed.items() if objects),
    }


def curves_that_differ(run: dict[str, Any], right: dict[str, Any]) -> set[str]:
    """Return which of the two printed curves, loss and norm, a person would see differ from the right run's."""
    found = set()
    for curve, name in (("losses", "loss"), ("norms", "norm")):
        if max(abs(a / b - 1) for a, b in zip(run[curve], right[curve], strict=True)) > VISIBLE:
            found.add(name)
    return found
